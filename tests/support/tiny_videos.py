"""Tiny classifiers of videos of `transformers` with random weights, in folders with `preprocessor_config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers

SIDE: Final = 32
_SIZES: Final = {
    "image_size": SIDE,
    "patch_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_labels": 5,
}
_VIDEO_MAE: Final = {
    "image_processor_type": "VideoMAEImageProcessor",
    "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE},
}
FAMILIES: Final[Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]]] = {
    "videomae": ("VideoMAE", {"num_frames": 4, "tubelet_size": 2}, _VIDEO_MAE),
    "timesformer": ("Timesformer", {"num_frames": 4}, _VIDEO_MAE),
    "vivit": (
        "Vivit",
        {"num_frames": 6, "tubelet_size": [2, 16, 16]},
        {**_VIDEO_MAE, "image_processor_type": "VivitImageProcessor", "size": {"shortest_edge": 40}},
    ),
}
"""Class, sizes and preprocessing of each family."""


def write_videos(folder: Path, family: str) -> Path:
    """Writes a folder of a family, with random weights."""
    name, sizes, preprocessing = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **sizes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForVideoClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    return folder
