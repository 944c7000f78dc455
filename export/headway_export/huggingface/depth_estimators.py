"""Models that estimate the depth of images' pixels.

B images, R, S rows and columns of cells.
"""

from __future__ import annotations

from typing import Any, Final, Literal, cast

from torch import Tensor, nn
from transformers import AutoModelForDepthEstimation

from headway_export.errors import SourceError
from headway_export.huggingface.detectors import traceable
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_preprocessing
from headway_export.source import ExportSource
from headway_server.bundles import Depth

DEPTH_ESTIMATORS: Final = ("dpt", "depth_anything", "glpn")
"""Families by model type."""


class HuggingFaceDepthEstimator(nn.Module):
    """A model of depth of `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `depth` (B, R, S)."""
        with traceable(self.model):
            output = self.model(pixel_values=pixel_values, return_dict=True)
        return {"depth": cast("Tensor", output.predicted_depth)}


def read_depth_estimator(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model of depth.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    family = folder.config.model_type
    if family not in DEPTH_ESTIMATORS:
        raise SourceError(
            f"{folder.path}: estimates depth as {family}, and how its outputs are read is not known; known are "
            f"{', '.join(sorted(DEPTH_ESTIMATORS))}"
        )
    preprocessing, is_bgr = read_preprocessing(folder, of_any_size=True)
    if is_bgr or (not preprocessing.keeps_proportions and preprocessing.resize != "stretch"):
        raise SourceError(f"{folder.path / PREPROCESSOR_FILE}: prepares images as {family} does not read them")

    def load() -> nn.Module:
        return HuggingFaceDepthEstimator(folder.load(AutoModelForDepthEstimation)).eval()

    module = load()
    source = folder.source(
        cast("Any", module).model,
        module,
        make_reference=load,
        image_preprocessing=preprocessing,
        depth=Depth(kind=_kind_of(folder.config)),
    )
    return source, ()


def _kind_of(config: Any) -> Literal["metric", "inverse", "unspecified"]:
    """Returns the meaning of a model's depth, as far as its configuration tells.

    DPT without another's backbone is MiDaS's (Ranftl et al. 2021), which predicts the inverse; with one it is whatever
    the head was trained on.
    """
    if config.model_type == "glpn" or getattr(config, "depth_estimation_type", None) == "metric":
        return "metric"
    if config.model_type == "dpt" and getattr(config, "backbone_config", None) is not None and not config.is_hybrid:
        return "unspecified"
    return "inverse"
