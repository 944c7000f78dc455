"""Folders of models of pixels as `transformers` writes them, with random weights: labels and depth."""

import json
from pathlib import Path

import torch
import transformers

NUM_LABELS = 5
_SQUARE = {
    "do_resize": True,
    "size": {"height": 64, "width": 64},
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
_MIT = {
    "num_encoder_blocks": 4,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 24, 32],
    "num_attention_heads": [1, 1, 2, 2],
    "sr_ratios": [4, 2, 1, 1],
    "mlp_ratios": [2, 2, 2, 2],
    "decoder_hidden_size": 16,
}
SEMANTIC = {
    "segformer": ("SegformerForSemanticSegmentation", _MIT, "SegformerImageProcessor", {"do_reduce_labels": True}),
}
"""Class, configuration, image processor and its settings of each family, by model type."""
DEPTH = {
    "glpn": ("GLPNForDepthEstimation", _MIT, "GLPNImageProcessor", {"size": None, "do_normalize": False}),
}


def write_pixel_model(folder: Path, family: str, **preprocessing) -> Path:
    """Writes a model whose answers vary over an image."""
    name, values, processor, settings = (SEMANTIC | DEPTH)[family]
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**values, **({"num_labels": NUM_LABELS} if family in SEMANTIC else {}))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    written = {"image_processor_type": processor, **_SQUARE, **settings, **preprocessing}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return folder
