"""Scaled dot-product attention, and the attention functions that models are given.

B rows, T query positions, S key positions, H heads, G key and value heads (H, or a divisor of it), K head width.

A model never computes attention itself: it calls a function it was given, once a layer (docs/bring-your-own.md). This
module holds those functions for whole texts; `cache.py` holds the one that decodes a token at a time. Each is built on
a kernel: `scaled_dot_product_attention`, written out in plain operators, which is the reference and what is exported,
or `fused_attention`, torch's own, which is faster to train with.

Deviation from BERT and GPT-2: no dropout on the attention weights, so that a kernel has no state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (B, T, H, K), key and value (B, T, G, K) of the same tokens -> context (B, T, H, K)."""

AttendCross = Callable[[Tensor], Tensor]
"""query (B, T, H, K) -> context (B, T, H, K) over keys and values the function already holds."""

MASKED_SCORE = -30_000.0
"""Score of a position that must not be seen. The exponential of its distance to any real score is 0 exactly. It is
finite, so that a row masked whole gets the mean of its values and not NaN, and within the range of fp16, so that a
graph converted to half precision keeps it."""


class Kernel(Protocol):
    """Attention proper: the same function in different speeds."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        """As `scaled_dot_product_attention`."""
        ...


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Computes softmax(Q K^T / sqrt(K)) V in plain operators (Vaswani et al. 2017, equation 1).

    Args:
        query: float (B, T, H, K).
        key: float (B, S, G, K).
        value: float (B, S, G, K).
        mask: bool, broadcastable to (B, H, T, S): True where the query may see the key. None: everywhere.
        causal: the query at i sees only the keys at 0..i; S must equal T.

    Returns:
        The context, (B, T, H, K). A query that may see nothing gets the mean of the values.
    """
    query, key, value = (
        tensor.transpose(1, 2) for tensor in (query, *_repeat_heads(query, key, value))
    )  # (B, H, ., K)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # (B, H, T, S)
    visible = _visible(mask, causal, query)
    if visible is not None:
        scores = torch.where(visible, scores, MASKED_SCORE)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)  # (B, T, H, K)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Computes `scaled_dot_product_attention` with torch's fused kernels.

    The same arguments and result, but a query that may see nothing gets what torch gives it: zeros.
    """
    if mask is not None and causal:  # torch takes one or the other
        mask, causal = _visible(mask, causal, query.transpose(1, 2)), False
    context = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return context.transpose(1, 2)  # (B, T, H, K)


KERNELS: Mapping[str, Kernel] = MappingProxyType({"plain": scaled_dot_product_attention, "fused": fused_attention})
"""The kernels by the name a model's `use_attention` takes."""


def full_attention(kernel: Kernel = scaled_dot_product_attention) -> Attend:
    """Every token sees every token."""
    return kernel


def causal_attention(kernel: Kernel = scaled_dot_product_attention) -> Attend:
    """Every token sees itself and the tokens before it; padding on the right is therefore seen by padding alone."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(query, key, value, causal=True)

    return attend


def padding_attention(attention_mask: Tensor, kernel: Kernel = scaled_dot_product_attention) -> Attend:
    """Every token sees every token that is not padding.

    Args:
        attention_mask: integer or bool (B, S), 1 at tokens and 0 at padding.
        kernel: what computes it.
    """
    mask = _key_mask(attention_mask)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(query, key, value, mask)

    return attend


def cross_attention(
    keys_values: Sequence[tuple[Tensor, Tensor]],
    source_mask: Tensor,
    kernel: Kernel = scaled_dot_product_attention,
) -> AttendCross:
    """The tokens of a target see every token of their source that is not padding.

    The n-th call of what is returned serves the n-th layer; after the last layer it starts over, so that one serves
    any number of steps.

    Args:
        keys_values: a key and a value a layer, each (B, S, G, K).
        source_mask: integer or bool (B, S), 1 at tokens and 0 at padding.
        kernel: what computes it.
    """
    mask = _key_mask(source_mask)
    layers = itertools.cycle(keys_values)

    def attend_cross(query: Tensor) -> Tensor:
        key, value = next(layers)
        return kernel(query, key, value, mask)

    return attend_cross


def _key_mask(attention_mask: Tensor) -> Tensor:
    return attention_mask.bool()[:, None, None, :]  # (B, 1, 1, S)


def _visible(mask: Tensor | None, causal: bool, query: Tensor) -> Tensor | None:
    """Combines a mask with causality; query is (B, H, T, K)."""
    if not causal:
        return mask
    length = query.shape[-2]
    earlier = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()  # (T, T)
    return earlier if mask is None else mask & earlier


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats grouped key and value heads until there is one for each query head."""
    if key.shape[2] == query.shape[2]:
        return key, value
    repeats = query.shape[2] // key.shape[2]
    return key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
