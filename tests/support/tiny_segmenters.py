"""Tiny segmenters of Hugging Face `transformers` with random weights, in folders with `preprocessor_config.json`."""

import json
from pathlib import Path

import torch
import transformers

SIDE = 64
"""Pixels along a side of a model's input."""
_VISION = {
    "hidden_size": 32,
    "output_channels": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 16,
    "window_size": 3,
    "global_attn_indexes": [1],
    "num_pos_feats": 16,
    "mlp_ratio": 2.0,
}
_PROMPTS = {"hidden_size": 32, "image_size": SIDE, "patch_size": 16, "mask_input_channels": 8}
_MASKS = {"hidden_size": 32, "mlp_dim": 48, "num_attention_heads": 2, "iou_head_hidden_dim": 32}
_SAM = {"vision_config": _VISION, "prompt_encoder_config": _PROMPTS, "mask_decoder_config": _MASKS}
_SAM2 = {
    "vision_config": {
        "backbone_config": {
            "model_type": "sam2_hiera_det_model",
            "hidden_size": 16,
            "image_size": [SIDE, SIDE],
            "blocks_per_stage": [1, 1, 2, 1],
            "embed_dim_per_stage": [16, 32, 48, 64],
            "num_attention_heads_per_stage": [1, 2, 2, 2],
            "window_size_per_stage": [4, 4, 2, 2],
            "global_attention_blocks": [3],
            "window_positional_embedding_background_size": [4, 4],
        },
        "backbone_channel_list": [64, 48, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": 32,
    },
    "prompt_encoder_config": _PROMPTS,
    "mask_decoder_config": _MASKS,
}
_NORMALIZED = {
    "do_resize": True,
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
_PADDED = {
    "image_processor_type": "SamImageProcessor",
    **_NORMALIZED,
    "size": {"longest_edge": SIDE},
    "do_pad": True,
    "pad_size": {"height": SIDE, "width": SIDE},
}
_SQUARE = {"image_processor_type": "Sam2ImageProcessorFast", **_NORMALIZED, "size": {"height": SIDE, "width": SIDE}}
FAMILIES = {
    "sam": ("Sam", _SAM, _PADDED),
    "sam_hq": ("SamHQ", {**_SAM, "mask_decoder_config": {**_MASKS, "vit_dim": 32}}, _PADDED),
    "sam2": ("Sam2", _SAM2, _SQUARE),
    "sam2_video": ("Sam2", _SAM2, _SQUARE),
}
"""Prefix of the classes, configuration and preprocessing of each family, by model type."""
_DEVIATIONS = {"positional_embedding": 0.5, "rel_pos": 0.3, "pos_embed": 0.3, "iou": 0.3}
"""Of weights, by a part of their names."""


def write_segmenter(folder: Path, family: str, **preprocessing) -> Path:
    """Writes a segmenter, whose masks differ from prompt to prompt."""
    prefix, values, written = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**values)
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}Model")(config)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter.ndim > 1:
                parameter.normal_(std=next((std for part, std in _DEVIATIONS.items() if part in name), 0.2))
        if family.startswith("sam2"):  # one table in two places
            table = model.shared_image_embedding.positional_embedding
            model.prompt_encoder.shared_embedding.positional_embedding.copy_(table)
    model.save_pretrained(folder)
    if family == "sam2_video":  # as the published folders say
        file = folder / "config.json"
        content = json.loads(file.read_text()) | {"model_type": family, "architectures": ["Sam2VideoModel"]}
        file.write_text(json.dumps(content))
    (folder / "preprocessor_config.json").write_text(json.dumps(written | preprocessing))
    return folder
