"""Encoders whose own code chooses by numbers that a graph does not know, computed otherwise with the same answers.

Longformer (Beltagy et al. 2020, arXiv 2004.05150) attends in chunks of a window. Here all scores of a text are computed
and those outside of the windows are left out, which takes memory by the square of the length. X-MOD (Pfeiffer et al.
2022, arXiv 2205.06266) picks rows by their language; here all are of one. XLNet (arXiv 1906.08237) subtracts its mask
from 1.0, which PyTorch's tracer takes of floats alone.

B rows, T tokens, D model width, H heads, K head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling


def for_graph(model: nn.Module) -> nn.Module:
    """Returns a model that a graph can be traced of; the weights stay its own, and most models stay as they are."""
    body = cast("Any", model).base_model
    if body.config.model_type == "xmod":
        for layer in body.encoder.layer:
            layer.output.lang_adapter = partial(_adapted, layer.output, body.config.default_language)
    if body.config.model_type == "xlnet":
        body.register_forward_pre_hook(_with_float_mask, with_kwargs=True)
    if body.config.model_type != "longformer":
        return model
    made = _Longformer(body)
    if body is model:
        return made
    setattr(model, cast("Any", model).base_model_prefix, made)
    return model


def _with_float_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "attention_mask": kwargs["attention_mask"].to(torch.float32)}


def _adapted(part: Any, language: str, _: Tensor, states: Tensor) -> Tensor:
    """`XmodOutput.lang_adapter` of one language: ids of languages, (B,), and states, (B, T, D) -> (B, T, D)."""
    normal = states
    if part.adapter_layer_norm is not None:
        normal = part.adapter_layer_norm(states)
    elif part.adapter_reuse_layer_norm:
        normal = part.LayerNorm(states)
    residual = normal if part.ln_before_adapter else states
    return cast("Tensor", part.adapter_modules[language](normal) + residual)


class _Longformer(nn.Module):
    """`LongformerModel`, with the names of its parts."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.config = body.config
        self.embeddings = body.embeddings
        self.encoder = body.encoder
        self.pooler = body.pooler
        for layer in body.encoder.layer:
            layer.attention.self = _Attention(layer.attention.self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_: Any,
    ) -> LongformerBaseModelOutputWithPooling:
        """(B, T) each -> `last_hidden_state` (B, T, D)."""
        states = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        masks = {"attention_mask": attention_mask, "is_index_global_attn": global_attention_mask}
        for layer in self.encoder.layer:
            (states,) = layer(states, **masks)
        pooled = None if self.pooler is None else self.pooler(states)
        return LongformerBaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)


class _Attention(nn.Module):
    """`LongformerSelfAttention`, with the names of its parts."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.num_heads = own.num_heads
        self.reach = own.one_sided_attn_window_size
        for name in ("query", "key", "value", "query_global", "key_global", "value_global"):
            setattr(self, name, getattr(own, name))

    def forward(
        self, states: Tensor, attention_mask: Tensor, is_index_global_attn: Tensor | None, **_: Any
    ) -> tuple[Tensor]:
        """(B, T, D), mask (B, T), 1 at tokens that attend to all, (B, T) or None -> (B, T, D)."""
        there = attention_mask[:, None, :] > 0  # (B, 1, T)
        positions = torch.arange(states.shape[1], device=states.device)
        is_near = ((positions[:, None] - positions).abs() <= self.reach)[None]  # (1, T, T)
        if is_index_global_attn is None:
            return (self._attend(states, is_near & there, ""),)
        is_global = is_index_global_attn > 0
        local = self._attend(states, (is_near | is_global[:, None, :]) & there, "")
        return (torch.where(is_global[..., None], self._attend(states, there, "_global"), local),)

    def _attend(self, states: Tensor, is_read: Tensor, suffix: str) -> Tensor:
        """(B, T, D), whether a token reads another, (B, T or 1, T) -> (B, T, D)."""
        projections = (getattr(self, name + suffix)(states) for name in ("query", "key", "value"))
        query, key, value = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in projections)
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5  # (B, H, T, T)
        scores = scores.masked_fill(~is_read[:, None], torch.finfo(scores.dtype).min)
        return cast("Tensor", (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2))
