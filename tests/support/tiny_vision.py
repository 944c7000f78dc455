"""Tiny vision models of Hugging Face `transformers` with random weights, in folders with `preprocessor_config.json`."""

import json
from pathlib import Path

import torch
import transformers

_SIDE = 32
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": _SIDE,
    "patch_size": 8,
}
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_COMMON = {"do_normalize": True, "image_mean": _MEAN, "image_std": _STD, "do_rescale": True, "rescale_factor": 1 / 255}
_SQUARE = {"height": _SIDE, "width": _SIDE}
_WARPED = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": _SQUARE, "resample": 2}
_CROPPED = {
    "image_processor_type": "BitImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 36},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": _SQUARE,
}
_CONVNEXT = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": _SIDE}, "resample": 3}

FAMILIES = {
    "vit": (_ENCODER, {**_WARPED, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
    "deit": (
        _ENCODER,
        {
            "image_processor_type": "DeiTImageProcessor",
            "size": {"height": 36, "width": 36},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": _SQUARE,
        },
    ),
    "beit": (
        {**_ENCODER, "use_relative_position_bias": True},
        {**_WARPED, "image_processor_type": "BeitImageProcessor"},
    ),
    "dinov2": ({**_ENCODER, "image_size": 56, "mlp_ratio": 2}, _CROPPED),
    "swin": (
        {
            "image_size": _SIDE,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        {**_WARPED, "resample": 3},
    ),
    "convnext": (
        {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]},
        {**_CONVNEXT, "crop_pct": 0.875},
    ),
    "resnet": (
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        {**_CONVNEXT, "crop_pct": 0.875, "resample": 2},
    ),
}
"""Configuration and preprocessing of each family, by model type."""


def write_vision_model(folder: Path, family: str, *, is_classifier: bool = True, **changes) -> Path:
    """Writes a classifier of five classes, or the model without a head."""
    values, preprocessing = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **{**values, **changes}, num_labels=5)
    if family == "deit" and is_classifier:  # which has two classes of classifiers
        config.architectures = ["DeiTForImageClassification"]
    torch.manual_seed(7)
    auto = transformers.AutoModelForImageClassification if is_classifier else transformers.AutoModel
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    write_preprocessing(folder, **{**_COMMON, **preprocessing})
    return folder


def write_preprocessing(folder: Path, **values) -> None:
    """Writes `preprocessor_config.json`."""
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
