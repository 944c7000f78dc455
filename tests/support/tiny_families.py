"""Tiny models of every family of Hugging Face `transformers` that classifies texts, as folders."""

from pathlib import Path
from typing import Any

import tiny_huggingface as tiny
import torch
import transformers
from transformers.models.auto import modeling_auto

LENGTH = 48
"""What configurations state as the most positions."""
_SIZES: dict[str, Any] = {
    **tiny.SIZES,
    "max_position_embeddings": LENGTH,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "embedding_size": 32,
    # What some families call the same.
    "d_model": 32,
    "dim": 32,
    "emb_dim": 32,
    "hidden_dim": 48,
    "ffn_dim": 48,
    "d_inner": 48,
    "n_layer": 1,
    "n_layers": 1,
    "n_head": 4,
    "n_heads": 4,
    "n_embd": 32,
    "n_positions": LENGTH,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 1]], "num_layers": 1, "num_heads": 4},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "visual_embed": False},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 16},
    "perceiver": {"num_latents": 4, "d_latents": 32, "num_self_attends_per_block": 1, "num_self_attention_heads": 4,
                  "num_cross_attention_heads": 4, "num_blocks": 1},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [6, 8], "attention_head_size": 8,
                 "attn_layers": ["local"], "local_attn_chunk_length": 8, "feed_forward_size": 48},
    "funnel": {"block_sizes": [1, 1]},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "mobilebert": {"intra_bottleneck_size": 32},
    "canine": {"num_hash_buckets": 64},
    "longformer": {"attention_window": 8},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"},
    "markuplm": {"max_xpath_tag_unit_embeddings": 8, "max_xpath_subs_unit_embeddings": 8,
                 "tag_pad_id": 7, "subs_pad_id": 7},
}  # fmt: skip
NOT_TINY = {
    "layoutlmv2": "needs detectron2",
    "mistral4": "is a mixture of experts of fixed sizes",
    "modernvbert": "sees, too, and nests the configurations of both",
    "ultravbert": "sees, too, and nests the configurations of both",
}
"""Encoders of which no tiny model is made here, and why."""
_SEQUENCE = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
_MASKED = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
_CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
_OF_TWO_STACKS = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

ENCODERS = sorted(
    one for one in _SEQUENCE if one not in _OF_TWO_STACKS and (one in _MASKED or one not in _CAUSAL)
)  # from names alone: to load each family's configuration takes seconds, of every process that collects tests
OF_OWN_FORMS = ("convbert", "fnet", "longformer", "mobilebert", "nystromformer", "xlnet", "xmod", "yoso")
"""Encoders that are not computed as the library has them, so that a graph answers as the library does."""
DECODERS_WITH_TABLES = ("biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt")


def tiny_config(model_type: str) -> Any:
    """A configuration of one tiny layer with three labels."""
    kind = transformers.CONFIG_MAPPING[model_type]
    known = {*kind().to_dict(), *getattr(kind, "attribute_map", {}), "pad_token_id", "bos_token_id", "eos_token_id"}
    values = {name: value for name, value in _SIZES.items() if name in known}
    return kind(**{**values, "num_labels": 3, **_CHANGES.get(model_type, {})})


def write_family(folder: Path, model_type: str, *, spread: float | None = None) -> Path:
    """Writes a classifier of a family with random weights and its tokenizer.

    Args:
        folder: Where to.
        model_type: Of the family.
        spread: Standard deviation of its matrices, rows for padding among them; None: as the library draws them.
    """
    torch.manual_seed(7)
    model = transformers.AutoModelForSequenceClassification.from_config(tiny_config(model_type))
    if spread is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=spread)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return folder
