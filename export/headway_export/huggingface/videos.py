"""Models that label videos, and how their frames are prepared.

B videos, F frames of a video, C classes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForVideoClassification
from transformers.image_utils import SizeDict

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import open_image_processor, read_preprocessing
from headway_export.source import ExportSource
from headway_server.bundles import VideoFrames
from headway_training.folders import first_line, labels_of


class HuggingFaceVideoClassifier(nn.Module):
    """A classifier of videos of `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.num_frames = int(cast("Any", model).config.num_frames)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, F, 3, height, width) -> logits (B, C)."""
        return cast("Tensor", self.model(pixel_values=pixel_values, return_dict=True).logits)


class _FrameProcessor:
    """A processor of videos, as one of images: of videos of one frame."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.rescale_offset = getattr(processor, "offset", None)
        self.size, self.crop_size = (
            SizeDict(**size) if isinstance(size := getattr(processor, name), dict) else size
            for name in ("size", "crop_size")
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, image: Any, **options: Any) -> dict[str, Any]:
        return {"pixel_values": self._processor([image], **options)["pixel_values"][0]}


def read_video_classifier(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a classifier of videos.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    config = folder.config
    if not isinstance(getattr(config, "num_frames", None), int):
        raise SourceError(f"{folder.path}: {config.model_type} does not state num_frames; it is not supported")
    if config.num_labels == 1:
        raise SourceError(f"{folder.path}: has one output, a score; scores are served of texts alone")
    preprocessing, is_bgr = read_preprocessing(folder, processor=_FrameProcessor(open_image_processor(folder)))
    if is_bgr:
        raise SourceError(f"{folder.path}: turns colours around, and a classifier of videos reads RGB")

    def load() -> nn.Module:
        return folder.load(AutoModelForVideoClassification)

    model = load()
    frames = torch.zeros(1, config.num_frames, 3, preprocessing.height, preprocessing.width)
    try:
        with torch.inference_mode():
            model(pixel_values=frames)
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {type(model).__name__} does not read {config.num_frames} frames of "
            f"{preprocessing.width} x {preprocessing.height}, which its preprocessing makes ({first_line(error)})"
        ) from error
    source = folder.source(
        model,
        HuggingFaceVideoClassifier(model).eval(),
        make_reference=lambda: HuggingFaceVideoClassifier(load()).eval(),
        image_preprocessing=preprocessing,
        labels=labels_of(config),
        video=VideoFrames(num_frames=config.num_frames),
    )
    return source, ()
