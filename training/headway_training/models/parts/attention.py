"""Scaled dot-product attention, and the attention functions that a model is given.

B rows, T query positions, S key positions, L positions of a cache, H heads, G key and value heads (a divisor of H),
K head width.

A model never computes attention itself. Each of its layers calls a function that the model was given (`Attend`,
`AttendCross`) and names itself by its number, so that the function can look up what belongs to that layer, such as its
cache. Calls may come in any order and be repeated, as they are when activations are recomputed in the backward pass.

The functions here serve training and decoding in PyTorch; exported graphs are given others. Each uses one of two
kernels: `scaled_dot_product_attention` in plain operators, which is the reference and what is exported, or
`fused_attention`, torch's own, which trains faster on a GPU.

Deviation from BERT and GPT-2: no dropout on the attention weights, so that a kernel has no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

MASKED_SCORE = -30_000.0
"""Score of a key that must not be seen. The exponential of its distance to any real score is exactly 0. It is finite,
so that a query without keys gets the mean of the values and not NaN, and it is within the range of fp16."""


class Scoring(TypedDict, total=False):
    """What a layer may say of its scores, which otherwise are Q K^T / sqrt(K)."""

    bias: Tensor | None
    """float, broadcastable to (B, H, T, S), added to the scores; what it has past the S keys is not read, so that it
    may be for all positions that there may be."""
    scale: float | None
    """Factor of Q K^T in place of 1 / sqrt(K)."""
    softcap: float | None
    """Bound c of the scores, which become c tanh(score / c) (Bello et al. 2016, arXiv 1611.09940, section 4)."""
    sinks: Tensor | None
    """float (H,), a further score of each head in the softmax, of no key (gpt-oss, arXiv 2508.10925, section 2.1)."""


class TextScoring(Scoring, total=False):
    """The same of a text's attention to itself."""

    window: int | None
    """Keys that a query sees, up to its own (Beltagy et al. 2020, arXiv 2004.05150); of causal attention alone."""


class Attend(Protocol):
    """Attention among the tokens of a text."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        **scoring: Unpack[TextScoring],
    ) -> Tensor:
        """Lets the tokens of a layer attend to each other, and to what a cache holds of earlier ones.

        Args:
            query: float (B, T, H, K).
            key: float (B, T, G, K), of the same tokens.
            value: float (B, T, G, K), of the same tokens.
            layer: number of the calling layer, from 0.
            scoring: what differs from softmax(Q K^T / sqrt(K)) V.

        Returns:
            The context, (B, T, H, K).
        """
        ...


class AttendCross(Protocol):
    """Attention of target tokens to a source, whose keys and values the function already holds."""

    def __call__(self, query: Tensor, *, layer: int, **scoring: Unpack[Scoring]) -> Tensor:
        """(B, T, H, K) -> (B, T, H, K); the arguments are those of `Attend`."""
        ...


class Kernel(Protocol):
    """The computation of attention."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        **scoring: Unpack[Scoring],
    ) -> Tensor:
        """The arguments and result are those of `scaled_dot_product_attention`."""
        ...


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes softmax(scale Q K^T + bias) V in plain operators (Vaswani et al. 2017, equation 1).

    Args:
        query: float (B, T, H, K).
        key: float (B, S, G, K).
        value: float (B, S, G, K).
        mask: bool, broadcastable to (B, H, T, S): True where the query may see the key. None: everywhere.
        causal: the query at i sees only the keys at 0..i; S must equal T.
        bias: float, broadcastable to (B, H, T, S); None: nothing is added.
        scale: None: 1 / sqrt(K).
        softcap: None: scores are unbounded.
        sinks: float (H,); None: the weights of a query sum to 1.

    Returns:
        The context, (B, T, H, K). A query that may see nothing gets the mean of the values, or zeros beside a sink.
    """
    weights = attention_weights(query, key, mask, causal=causal, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
    return _weigh(weights, value)


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes softmax(scale Q K^T + bias), (B, H, T, S); the arguments are those of `scaled_dot_product_attention`.

    A row sums to 1, or less with a sink, and is exactly 0 where the query may not see the key.
    """
    query, key = query.transpose(1, 2), _by_query_head(key, query.shape[2])  # (B, H, ., K)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale  # (B, H, T, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias[..., : scores.shape[-1]]
    visible = _visible(mask, query.shape[2], causal, query.device)
    if visible is not None:
        scores = torch.where(visible, scores, MASKED_SCORE)
    if sinks is None:
        return scores.softmax(dim=-1)
    of_heads = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)  # (B, H, T, 1)
    return torch.cat([scores, of_heads], dim=-1).softmax(dim=-1)[..., :-1]


