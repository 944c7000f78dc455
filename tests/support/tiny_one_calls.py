"""Folders of `transformers` with heads that no task reads, and that answer in one call; tiny random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers

_TEXT: Final = {
    "vocab_size": 200,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
_SERIES: Final = {
    "context_length": 32,
    "num_input_channels": 3,
    "prediction_length": 8,
    "patch_length": 8,
    "patch_stride": 8,
}

ONE_CALLS: Final[Mapping[str, Mapping[str, Any]]] = {
    "LayoutLMv3ForTokenClassification": {
        **_TEXT, "coordinate_size": 4, "shape_size": 4, "input_size": 32, "image_size": 32, "patch_size": 16,
        "max_rel_pos": 8, "rel_pos_bins": 8, "max_rel_2d_pos": 16, "rel_2d_pos_bins": 8,
    },
    "MarkupLMForTokenClassification": {**_TEXT, "max_depth": 6, "xpath_unit_hidden_size": 4},
    "VisualBertForQuestionAnswering": {**_TEXT, "visual_embedding_dim": 16},
    "BertForMultipleChoice": _TEXT,
    "DecisionTransformerModel": {
        "hidden_size": 24, "n_layer": 2, "n_head": 2, "state_dim": 5, "act_dim": 3, "max_ep_len": 50, "n_positions": 60,
    },
    "PatchTSTForPrediction": {
        **_SERIES, "d_model": 16, "num_attention_heads": 2, "ffn_dim": 32, "num_hidden_layers": 2, "loss": "mse",
    },
    "PatchTSMixerForPrediction": {**_SERIES, "d_model": 16, "num_layers": 2, "loss": "mse"},
    "MgpstrForSceneTextRecognition": {
        "image_size": [16, 32], "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_token_length": 6, "num_bpe_labels": 90, "num_wordpiece_labels": 80,
    },
    "Swin2SRForImageSuperResolution": {
        "image_size": 16, "embed_dim": 12, "depths": [2], "num_heads": [2], "window_size": 4, "upscale": 2,
    },
}  # fmt: skip
"""Sizes of a tiny one, by architecture."""


GROUP_VIT: Final[Mapping[str, Any]] = {
    "text_config": {**_TEXT, "eos_token_id": 199, "bos_token_id": 198, "pad_token_id": 1},
    "vision_config": {
        "hidden_size": 24, "depths": [1, 1, 1], "num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 4],
        "image_size": 32, "patch_size": 8, "num_attention_heads": 2,
    },
    "projection_dim": 16,
    "projection_intermediate_dim": 24,
}  # fmt: skip
"""Sizes of a tiny GroupViT, whose texts and images have axes of their own."""


def write_one_call(
    folder: Path, architecture: str, sizes: Mapping[str, Any] | None = None
) -> transformers.PreTrainedModel:
    """Writes a folder of an architecture, with random weights; returns its model."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**(sizes or ONE_CALLS[architecture]))).eval()
    model.save_pretrained(folder)
    return model
