"""The benchmark's random models as those of transformers: the same weights under other names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, MarianConfig, MarianMTModel

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
"""Of the translation model; the last one stands where a sentence of a batch has ended, and no sentence has it."""
_GPT2_LAYER = {
    "attention_residual.norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_residual.norm": "ln_2",
    "feed_forward.input": "mlp.c_fc",
    "feed_forward.output": "mlp.c_proj",
}
_GPT2 = {
    "tokens.weight": "transformer.wte.weight",
    "embedding.positions.weight": "transformer.wpe.weight",
    "stack.norm.weight": "transformer.ln_f.weight",
    "stack.norm.bias": "transformer.ln_f.bias",
}
_MARIAN_LAYER = {
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.out_proj",),
    "attention_residual.norm": ("self_attn_layer_norm",),
    "cross_attention.query": ("encoder_attn.q_proj",),
    "cross_attention.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attention.output": ("encoder_attn.out_proj",),
    "cross_attention_residual.norm": ("encoder_attn_layer_norm",),
    "feed_forward.input": ("fc1",),
    "feed_forward.output": ("fc2",),
    "feed_forward_residual.norm": ("final_layer_norm",),
}


def load_gpt2(folder: Path) -> GPT2LMHeadModel:
    """Loads the weights of a folder in fp32."""
    sizes = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
    config = GPT2Config(
        vocab_size=sizes["vocabulary_size"],
        n_positions=sizes["max_length"],
        n_embd=sizes["d_model"],
        n_layer=sizes["num_layers"],
        n_head=sizes["num_heads"],
        n_inner=sizes["d_ff"],
        activation_function="gelu",  # the kit's: exact, not by tanh
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).eval()
    weights = dict(_as_gpt2(name, tensor) for name, tensor in load_file(str(folder / "weights.safetensors")).items())
    _load(model, weights, absent={"lm_head.weight"})  # tied to the embedding
    return model


def _as_gpt2(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    if name in _GPT2:
        return _GPT2[name], tensor
    _, _, layer, rest = name.split(".", 3)  # stack.layers.<number>.<part>.<weight or bias>
    part, _, kind = rest.rpartition(".")
    is_matrix = tensor.ndim == 2  # GPT-2's linear maps are stored transposed
    return f"transformer.h.{layer}.{_GPT2_LAYER[part]}.{kind}", tensor.t().contiguous() if is_matrix else tensor


def load_marian(folder: Path) -> MarianMTModel:
    """Loads the weights of a folder in fp32."""
    sizes = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
    names = {"layers": "num_layers", "attention_heads": "num_heads", "ffn_dim": "d_ff"}
    sides = {f"{side}_{theirs}": sizes[ours] for side in ("encoder", "decoder") for theirs, ours in names.items()}
    config = MarianConfig(
        **sides,
        vocab_size=sizes["vocabulary_size"],
        d_model=sizes["d_model"],
        max_position_embeddings=sizes["max_length"],
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
    tied = {"lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    made = {"final_logits_bias", "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}
    _load(model, dict(pair for item in weights.items() for pair in _as_marian(*item)), absent=tied | made)
    model.tie_weights()
    with torch.no_grad():
        for stack in (model.model.encoder, model.model.decoder):
            # (L, D); transformers has all sines first, the model has them in turn with the cosines
            table = stack.embed_positions.weight
            table.copy_(torch.stack(table.chunk(2, dim=1), dim=-1).flatten(1))
    return model


def _as_marian(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if name == "tokens.weight":
        yield "model.shared.weight", tensor
        return
    stack, _, layer, rest = name.split(".", 3)  # encoder.layers.<number>.<part>.<weight or bias>
    part, _, kind = rest.rpartition(".")
    names = _MARIAN_LAYER[part]
    for one, share in zip(names, tensor.chunk(len(names)), strict=True):
        yield f"model.{stack}.layers.{layer}.{one}.{kind}", share.contiguous()


def _load(model: torch.nn.Module, weights: dict[str, torch.Tensor], *, absent: set[str]) -> None:
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - absent:
        raise RuntimeError(f"the weights do not fit: missing {missing}, unexpected {unexpected}")
