"""Encoders whose own code chooses by numbers that a graph does not know, computed otherwise with the same answers.

Longformer (Beltagy et al. 2020, arXiv 2004.05150) attends in chunks of a window. Here all scores of a text are computed
and those outside of the windows are left out, which takes memory by the square of the length. X-MOD (Pfeiffer et al.
2022, arXiv 2205.06266) picks rows by their language; here all are of one. XLNet (arXiv 1906.08237) subtracts its mask
from 1.0, which PyTorch's tracer takes of floats alone. BROS (Hong et al. 2022, arXiv 2108.04539) has an embedding of
each pair of tokens, and here only one of each token.

B rows, T tokens, D model width, H heads, K head width, E width of an embedding of boxes.
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
    if body.config.model_type == "bros":
        projection = body.bbox_embeddings.bbox_projection
        body.bbox_embeddings = _Waves(body.bbox_embeddings)
        for layer in body.encoder.layer:
            layer.attention.self = _BoxAttention(layer.attention.self, projection)
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


class _Waves(nn.Module):
    """`BrosBboxEmbeddings` of each token, rather than of the difference of two."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.dtype_like = own.bbox_projection.weight
        self.frequencies = tuple(own.bbox_sinusoid_emb.x_pos_emb.inv_freq.tolist())

    def forward(self, boxes: Tensor) -> Tensor:
        """Scaled boxes, (B, T, 8) -> sine and cosine of each coordinate at each frequency, (2, B, T, E/2)."""
        angles = (boxes.float()[..., None] * torch.tensor(self.frequencies)).flatten(2)  # (B, T, E/2)
        return torch.stack([angles.sin(), angles.cos()]).to(self.dtype_like.dtype)


class _BoxAttention(nn.Module):
    """`BrosSelfAttention`, with the names of its parts.

    A query scores the sine and the cosine of each difference of angles, a_j - a_i. By the sums of angles these are
    products of what depends on j alone and what depends on i alone, so that keys of j grow by its sines and cosines.
    """

    def __init__(self, own: Any, projection: nn.Linear) -> None:
        super().__init__()
        self.num_heads, self.width = own.num_attention_heads, own.attention_head_size
        self.query, self.key, self.value, self.projection = own.query, own.key, own.value, projection

    def forward(
        self, states: Tensor, bbox_pos_emb: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """(B, T, D), waves (2, B, T, E/2), bias (B, 1, T, T) -> (B, T, D)."""
        query, key, value = (
            part(states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, T, K)
            for part in (self.query, self.key, self.value)
        )
        sine, cosine = bbox_pos_emb[:, :, None]  # (B, 1, T, E/2) each
        frequencies = sine.shape[-1] // 8
        of_sine, of_cosine = (  # of each coordinate: sines, then cosines
            (query @ self.projection.weight).unflatten(-1, (8, 2, frequencies)).unbind(-2)  # (B, H, T, 8, E/16)
        )
        of_sine, of_cosine = of_sine.flatten(3), of_cosine.flatten(3)  # (B, H, T, E/2)
        query = torch.cat([query, of_sine * cosine + of_cosine * sine, of_cosine * cosine - of_sine * sine], dim=-1)
        waves = torch.cat([sine, cosine], dim=-1).expand(-1, self.num_heads, -1, -1)
        scores = query @ torch.cat([key, waves], dim=-1).transpose(2, 3) * self.width**-0.5  # (B, H, T, T)
        if attention_mask is not None:
            scores = scores + attention_mask
        return (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2), None


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