def _weigh(weights: Tensor, value: Tensor) -> Tensor:
    """Averages values by weights: (B, H, T, S), (B, S, G, K) -> (B, T, H, K)."""
    return (weights @ _by_query_head(value, weights.shape[1])).transpose(1, 2)


def _by_query_head(tensor: Tensor, num_heads: int) -> Tensor:
    """Gives each query head its key or value head: (B, S, G, K) -> (B, H, S, K)."""
    repeats = num_heads // tensor.shape[2]
    if repeats > 1:
        tensor = tensor.repeat_interleave(repeats, dim=2)
    return tensor.transpose(1, 2)


class RecordingKernel:
    """`scaled_dot_product_attention` that keeps the weights of its calls, in their order.

    Attributes:
        weights: float (B, H, T, S) of each call.
    """

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        **scoring: Unpack[Scoring],
    ) -> Tensor:
        """The arguments and result are those of `scaled_dot_product_attention`."""
        weights = attention_weights(query, key, mask, causal=causal, **scoring)
        self.weights.append(weights)
        return _weigh(weights, value)

    def __repr__(self) -> str:
        return f"RecordingKernel({len(self.weights)} calls)"


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `scaled_dot_product_attention` with torch's fused kernels, which have neither caps nor sinks.

    The arguments and result are the same, but a query that may see nothing gets zeros.
    """
    if softcap is not None or sinks is not None:
        return scaled_dot_product_attention(
            query, key, value, mask, causal=causal, bias=bias, scale=scale, softcap=softcap, sinks=sinks
        )
    if causal and (mask is not None or bias is not None):  # torch takes either a mask or is_causal
        mask, causal = _visible(mask, query.shape[1], causal, query.device), False
    if bias is not None:
        bias = bias[..., : key.shape[1]]
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    context = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return context.transpose(1, 2)  # (B, T, H, K)


KERNELS: Mapping[str, Kernel] = MappingProxyType({"plain": scaled_dot_product_attention, "fused": fused_attention})
"""The kernels by the names that a model's `use_attention` takes."""


def full_attention(kernel: Kernel = scaled_dot_product_attention) -> Attend:
    """Every token sees every token."""
    return _whole_text_attention(kernel)


def causal_attention(kernel: Kernel = scaled_dot_product_attention) -> Attend:
    """Every token sees itself and the tokens before it. Padding on the right is seen by padding alone."""
    return _whole_text_attention(kernel, causal=True)


def padding_attention(attention_mask: Tensor, kernel: Kernel = scaled_dot_product_attention) -> Attend:
    """Every token sees every token that is not padding.

    Args:
        attention_mask: integer or bool (B, S), 1 at tokens and 0 at padding.
        kernel: computes attention.
    """
    return _whole_text_attention(kernel, _key_mask(attention_mask))


def _whole_text_attention(kernel: Kernel, mask: Tensor | None = None, *, causal: bool = False) -> Attend:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,  # noqa: ARG001 (all layers attend alike)
        window: int | None = None,
        **scoring: Unpack[Scoring],
    ) -> Tensor:
        if window is None or window >= query.shape[1]:
            return kernel(query, key, value, mask, causal=causal, **scoring)
        if not causal:
            raise ValueError(f"window is {window}, and attention is not causal; leave it out")
        positions = torch.arange(query.shape[1], device=query.device)
        return kernel(query, key, value, _window(positions, positions, window), **scoring)

    return attend


