"""Folders of models of pixels as `transformers` writes them, with random weights: labels and depth."""

import json
from pathlib import Path

import tiny_clips
import tiny_huggingface as tiny
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
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "num_attention_heads": [1, 2],
    "sr_ratios": [8, 4],
    "mlp_ratios": [2, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "decoder_hidden_size": 16,
}
_FOUR = {
    **_MIT,
    "num_encoder_blocks": 4,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 24, 32],
    "num_attention_heads": [1, 1, 2, 2],
    "sr_ratios": [8, 4, 2, 1],
    "mlp_ratios": [2, 2, 2, 2],
    "patch_sizes": [7, 3, 3, 3],
    "strides": [4, 2, 2, 2],
}
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 64,
}
_DINO = {
    **_VIT,
    "model_type": "dinov2",
    "mlp_ratio": 2,
    "patch_size": 14,
    "image_size": 70,
    "num_hidden_layers": 2,
    "out_indices": [1, 2],
    "reshape_hidden_states": False,
    "apply_layernorm": True,
}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 12, 16, 20],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_DECODER = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_attention_heads": 2}
_DETR = {**_DECODER, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 7}
_BEIT = {
    **_VIT,
    "patch_size": 16,
    "out_indices": [1, 2, 3, 4],
    "pool_scales": [1, 2],
    "use_auxiliary_head": False,
    "use_relative_position_bias": True,
}
_CONVNEXT = {"model_type": "convnext", "depths": [1, 1, 1, 1], "hidden_sizes": [8, 12, 16, 20]}
_STAGES = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
_MASKED = {"size": {"height": 64, "width": 64}, "size_divisor": 32}
_UNCROPPED = {"do_center_crop": False}
_DPT = {
    **_VIT,
    "patch_size": 16,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8, 8, 16, 16],
    "fusion_hidden_size": 8,
    "is_hybrid": False,
}
SEMANTIC = {
    "segformer": ("SegformerForSemanticSegmentation", _MIT, "SegformerImageProcessor", {"do_reduce_labels": True}),
    "beit": ("BeitForSemanticSegmentation", _BEIT, "BeitImageProcessor", _UNCROPPED),
    "data2vec-vision": (
        "Data2VecVisionForSemanticSegmentation",
        _BEIT,
        "BeitImageProcessor",
        _UNCROPPED,
    ),
    "dpt": ("DPTForSemanticSegmentation", _DPT, "DPTImageProcessor", {}),
    "mobilevit": (
        "MobileViTForSemanticSegmentation",
        {
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 40],
            "num_attention_heads": 2,
            "image_size": 64,
            "aspp_out_channels": 16,
        },
        "MobileViTImageProcessor",
        {**_UNCROPPED, "do_normalize": None, "do_flip_channel_order": True},
    ),
    "mobilenet_v2": (
        "MobileNetV2ForSemanticSegmentation",
        {"depth_multiplier": 0.25, "image_size": 64},
        "MobileNetV2ImageProcessor",
        _UNCROPPED,
    ),
    "upernet": (
        "UperNetForSemanticSegmentation",
        {
            "backbone_config": {**_CONVNEXT, **_STAGES},
            "hidden_size": 8,
            "pool_scales": [1, 2],
            "use_auxiliary_head": False,
        },
        "SegformerImageProcessor",
        {},
    ),
    "maskformer": (
        "MaskFormerForInstanceSegmentation",
        {
            "backbone_config": _RESNET,
            "decoder_config": {"model_type": "detr", **_DETR},
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
        },
        "MaskFormerImageProcessor",
        _MASKED,
    ),
    "mask2former": (
        "Mask2FormerForUniversalSegmentation",
        {
            "backbone_config": _RESNET,
            "feature_size": 32,
            "mask_feature_size": 32,
            "hidden_dim": 32,
            "encoder_feedforward_dim": 24,
            "dim_feedforward": 24,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "num_attention_heads": 2,
            "num_queries": 7,
        },
        "Mask2FormerImageProcessor",
        _MASKED,
    ),
}
"""Class, configuration, image processor and its settings of each family, by model type."""
DEPTH = {
    "glpn": ("GLPNForDepthEstimation", _FOUR, "GLPNImageProcessor", {"size": None, "do_normalize": False}),
    "depth_anything": (
        "DepthAnythingForDepthEstimation",
        {
            "backbone_config": _DINO,
            "patch_size": 14,
            "reassemble_hidden_size": 16,
            "reassemble_factors": [2, 1],
            "neck_hidden_sizes": [8, 16],
            "fusion_hidden_size": 8,
            "head_hidden_size": 8,
        },
        "DPTImageProcessor",
        {"size": {"height": 70, "width": 70}, "keep_aspect_ratio": True, "ensure_multiple_of": 14, "resample": 3},
    ),
    "dpt": ("DPTForDepthEstimation", _DPT, "DPTImageProcessor", {"resample": 3}),
}
_TOWER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
LABELS = ("seven", "one two three", "nine eight")
"""Of tokens of `tiny_huggingface`."""
_DEVIATIONS = {"class_predictor": 1.0, "quer": 2.0, "mask_embedder": 0.15}
"""Of weights, by a part of their names, such that every cell has a mask and several labels win."""
_MASKS_SEED = 9
SERVED = {"segformer", "maskformer", "depth_anything"}
"""Families that are exported and served."""


def write_pixel_model(folder: Path, family: str, *, is_depth: bool = False, **preprocessing) -> Path:
    """Writes a model whose answers vary over an image."""
    name, values, processor, settings = (DEPTH if is_depth else SEMANTIC)[family]
    torch.manual_seed(_MASKS_SEED if "mask" in family else 3)
    kind = getattr(transformers, name)
    config = kind.config_class(**values, **({} if is_depth else {"num_labels": NUM_LABELS}))
    model = kind(config).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=next((std for key, std in _DEVIATIONS.items() if key in part), 0.2))
    model.save_pretrained(folder)
    written = {"image_processor_type": processor, **_SQUARE, **settings, **preprocessing}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return folder


def write_zero_shot_model(folder: Path) -> Path:
    """Writes a model of the caller's labels, whose maps differ."""
    end = tiny.WORDS - 1
    text = {**_TOWER, "vocab_size": tiny.WORDS, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": end}
    config = transformers.CLIPSegConfig(
        text_config={**text, "pad_token_id": 0},
        vision_config={**_TOWER, "image_size": 64, "patch_size": 16},
        projection_dim=24,
        extract_layers=[0, 1, 2],
        reduce_dim=16,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=24,
    )
    torch.manual_seed(3)
    model = transformers.CLIPSegForImageSegmentation(config).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.6 if "film" in part or "embedding" in part else 0.25)
    model.save_pretrained(folder)
    tiny_clips.write_tokenizer(folder, "clip")
    size = {"size": {"height": 96, "width": 96}}
    written = {"image_processor_type": "ViTImageProcessor", **_SQUARE, **size}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return folder


def expected_maps(folder: Path, image, labels):
    """Returns the logits of each label at each pixel, (labels, height, width), by `transformers`."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.CLIPSegForImageSegmentation.from_pretrained(folder).eval()
    texts = tokenizer(list(labels), padding=True, return_tensors="pt")
    pixels = processor([image] * len(labels), return_tensors="pt")
    with torch.inference_mode():
        logits = model(**texts, **pixels).logits.reshape(len(labels), 1, 96, 96)
    return torch.nn.functional.interpolate(logits, image.size[::-1], mode="bilinear", align_corners=False)[:, 0]


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
