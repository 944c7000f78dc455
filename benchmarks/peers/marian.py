"""The benchmark's Transformer as the MarianMT of transformers: the same weights under other names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import MarianConfig, MarianMTModel

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
"""Of the model; the last one stands where a sentence of a batch has ended, and no sentence has it."""

_LAYER_NAMES = {
    "attention.output": "self_attn.out_proj",
    "attention_residual.norm": "self_attn_layer_norm",
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.output": "encoder_attn.out_proj",
    "cross_attention_residual.norm": "encoder_attn_layer_norm",
    "feed_forward.input": "fc1",
    "feed_forward.output": "fc2",
    "feed_forward_residual.norm": "final_layer_norm",
}
_JOINED = {
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "cross_attention.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
}


def load_marian(folder: Path) -> MarianMTModel:
    """Loads `weights.safetensors` and `geometry.json` of a folder, in fp32."""
    geometry = json.loads((folder / "geometry.json").read_text(encoding="utf-8"))
    sides = {
        f"{side}_{size}": geometry[name]
        for side in ("encoder", "decoder")
        for size, name in (("layers", "num_layers"), ("attention_heads", "num_heads"), ("ffn_dim", "d_ff"))
    }
    config = MarianConfig(
        **sides,
        vocab_size=geometry["vocabulary_size"],
        d_model=geometry["d_model"],
        max_position_embeddings=geometry["max_length"],
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        decoder_start_token_id=BOS_ID,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config).eval()
    weights = load_file(str(folder / "weights.safetensors"))
    renamed = dict(pair for name, tensor in weights.items() for pair in _renamed(name, tensor))
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    tied = {"lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    made = {"final_logits_bias", "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}
    if unexpected or set(missing) - tied - made:
        raise RuntimeError(f"the weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    with torch.no_grad():
        for stack in (model.model.encoder, model.model.decoder):
            # (L, D); transformers has all sines first, the model has them in turn with the cosines
            table = stack.embed_positions.weight
            table.copy_(torch.stack(table.chunk(2, dim=1), dim=-1).flatten(1))
    return model


def _renamed(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if name == "tokens.weight":
        yield "model.shared.weight", tensor
        return
    stack, _, layer, rest = name.split(".", 3)  # encoder.layers.<number>.<part>.<weight or bias>
    part, _, kind = rest.rpartition(".")
    names = _JOINED.get(part) or (_LAYER_NAMES[part],)
    for one, share in zip(names, tensor.chunk(len(names)), strict=True):
        yield f"model.{stack}.layers.{layer}.{one}.{kind}", share.contiguous()
