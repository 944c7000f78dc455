"""Models that find objects in images, and how their outputs become objects.

B images, Q boxes of an image, C labels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForObjectDetection

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.grounding_detectors import GROUNDING_DETECTORS, read_grounding_detector
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_preprocessing
from headway_export.huggingface.zero_shot_detectors import ZERO_SHOT_DETECTORS, read_zero_shot_detector
from headway_export.source import ExportSource
from headway_server.bundles import Detection, ImagePreprocessing
from headway_training.folders import first_line, labels_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """How the post-processing of a family reads objects."""

    scores: str
    """As in the manifest."""
    most: int | None = None
    """Most objects of an image; None: as many as boxes."""
    reads_sizes: bool = True
    """False for a model whose graph is of one size of images, since it attends to places in maps of stated sizes."""


_ONE_LABEL: Final = _Reading(scores="softmax")
_BEST_PAIRS: Final = _Reading(scores="sigmoid", most=100)
_AS_MANY_PAIRS: Final = _Reading(scores="sigmoid", reads_sizes=False)
DETECTORS: Final = {
    "detr": _ONE_LABEL,
    "table-transformer": _ONE_LABEL,
    "yolos": _ONE_LABEL,
    "conditional_detr": _BEST_PAIRS,
    "deformable_detr": replace(_BEST_PAIRS, reads_sizes=False),
    "rt_detr": _AS_MANY_PAIRS,
    "rt_detr_v2": _AS_MANY_PAIRS,
    "d_fine": _AS_MANY_PAIRS,
}
"""Families by model type."""
_CHECKS_OFF: Final = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Variable of the library."""
_SAMPLE_SIDES: Final = (160, 224)
"""Height and width of the image that outputs are read of, where a model reads several sizes."""


class HuggingFaceDetector(nn.Module):
    """A detector of `transformers`, in its own arithmetic."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `logits` (B, Q, classes), `boxes` (B, Q, 4)."""
        with traceable(self.model):
            output = self.model(pixel_values=pixel_values, return_dict=True)
        return {"logits": output.logits, "boxes": output.pred_boxes}


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Lets the library's code be traced: without checks that ONNX has no operators for, and for inputs of any size.

    `len` of a tensor and `int` of a size are numbers for the tracer, of which the graph would be.
    """
    module = vars(sys.modules[type(model).__module__])
    before = os.environ.get(_CHECKS_OFF)
    os.environ[_CHECKS_OFF], module["len"], module["int"] = "1", _length, _Whole
    try:
        yield
    finally:
        del module["len"], module["int"]
        del os.environ[_CHECKS_OFF]
        if before is not None:
            os.environ[_CHECKS_OFF] = before


def _length(one: Any) -> int:
    """As `len`, but the length of a tensor may be a symbol."""
    return one.shape[0] if isinstance(one, Tensor) else len(one)


class _Whole(int):
    """As `int`, but a size may be a symbol."""

    def __new__(cls, one: Any) -> Any:
        return one if isinstance(one, torch.SymInt) else int(one)


def read_detector(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a detector.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    config = folder.config
    if config.model_type in ZERO_SHOT_DETECTORS:
        return read_zero_shot_detector(folder)
    if config.model_type in GROUNDING_DETECTORS:
        return read_grounding_detector(folder)
    if (reading := DETECTORS.get(config.model_type)) is None:
        raise SourceError(
            f"{folder.path}: finds objects as {config.model_type}, and how its scores are read is not known; known are "
            f"{', '.join(sorted((*DETECTORS, *ZERO_SHOT_DETECTORS, *GROUNDING_DETECTORS)))}"
        )
    if _is_of_timm(config) and find_spec("timm") is None:
        raise SourceError(
            f"{folder.path}: its backbone is computed by the package timm, which is not installed; install it, or take "
            "the weights without it, which DETR's have as their revision no_timm"
        )
    preprocessing, is_bgr = read_preprocessing(folder, of_any_size=True)
    if is_bgr:
        raise SourceError(f"{folder.path / PREPROCESSOR_FILE}: turns colours around, and a detector reads RGB")

    if preprocessing.resize == "fit" and not reading.reads_sizes:
        raise SourceError(
            f"{folder.path / PREPROCESSOR_FILE}: keeps proportions of images, and a graph of {config.model_type} is "
            'of one size; write one there, such as "size": {"height": 800, "width": 800}'
        )

    def load() -> nn.Module:
        return folder.load(AutoModelForObjectDetection)

    model, labels = load(), labels_of(config)
    num_queries, num_classes = _sizes_of(folder, model, preprocessing)
    scheme = Detection.model_validate(
        {"scores": reading.scores, "num_queries": num_queries, "max_objects": reading.most or num_queries}
    )
    if num_classes != len(labels) + scheme.num_extra_classes:
        raise SourceError(
            f"{folder.path}: has {len(labels)} labels and {num_classes} classes; {config.model_type} has "
            f"{len(labels) + scheme.num_extra_classes}"
        )
    source = folder.source(
        model,
        HuggingFaceDetector(model).eval(),
        make_reference=lambda: HuggingFaceDetector(load()).eval(),
        image_preprocessing=preprocessing,
        labels=labels,
        detection=scheme,
    )
    return source, ()


def _is_of_timm(config: Any) -> bool:
    return getattr(getattr(config, "backbone_config", None), "model_type", None) == "timm_backbone"


def _sizes_of(folder: ModelFolder, model: nn.Module, preprocessing: ImagePreprocessing) -> tuple[int, int]:
    """Returns the boxes of an image and the classes of a box, by a run.

    Raises:
        SourceError: The model does not read such images.
    """
    height, width = _SAMPLE_SIDES if preprocessing.resize == "fit" else preprocessing.largest
    pixels = torch.from_numpy(np.random.default_rng(0).random((1, 3, height, width), np.float32))
    try:
        with torch.inference_mode():
            output: Any = model(pixel_values=pixels, return_dict=True)
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {type(model).__name__} does not read images of {height} x {width} ({first_line(error)})"
        ) from error
    _, num_queries, num_classes = output.logits.shape
    return num_queries, num_classes
