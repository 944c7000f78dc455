"""Models that label the pixels of images.

B images, C labels, Q masks of an image, R, S rows and columns of cells.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSemanticSegmentation, AutoModelForUniversalSegmentation

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_preprocessing
from headway_export.huggingface.zero_shot_segmenters import ZERO_SHOT_SEGMENTERS, read_zero_shot_segmenter
from headway_export.source import ExportSource
from headway_server.bundles import SemanticSegmentation
from headway_training.folders import first_line, labels_of

SEMANTIC_HEADS: Final = (
    "ForSemanticSegmentation",
    "ForUniversalSegmentation",
    "ForInstanceSegmentation",
    "ForImageSegmentation",
)
PIXEL_CLASSIFIERS: Final = ("segformer", "beit", "data2vec-vision", "upernet", "dpt", "mobilevit", "mobilenet_v2")
"""Families whose logits are those of labels, by model type."""
MASK_CLASSIFIERS: Final[dict[str, int | None]] = {"maskformer": None, "mask2former": 384}
"""Families that label masks, by model type, and the side that their post-processing enlarges masks to first."""


class HuggingFacePixelClassifier(nn.Module):
    """A model of `transformers` that labels pixels."""

    def __init__(self, model: nn.Module, *, is_bgr: bool) -> None:
        super().__init__()
        self.model = model
        self.is_bgr = is_bgr

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> logits (B, C, R, S)."""
        pixels = pixel_values.flip(1) if self.is_bgr else pixel_values
        return cast("Tensor", self.model(pixel_values=pixels, return_dict=True).logits)


class HuggingFaceMaskClassifier(nn.Module):
    """A model of `transformers` that labels masks.

    Cheng et al. 2021, "Per-Pixel Classification is Not All You Need for Semantic Segmentation".
    """

    def __init__(self, model: nn.Module, *, side: int | None) -> None:
        """Takes a model, and the side that masks are enlarged to; None: they stay as they are."""
        super().__init__()
        self.model = model
        self.side = side

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> sums of probabilities (B, C, R, S); section 3.4 there."""
        output = self.model(pixel_values=pixel_values, return_dict=True)
        masks = output.masks_queries_logits  # (B, Q, R, S)
        if self.side is not None:
            masks = functional.interpolate(masks, (self.side, self.side), mode="bilinear", align_corners=False)
        labels = output.class_queries_logits.softmax(dim=-1)[..., :-1]  # (B, Q, C), without that of no object
        return torch.einsum("bqc,bqhw->bchw", labels, masks.sigmoid())


def read_semantic_segmenter(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model that labels pixels.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    family = folder.config.model_type
    if family in ZERO_SHOT_SEGMENTERS:
        return read_zero_shot_segmenter(folder)
    if family not in PIXEL_CLASSIFIERS and family not in MASK_CLASSIFIERS:
        raise SourceError(
            f"{folder.path}: labels pixels as {family}, and how its outputs are read is not known; known are "
            f"{', '.join(sorted((*PIXEL_CLASSIFIERS, *MASK_CLASSIFIERS, *ZERO_SHOT_SEGMENTERS)))}"
        )
    preprocessing, is_bgr = read_preprocessing(folder)
    if (preprocessing.resize, preprocessing.resize_size) != ("stretch", None):
        raise SourceError(
            f"{folder.path / PREPROCESSOR_FILE}: does not stretch images to the size of the model, and the "
            'post-processing stretches maps to images; write a size there, such as "size": {"height": 512, "width": '
            '512}, and "do_center_crop": false'
        )
    if is_bgr and family in MASK_CLASSIFIERS:
        raise SourceError(f"{folder.path / PREPROCESSOR_FILE}: turns colours around, and {family} reads RGB")

    def load() -> nn.Module:
        if family in MASK_CLASSIFIERS:
            model = folder.load(AutoModelForUniversalSegmentation)
            return HuggingFaceMaskClassifier(model, side=MASK_CLASSIFIERS[family]).eval()
        return HuggingFacePixelClassifier(folder.load(AutoModelForSemanticSegmentation), is_bgr=is_bgr).eval()

    module, labels = load(), labels_of(folder.config)
    pixels = torch.rand(1, 3, preprocessing.height, preprocessing.width, generator=torch.Generator().manual_seed(0))
    try:
        with torch.inference_mode():
            num_labels = module(pixels).shape[1]
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {family} does not read images of {preprocessing.height} x {preprocessing.width} "
            f"({first_line(error)})"
        ) from error
    if num_labels != len(labels):
        raise SourceError(f"{folder.path}: has {len(labels)} labels, and its pixels have {num_labels}")
    source = folder.source(
        cast("Any", module).model,
        module,
        make_reference=load,
        image_preprocessing=preprocessing,
        labels=labels,
        semantic_segmentation=SemanticSegmentation(scores="sum" if family in MASK_CLASSIFIERS else "softmax"),
    )
    return source, ()
