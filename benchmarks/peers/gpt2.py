"""The benchmark's GPT as the GPT-2 of transformers: the same weights under other names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

_LAYER_NAMES = {
    "attention_residual.norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_residual.norm": "ln_2",
    "feed_forward.input": "mlp.c_fc",
    "feed_forward.output": "mlp.c_proj",
}
_NAMES = {
    "tokens.weight": "transformer.wte.weight",
    "embedding.positions.weight": "transformer.wpe.weight",
    "stack.norm.weight": "transformer.ln_f.weight",
    "stack.norm.bias": "transformer.ln_f.bias",
}


def load_gpt2(folder: Path) -> GPT2LMHeadModel:
    """Loads `weights.safetensors` and `geometry.json` of a folder, in fp32."""
    geometry = json.loads((folder / "geometry.json").read_text(encoding="utf-8"))
    config = GPT2Config(
        vocab_size=geometry["vocabulary_size"],
        n_positions=geometry["max_length"],
        n_embd=geometry["d_model"],
        n_layer=geometry["num_layers"],
        n_head=geometry["num_heads"],
        activation_function="gelu",  # the kit's: exact, not by tanh
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).eval()
    weights = dict(_renamed(name, tensor) for name, tensor in load_file(str(folder / "weights.safetensors")).items())
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # tied to the embedding
        raise RuntimeError(f"the weights do not fit: missing {missing}, unexpected {unexpected}")
    return model


def _renamed(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    if name in _NAMES:
        return _NAMES[name], tensor
    _, _, layer, rest = name.split(".", 3)  # stack.layers.<number>.<part>.<weight or bias>
    part, _, kind = rest.rpartition(".")
    renamed = f"transformer.h.{layer}.{_LAYER_NAMES[part]}.{kind}"
    is_matrix = tensor.ndim == 2
    return renamed, tensor.t().contiguous() if is_matrix else tensor  # GPT-2's linear maps are stored transposed
