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

_DINOV3 = {**_WARPED, "image_processor_type": "DINOv3ViTImageProcessorFast", "do_center_crop": None}
_SHORTER = {"do_resize": True, "do_center_crop": True, "size": {"shortest_edge": 36}, "crop_size": _SQUARE}
_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_LEVIT_SQUARE = {"height": 64, "width": 64}
_PVT = {
    "image_size": _SIDE,
    "depths": [1] * 4,
    "hidden_sizes": [8, 16, 16, 32],
    "num_attention_heads": [1, 1, 2, 2],
    "mlp_ratios": [2] * 4,
}
FURTHER = {
    "mobilevit": (
        {
            "image_size": _SIDE,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
            "num_attention_heads": 2,
        },
        {
            **_SHORTER,
            "feature_extractor_type": "MobileViTFeatureExtractor",
            "resample": 2,
            "do_flip_channel_order": True,
            "do_normalize": None,
        },
    ),
    "efficientnet": (
        {
            "image_size": _SIDE,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": 320,
            "kernel_sizes": [3, 5],
            "in_channels": [32, 16],
            "out_channels": [16, 24],
            "depthwise_padding": [1],
            "strides": [1, 2],
            "num_block_repeats": [1, 1],
            "expand_ratios": [1, 6],
        },
        {
            "image_processor_type": "EfficientNetImageProcessor",
            "do_resize": True,
            "size": _SQUARE,
            "resample": 0,
            "do_center_crop": False,
            "include_top": True,
            "rescale_offset": False,
            "image_std": [0.47853944, 0.4732864, 0.47434163],
        },
    ),
    "mobilenet_v1": (
        {"image_size": _SIDE, "depth_multiplier": 0.25, "min_depth": 4},
        {**_SHORTER, **_HALVES, "image_processor_type": "MobileNetV1ImageProcessor", "resample": 2},
    ),
    "mobilenet_v2": (
        {"image_size": _SIDE, "depth_multiplier": 0.25, "min_depth": 4},
        {**_SHORTER, **_HALVES, "image_processor_type": "MobileNetV2ImageProcessor", "resample": 2},
    ),
    "hiera": (
        {"image_size": [_SIDE, _SIDE], "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1},
        _CROPPED,
    ),
    "regnet": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
        {"feature_extractor_type": "ConvNextFeatureExtractor", "size": _SIDE, "resample": 3, "crop_pct": 0.875},
    ),
    "vit_msn": (_ENCODER, _WARPED),
    "pvt": (_PVT, {**_WARPED, "image_processor_type": "PvtImageProcessor"}),
    "pvt_v2": (_PVT, {**_WARPED, "image_processor_type": "PvtImageProcessor"}),
    "cvt": ({"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, {**_CONVNEXT, "crop_pct": 0.875}),
    "levit": (
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [1, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        {
            **_SHORTER,
            "feature_extractor_type": "LevitFeatureExtractor",
            "size": {"shortest_edge": 64},
            "crop_size": _LEVIT_SQUARE,
            "resample": 3,
        },
    ),
    "poolformer": (
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4},
        {
            **_SHORTER,
            "image_processor_type": "PoolFormerImageProcessor",
            "crop_pct": 0.9,
            "size": {"shortest_edge": _SIDE},
            "resample": 3,
        },
    ),
    "swinv2": (FAMILIES["swin"][0], {**_WARPED, "resample": 3}),
    "convnextv2": (FAMILIES["convnext"][0], {**_CONVNEXT, "crop_pct": 0.875}),
    "dinov2_with_registers": FAMILIES["dinov2"],
    "bit": (
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4},
        {**_CROPPED, "size": {"shortest_edge": _SIDE}},
    ),
    "focalnet": (
        {
            "image_size": _SIDE,
            "embed_dim": 16,
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            "hidden_sizes": [16, 32],
        },
        {**_CROPPED, "resample": 2},
    ),
    "dinov3_vit": (_ENCODER, _DINOV3),
    "dinov3_convnext": ({"hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4}, _DINOV3),
    "vit_mae": (
        {
            **_ENCODER,
            "decoder_num_hidden_layers": 1,
            "decoder_hidden_size": 16,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 16,
        },
        _WARPED,
    ),
}
"""Further families, which are compared without a server."""


_OF_TWO_CLASSES = {"deit": "DeiTForImageClassification", "levit": "LevitForImageClassificationWithTeacher"}
"""Families with two classes of classifiers, and the one of the published folders."""


def write_vision_model(folder: Path, family: str, *, is_classifier: bool = True, **changes) -> Path:
    """Writes a classifier of five classes, or the model without a head."""
    values, preprocessing = (FAMILIES | FURTHER)[family]
    config = transformers.AutoConfig.for_model(family, **{**values, **changes}, num_labels=5)
    if family in _OF_TWO_CLASSES and is_classifier:
        config.architectures = [_OF_TWO_CLASSES[family]]
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
