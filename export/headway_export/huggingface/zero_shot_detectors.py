"""Models that find objects of the caller's labels in images.

B rows, T tokens of a label, C labels, Q boxes of an image, D width of a label's embedding.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForZeroShotObjectDetection

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_preprocessing
from headway_export.huggingface.towers import LabelReader
from headway_export.source import ExportSource
from headway_server.bundles import Detection
from headway_training.folders import first_line

ZERO_SHOT_DETECTORS: Final = frozenset({"owlvit", "owlv2"})
"""Families by model type."""
OUTPUT_BOUND: Final = 1e-4
"""Largest difference of a logit or of a side of a box between the graphs' arithmetic and the whole model."""
_THRESHOLD: Final = 0.1
"""That of the library's post-processing."""
_TINY: Final = 1e-6
"""Added to a length before it divides, as in the library."""


class LabelTower(nn.Module):
    """The part of a detector of `transformers` that reads labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """(B, T), (B, T), 1 at tokens and 0 behind them -> `embedding` (B, D)."""
        owl = cast("Any", self.model).base_model
        states = owl.text_model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
        embedding = functional.normalize(owl.text_projection(states.pooler_output), dim=-1)
        return {"embedding": embedding / (1 + _TINY)}


class OwlDetector(nn.Module):
    """OWL-ViT (Minderer et al. 2022, arXiv 2205.06230) or OWLv2, with the product of boxes and labels apart.

    The logit of a label is (cosine + shift) scale, of which shift and scale are a box's own.
    """

    def __init__(self, model: nn.Module, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.text_encoder = LabelTower(model)
        self.max_length = max_length

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `label_queries` (B, Q, D), `logit_offsets` (B, Q), `boxes` (B, Q, 4)."""
        model = cast("Any", self.model)
        feature_map, _ = model.image_embedder(pixel_values)
        states = feature_map.flatten(1, 2)  # (B, Q, width)
        head = model.class_head
        queries = head.dense0(states)
        queries = queries / (torch.linalg.vector_norm(queries, dim=-1, keepdim=True) + _TINY)
        scale = functional.elu(head.logit_scale(states)) + 1  # (B, Q, 1)
        return {
            "label_queries": queries * scale,
            "logit_offsets": (head.logit_shift(states) * scale)[..., 0],
            "boxes": model.box_predictor(states, feature_map),
        }


def read_zero_shot_detector(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a detector of the caller's labels.

    Raises:
        SourceError: The folder is incomplete, or its model or what goes with it cannot be served.
    """
    preprocessing, is_bgr = read_preprocessing(folder)
    if is_bgr:
        raise SourceError(f"{folder.path / PREPROCESSOR_FILE}: turns colours around, and a detector reads RGB")
    reader = LabelReader.of(folder)

    def load() -> tuple[nn.Module, OwlDetector]:
        model = folder.load(AutoModelForZeroShotObjectDetection)
        return model, OwlDetector(model, reader.max_length).eval()

    model, detector = load()
    num_queries = _check_whole(folder, detector, reader, (preprocessing.height, preprocessing.width))
    source = folder.source(
        model,
        detector,
        make_reference=lambda: load()[1],
        image_preprocessing=preprocessing,
        **reader.parts,
        detection=Detection(
            scores="best_sigmoid",
            num_queries=num_queries,
            max_objects=num_queries,
            labels="embedded",
            threshold=_THRESHOLD,
        ),
    )
    return source, ()


def _check_whole(folder: ModelFolder, detector: OwlDetector, reader: LabelReader, size: tuple[int, int]) -> int:
    """Holds logits and boxes against those of the whole model, and returns the number of boxes.

    Raises:
        SourceError: They differ, or the model does not read such images or labels.
    """
    model: Any = detector.model
    pixels = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    try:
        with torch.inference_mode():
            whole = model(pixel_values=pixels, return_dict=True, **reader.samples())
            found = detector(pixels)
            embeddings = reader.embed_samples(detector.text_encoder)
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {type(model).__name__} does not read images of {size[0]} x {size[1]}, which "
            f"{PREPROCESSOR_FILE} asks for, or the tokens of its tokenizer ({first_line(error)})"
        ) from error
    logits = found["label_queries"] @ embeddings.T + found["logit_offsets"][..., None]
    for what, ours, own in (("logits", logits, whole.logits), ("boxes", found["boxes"], whole.pred_boxes)):
        bound = OUTPUT_BOUND * max(1.0, float(own.abs().max()))
        if not (error_size := float((ours - own).abs().max())) <= bound:
            raise SourceError(
                f"{folder.path}: images and labels apart give other {what} than {type(model).__name__} does with both "
                f"(they differ by {error_size:.1e}, limit {bound:.0e}); not supported"
            )
    return int(logits.shape[1])
