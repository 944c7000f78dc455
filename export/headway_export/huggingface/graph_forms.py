"""Encoders whose own code chooses by numbers that a graph does not know, computed otherwise with the same answers.

Longformer (Beltagy et al. 2020, arXiv 2004.05150) attends in chunks of a window. Here all scores of a text are computed
and those outside of the windows are left out, which takes memory by the square of the length. X-MOD (Pfeiffer et al.
2022, arXiv 2205.06266) picks rows by their language; here all are of one. XLNet (arXiv 1906.08237) subtracts its mask
from 1.0, which PyTorch's tracer takes of floats alone. BROS (Hong et al. 2022, arXiv 2108.04539) has an embedding of
each pair of tokens, and here only one of each token. LED (arXiv 2004.05150, section 7) has Longformer's encoder, and a
decoder that computes attention by itself, as MVP's does; here it asks for the attention that it is given.

B rows, T tokens, D model width, H heads, K head width, E width of an embedding of boxes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.led.modeling_led import LEDDecoderAttention
from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling
from transformers.models.mvp.modeling_mvp import MvpAttention
from transformers.models.speecht5.modeling_speecht5 import SpeechT5Attention, SpeechT5EncoderLayer

_WRITTEN: Final = {LEDDecoderAttention: 3, MvpAttention: 2, SpeechT5Attention: 2}
"""Attention of decoders that is computed by itself, and how many values a layer expects of it."""


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


def with_summary_token(model: nn.Module) -> nn.Module:
    """Lets the first token of an LED source attend to all and be attended to by all, as its documentation advises.

    Other models stay as they are.
    """
    if cast("Any", model).config.model_type == "led":
        cast("Any", model).get_encoder().register_forward_pre_hook(_with_first_global, with_kwargs=True)
    return model


def with_given_attention(model: nn.Module, attention: str) -> None:
    """Replaces what `with_summary_token` and a family's own attention compute by forms that a graph can be traced of.

    Args:
        model: An encoder-decoder; it is changed, and most stay as they are.
        attention: Name of the attention that decoders ask for.
    """
    for part in list(model.modules()):
        if isinstance(part, SpeechT5EncoderLayer):  # whose attention is relative, and has no cache
            continue
        for name, child in list(part.named_children()):
            if (num_values := _WRITTEN.get(type(child))) is not None:
                setattr(part, name, _AskingAttention(child, attention, num_values))
    if cast("Any", model).config.model_type == "led":
        body = cast("Any", model).get_encoder()
        cast("Any", model).base_model.encoder = _LedEncoder(body)


def with_weights(layer: nn.Module) -> None:
    """Lets such attention give its weights in every call, as the library's interface does."""
    if type(layer) in _WRITTEN:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "output_attentions": True}), with_kwargs=True
        )


def _with_first_global(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if kwargs.get("global_attention_mask") is not None:
        return args, kwargs
    source = args[0] if args else kwargs["input_ids"]
    return args, {**kwargs, "global_attention_mask": _first(source)}


def _first(source: Tensor) -> Tensor:
    """(B, T) -> the same shape, 1 at the first token of each row."""
    return (torch.arange(source.shape[1], device=source.device) == 0).to(torch.int64).expand(source.shape)


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


class _LedEncoder(nn.Module):
    """`LEDEncoder`, with the names of its parts, whose first token attends to all."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.config = own.config
        self.embed_tokens, self.embed_positions = own.embed_tokens, own.embed_positions
        self.layernorm_embedding, self.layers = own.layernorm_embedding, own.layers
        for layer in own.layers:
            layer.self_attn.longformer_self_attn = _Attention(layer.self_attn.longformer_self_attn)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
        """(B, T) each -> `last_hidden_state` (B, T, D)."""
        positions = self.embed_positions.weight[: input_ids.shape[1]]
        states = self.layernorm_embedding(self.embed_tokens(input_ids) + positions)
        for layer in self.layers:
            (states,) = layer(states, attention_mask=attention_mask, is_index_global_attn=_first(input_ids))
        return BaseModelOutput(last_hidden_state=states)


class _AskingAttention(nn.Module):
    """Attention of decoders of LED, MVP and SpeechT5, with the names of their parts, by the library's interface."""

    def __init__(self, own: Any, attention: str, num_values: int) -> None:
        super().__init__()
        self.attention, self.num_values = attention, num_values
        self.layer_idx, self.head_dim, self.scaling = own.layer_idx, own.head_dim, own.scaling
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = own.q_proj, own.k_proj, own.v_proj, own.out_proj

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor | None, ...]:
        """(B, T, D), the source (B, S, D) or None -> (B, T, D), and nothing in the places of what else it gives."""
        read = hidden_states if key_value_states is None else key_value_states
        query, key, value = (
            projection(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T or S, K)
            for projection, states in ((self.q_proj, hidden_states), (self.k_proj, read), (self.v_proj, read))
        )
        attend = ALL_ATTENTION_FUNCTIONS[self.attention]
        found, _weights = attend(self, query, key, value, attention_mask, scaling=self.scaling)
        return (self.out_proj(found.flatten(2)), *(None,) * (self.num_values - 1))


class _Attention(nn.Module):
    """`LongformerSelfAttention`, with the names of its parts."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.num_heads = own.num_heads
        self.reach = own.one_sided_attn_window_size
        for name in ("query", "key", "value", "query_global", "key_global", "value_global"):
            setattr(self, name, getattr(own, name))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, is_index_global_attn: Tensor | None, **_: Any
    ) -> tuple[Tensor]:
        """(B, T, D), mask (B, T), 1 at tokens that attend to all, (B, T) or None -> (B, T, D)."""
        there = attention_mask[:, None, :] > 0  # (B, 1, T)
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        is_near = ((positions[:, None] - positions).abs() <= self.reach)[None]  # (1, T, T)
        if is_index_global_attn is None:
            return (self._attend(hidden_states, is_near & there, ""),)
        is_global = is_index_global_attn > 0
        local = self._attend(hidden_states, (is_near | is_global[:, None, :]) & there, "")
        return (torch.where(is_global[..., None], self._attend(hidden_states, there, "_global"), local),)

    def _attend(self, states: Tensor, is_read: Tensor, suffix: str) -> Tensor:
        """(B, T, D), whether a token reads another, (B, T or 1, T) -> (B, T, D)."""
        projections = (getattr(self, name + suffix)(states) for name in ("query", "key", "value"))
        query, key, value = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in projections)
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5  # (B, H, T, T)
        scores = scores.masked_fill(~is_read[:, None], torch.finfo(scores.dtype).min)
        return cast("Tensor", (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2))
