"""Tiny detectors of Hugging Face `transformers` with random weights, in folders with `preprocessor_config.json`."""

import json
from pathlib import Path

import torch
import transformers

_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
_DETR = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 12,
    "use_timm_backbone": False,
    "backbone_config": _BACKBONE,
}
_YOLOS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": [64, 96],
    "patch_size": 16,
    "num_detection_tokens": 12,
}
FAMILIES = {
    "detr": ("Detr", _DETR, "DetrImageProcessor"),
    "yolos": ("Yolos", _YOLOS, "YolosImageProcessor"),
    "conditional_detr": ("ConditionalDetr", _DETR, "ConditionalDetrImageProcessor"),
    "table-transformer": ("TableTransformer", _DETR, "DetrImageProcessor"),
}
"""Prefix of the classes, configuration, and image processor of each family, by model type."""
_RESIZED = {
    "do_resize": True,
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "do_pad": True,
    "size": {"shortest_edge": 64, "longest_edge": 112},
}


def write_detector(folder: Path, family: str, **preprocessing) -> Path:
    """Writes a detector of five labels, whose scores differ enough for a threshold to keep some objects."""
    prefix, values, processor = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**values, num_labels=5)
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForObjectDetection")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "class_labels" in name else 0.2)
    model.save_pretrained(folder)
    written = {"image_processor_type": processor, **_RESIZED, **preprocessing}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return folder
