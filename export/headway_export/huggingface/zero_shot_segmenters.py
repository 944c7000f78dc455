"""Models that find the pixels of the caller's labels.

B rows, L layers that the decoder reads, N tokens of an image, T tokens of a label, D width of the decoder, P width of a
label's embedding, R, S rows and columns of a map.
"""

from __future__ import annotations

import math
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import CLIPSegForImageSegmentation

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_preprocessing
from headway_export.huggingface.towers import LabelReader
from headway_export.source import ExportSource
from headway_server.bundles import SemanticSegmentation
from headway_training.folders import first_line

ZERO_SHOT_SEGMENTERS: Final = frozenset({"clipseg"})
"""Families by model type."""
OUTPUT_BOUND: Final = 1e-4
"""Largest difference of a logit between the graphs' arithmetic and the whole model, relative to the largest."""


class LabelTower(nn.Module):
    """The part that reads labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """(B, T), (B, T), 1 at tokens and 0 behind them -> `embedding` (B, P)."""
        clip = cast("Any", self.model).clip
        features = clip.get_text_features(input_ids=input_ids, attention_mask=attention_mask)
        return {"embedding": features.pooler_output}


class MapDecoder(nn.Module):
    """The part that makes a map of an image's features and a label."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor, embedding: Tensor) -> dict[str, Tensor]:
        """(B, L, N, D), (B, P) -> `logits` (B, R, S); Lueddecke and Ecker 2022 (arXiv 2112.10003), section 3."""
        decoder = cast("Any", self.model).decoder
        states = torch.zeros_like(features[:, 0])  # (B, N, D)
        for number, layer in enumerate(decoder.layers):
            states = states + features[:, number]
            if number == decoder.conditional_layer:
                scale, shift = decoder.film_mul(embedding), decoder.film_add(embedding)
                states = scale[:, None] * states + shift[:, None]
            states = layer(states, attention_mask=None)
        cells = states[:, 1:].transpose(1, 2)  # (B, D, N - 1), without the class token
        side = math.isqrt(cells.shape[2])
        cells = cells.reshape(-1, cells.shape[1], side, side)
        return {"logits": decoder.transposed_convolution(cells).squeeze(1)}


class ClipSegmenter(nn.Module):
    """CLIPSeg of `transformers`, with what it reads of images, of labels and of both apart."""

    def __init__(self, model: nn.Module, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.text_encoder = LabelTower(model)
        self.decoder = MapDecoder(model)
        self.max_length = max_length

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `features` (B, L, N, D), of the last layer first."""
        model = cast("Any", self.model)
        states = model.clip.vision_model(
            pixel_values=pixel_values, interpolate_pos_encoding=True, output_hidden_states=True, return_dict=True
        ).hidden_states
        layers = [states[layer + 1] for layer in reversed(model.extract_layers)]
        features = [reduce(layer) for reduce, layer in zip(model.decoder.reduces, layers, strict=True)]
        return {"features": torch.stack(features, dim=1)}


def read_zero_shot_segmenter(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model of pixels of the caller's labels.

    Raises:
        SourceError: The folder is incomplete, or its model or what goes with it cannot be served.
    """
    preprocessing, is_bgr = read_preprocessing(folder)
    if is_bgr or (preprocessing.resize, preprocessing.resize_size) != ("stretch", None):
        raise SourceError(
            f"{folder.path / PREPROCESSOR_FILE}: does not stretch images to the size of the model, or turns colours "
            'around; write a size there, such as "size": {"height": 352, "width": 352}, and no crop'
        )
    reader = LabelReader.of(folder)

    def load() -> tuple[nn.Module, ClipSegmenter]:
        model = folder.load(CLIPSegForImageSegmentation)
        return model, ClipSegmenter(model, reader.max_length).eval()

    model, segmenter = load()
    _check_whole(folder, segmenter, reader, (preprocessing.height, preprocessing.width))
    source = folder.source(
        model,
        segmenter,
        make_reference=lambda: load()[1],
        image_preprocessing=preprocessing,
        **reader.parts,
        semantic_segmentation=SemanticSegmentation(scores="sigmoid", labels="embedded"),
    )
    return source, ()


def _check_whole(folder: ModelFolder, segmenter: ClipSegmenter, reader: LabelReader, size: tuple[int, int]) -> None:
    """Holds maps against those of the whole model.

    Raises:
        SourceError: They differ, or the model does not read such images or labels.
    """
    model: Any = segmenter.model
    pixels = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    try:
        with torch.inference_mode():
            embeddings = reader.embed_samples(segmenter.text_encoder)
            repeated = pixels.expand(len(embeddings), -1, -1, -1)
            whole = model(pixel_values=repeated, return_dict=True, **reader.samples()).logits
            features = segmenter(pixels)["features"].expand(len(embeddings), -1, -1, -1)
            found = segmenter.decoder(features, embeddings)["logits"]
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {type(model).__name__} does not read images of {size[0]} x {size[1]}, which "
            f"{PREPROCESSOR_FILE} asks for, or the tokens of its tokenizer ({first_line(error)})"
        ) from error
    bound = OUTPUT_BOUND * max(1.0, float(whole.abs().max()))
    if found.shape != whole.shape or not float((found - whole).abs().max()) <= bound:
        raise SourceError(
            f"{folder.path}: images and labels apart give other maps than {type(model).__name__} does with both "
            f"(limit {bound:.0e}); not supported"
        )
