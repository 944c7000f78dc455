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
    "sr_ratios": [8, 4, 2, 1],
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
SERVED = ("segformer", "glpn")
"""Families that are exported and served."""


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


def _answer(folder: Path, kind, image):
    """Returns the image processor of a folder, and what its model answers to an image."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = kind.from_pretrained(folder).eval()
    with torch.inference_mode():
        return processor, model(**processor(image, return_tensors="pt"))


def expected_labels(folder: Path, image):
    """Returns the label of each pixel, (height, width), by `transformers`."""
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    processor, output = _answer(folder, kind, image)
    return processor.post_process_semantic_segmentation(output, target_sizes=[image.size[::-1]])[0].numpy()


def expected_depth(folder: Path, image):
    """Returns the depth of each pixel, (height, width), likewise."""
    processor, output = _answer(folder, transformers.AutoModelForDepthEstimation, image)
    [found] = processor.post_process_depth_estimation(output, target_sizes=[image.size[::-1]])
    return found["predicted_depth"].numpy()
