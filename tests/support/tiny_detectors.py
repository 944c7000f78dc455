"""Tiny detectors of Hugging Face `transformers` with random weights, in folders with `preprocessor_config.json`."""

import json
from pathlib import Path

import numpy as np
import tiny_clips
import tiny_huggingface as tiny
import torch
import transformers

from headway_export.huggingface.detectors import DETECTORS

_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
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
_LEVELS = {
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "embedding_size": 8,
    "out_features": ["stage2", "stage3", "stage4"],
}
_RT_DETR = {
    "backbone_config": {"model_type": "rt_detr_resnet", **_LEVELS, "layer_type": "basic"},
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 24, 32],
    "feat_strides": [8, 16, 32],
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "d_model": 32,
    "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "decoder_layers": 2,
    "num_queries": 12,
    "num_denoising": 0,
    "decoder_n_points": 4,
}
_HGNET = {
    "model_type": "hgnet_v2",
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 24, 32],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 24, 32, 40],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "stage_downsample": [False, True, True, True],
    "stage_light_block": [False, False, True, True],
    "stage_kernel_size": [3, 3, 5, 5],
    **_LEVELS,
    "hidden_sizes": [16, 24, 32, 40],
}
_YOLOS = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
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
    "deformable_detr": (
        "DeformableDetr",
        {
            **_DETR,
            "backbone_config": {**_BACKBONE, **_LEVELS},
            "decoder_layers": 2,
        },
        "DeformableDetrImageProcessor",
    ),
    "rt_detr": ("RTDetr", _RT_DETR, "RTDetrImageProcessor"),
    "rt_detr_v2": ("RTDetrV2", _RT_DETR, "RTDetrImageProcessor"),
    "d_fine": (
        "DFine",
        {
            **_RT_DETR,
            "backbone_config": _HGNET,
            "encoder_in_channels": [24, 32, 40],
            "decoder_n_points": [3, 4, 3],
        },
        "RTDetrImageProcessor",
    ),
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


_DEVIATIONS = {"query_position": 2.0, "detection_tokens": 2.0, "class": 0.5, "enc_score": 0.5, "bbox": 0.4}
"""Of weights, by a part of their names."""
_SQUARE = {"size": {"height": 96, "width": 96}, "do_pad": False, "do_normalize": False}


def write_detector(folder: Path, family: str, **preprocessing) -> Path:
    """Writes a detector of five labels, whose scores differ enough for a threshold to keep some objects."""
    prefix, values, processor = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**values, num_labels=5)
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForObjectDetection")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # each box differs from the others, and from image to image
                parameter.normal_(std=next((std for part, std in _DEVIATIONS.items() if part in name), 0.2))
    model.save_pretrained(folder)
    square = {} if DETECTORS[family].reads_sizes else _SQUARE
    written = {"image_processor_type": processor, **_RESIZED, **square, **preprocessing}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return folder


_TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
ZERO_SHOT = ("owlvit", "owlv2")
"""Families without labels of their own."""
LABELS = ("seven", "one two three", "nine eight", "four")
"""Of tokens of `tiny_huggingface`."""


def write_zero_shot_detector(folder: Path, family: str) -> Path:
    """Writes a detector of the caller's labels, of which boxes like different ones."""
    end = tiny.WORDS - 1
    text = {**_TOWER, "vocab_size": tiny.WORDS, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": end}
    vision = {**_TOWER, "image_size": 64, "patch_size": 16}
    config = transformers.AutoConfig.for_model(
        family, text_config={**text, "pad_token_id": 0}, vision_config=vision, projection_dim=32
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForZeroShotObjectDetection.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.6 if "logit_scale" in name or "position" in name else 0.25)
    model.save_pretrained(folder)
    tiny_clips.write_tokenizer(folder, "clip")
    is_first = family == "owlvit"
    size = {"size": {"height": 64, "width": 64}, "do_center_crop": False, "do_pad": not is_first, "resample": 3}
    processor = "OwlViTImageProcessor" if is_first else "Owlv2ImageProcessor"
    written = {"image_processor_type": processor, **_RESIZED, **size}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return folder


GROUNDING = ("grounding-dino", "mm-grounding-dino")
"""Families that read labels together with an image."""
_SWIN = {
    "model_type": "swin",
    "image_size": 32,
    "embed_dim": 8,
    "depths": [2, 1, 1, 1],
    "num_heads": [1, 2, 2, 2],
    "window_size": 4,
    "out_indices": [2, 3, 4],
}
_BERT = {**_TOWER, "model_type": "bert", "vocab_size": 1050, "max_position_embeddings": 48}
_GROUNDING = {
    "backbone_config": _SWIN,
    "text_config": _BERT,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_n_points": 2,
    "decoder_n_points": 2,
    "num_queries": 12,
    "max_text_len": 40,
}
_BERT_IDS = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, ".": 1012, "?": 1029}


def write_grounding_detector(folder: Path, family: str) -> Path:
    """Writes a detector that reads labels and image together; its tokenizer has the numbers of BERT's marks."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **_GROUNDING)
    model = transformers.AutoModelForZeroShotObjectDetection.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.8 if "query_position" in name else 0.15)
            elif "vision_param" in name or "text_param" in name:
                parameter.fill_(1)
            elif name.endswith("decoder.layer_norm.weight"):  # scores are not near 1
                parameter.fill_(0.15)
    model.save_pretrained(folder)
    words = " ".join(LABELS).split()
    vocabulary = {f"[unused{place}]": place for place in range(_BERT["vocab_size"])}
    ids = {**_BERT_IDS, **{word: 1030 + place for place, word in enumerate(words)}}
    names = {place: name for name, place in (vocabulary | ids).items()}
    transformers.BertTokenizer(vocab={names[place]: place for place in sorted(names)}).save_pretrained(folder)
    size = {"image_processor_type": "GroundingDinoImageProcessor", "size": {"shortest_edge": 160, "longest_edge": 240}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**_RESIZED, **size}))
    return folder


def threshold_within(scores: np.ndarray) -> float:
    """Returns a threshold that leaves out some objects, in the widest gap of the middle third of their scores."""
    ordered = np.sort(np.asarray(scores, np.float64))
    middle = ordered[len(ordered) // 3 : 2 * len(ordered) // 3 + 1]
    place = int(np.diff(middle).argmax())
    return float(middle[place : place + 2].mean())