def cross_attention(
    keys_values: Sequence[tuple[Tensor, Tensor]],
    source_mask: Tensor,
    kernel: Kernel = scaled_dot_product_attention,
) -> AttendCross:
    """The tokens of a target see every token of their source that is not padding.

    Args:
        keys_values: the cross-attention keys and values of each layer, each (B, S, G, K).
        source_mask: integer or bool (B, S), 1 at tokens and 0 at padding.
        kernel: computes attention.
    """
    mask = _key_mask(source_mask)

    def attend_cross(query: Tensor, *, layer: int, **scoring: Unpack[Scoring]) -> Tensor:
        key, value = keys_values[layer]
        return kernel(query, key, value, mask, **scoring)

    return attend_cross


class CachedAttention:
    """A key/value cache of every layer, for decoding in PyTorch a few tokens at a time.

    New tokens see themselves and everything before them in their row. Rows may be at different positions. A row may be
    padded on the right: padding writes to later positions, which no token sees before a real one has overwritten them.

    Args:
        max_length: positions that a row can hold.
        kernel: computes attention.
    """

    def __init__(self, max_length: int, kernel: Kernel = scaled_dot_product_attention) -> None:
        self._max_length = max_length
        self._kernel = kernel
        self._keys_values: dict[int, tuple[Tensor, Tensor]] = {}  # by layer; each (B, L, G, K)

    def __repr__(self) -> str:
        return f"CachedAttention(max_length={self._max_length}, num_layers={len(self._keys_values)})"

    def at(self, position_ids: Tensor) -> Attend:
        """Returns the attention function of one step; the S of its `bias` is `max_length`.

        Args:
            position_ids: int64 (B, T), the positions of the step's tokens, from 0 and without gaps in a row.

        Raises:
            ValueError: a position lies past the end of the cache.
        """
        last = int(position_ids.max())
        if last >= self._max_length:
            raise ValueError(f"position {last} is past the cache, which holds positions 0 to {self._max_length - 1}")
        rows = torch.arange(len(position_ids), device=position_ids.device)[:, None]  # (B, 1)
        cached = torch.arange(self._max_length, device=position_ids.device)  # (L)
        mask = (cached <= position_ids[..., None])[:, None]  # (B, 1, T, L)

        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            layer: int,
            window: int | None = None,
            **scoring: Unpack[Scoring],
        ) -> Tensor:
            if layer not in self._keys_values:
                self._keys_values[layer] = self._empty(key), self._empty(value)
            keys, values = self._keys_values[layer]
            keys[rows, position_ids] = key
            values[rows, position_ids] = value
            seen = mask if window is None else _window(position_ids, cached, window)[:, None]  # (B, 1, T, L)
            return self._kernel(query, keys, values, seen, **scoring)

        return attend

    def _empty(self, tensor: Tensor) -> Tensor:
        rows, _, heads, head_dim = tensor.shape
        return tensor.new_zeros(rows, self._max_length, heads, head_dim)


def _key_mask(attention_mask: Tensor) -> Tensor:
    return attention_mask.bool()[:, None, None, :]  # (B, 1, 1, S)


def _window(positions: Tensor, keys: Tensor, window: int) -> Tensor:
    """Returns where queries at `positions`, (..., T), see keys at the positions `keys`, (S,): bool (..., T, S)."""
    distances = positions[..., None] - keys
    return (distances >= 0) & (distances < window)


def _visible(mask: Tensor | None, length: int, causal: bool, device: torch.device) -> Tensor | None:
    """Combines a mask with causality over T = S = `length` tokens."""
    if not causal:
        return mask
    earlier = torch.ones(length, length, dtype=torch.bool, device=device).tril()  # (T, T)
    return earlier if mask is None else mask & earlier
