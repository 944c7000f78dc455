"""Greedy decoding in PyTorch, with the key/value cache or the recurrent state.

B rows, T target tokens, S source tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headway_training.models import RecurrentTranslator, Transformer
from headway_training.models.parts.attention import CachedAttention, cross_attention

_Step = Callable[[Tensor, int], Tensor]
"""Reads the tokens (B, 1) at a position, those before it having been read -> logits (B, 1, V)."""


@torch.inference_mode()
def translate_greedily(
    model: Transformer | RecurrentTranslator,
    source_ids: Tensor,
    source_mask: Tensor,
    *,
    bos: int,
    eos: int,
    max_length: int | None = None,
) -> list[list[int]]:
    """Translates sentences, always taking the likeliest token.

    Args:
        model: The model.
        source_ids: int64 (B, S).
        source_mask: int64 (B, S), 1 at tokens and 0 at padding.
        bos: The token a target begins with.
        eos: The token it ends with.
        max_length: Most tokens of a translation, `eos` included; None: what the model can hold.

    Returns:
        The tokens of every translation, without `bos` and `eos`.
    """
    steps = min(max_length or model.max_target_length, model.max_target_length)
    if isinstance(model, RecurrentTranslator):
        step = _recurrent_step(model, source_ids, source_mask)
    else:
        step = _transformer_step(model, source_ids, source_mask, steps)
    tokens = source_ids.new_full((len(source_ids), 1), bos)  # (B, 1)
    running = torch.ones(len(source_ids), dtype=torch.bool, device=source_ids.device)  # (B)
    chosen: list[Tensor] = []
    for position in range(steps):
        tokens = step(tokens, position).argmax(dim=-1)  # (B, 1)
        chosen.append(tokens)
        running &= tokens[:, 0] != eos
        if not running.any():
            break
    return [_until(row, eos) for row in torch.cat(chosen, dim=1).tolist()]


def _transformer_step(model: Transformer, source_ids: Tensor, source_mask: Tensor, steps: int) -> _Step:
    attend_cross = cross_attention(
        model.cross_keys_values(model.encode(source_ids, source_mask)), source_mask, model.kernel
    )
    cache = CachedAttention(steps, model.kernel)

    def step(tokens: Tensor, position: int) -> Tensor:
        position_ids = torch.full_like(tokens, position)
        return model.logits(model.decode(tokens, position_ids, cache.at(position_ids), attend_cross))

    return step


def _recurrent_step(model: RecurrentTranslator, source_ids: Tensor, source_mask: Tensor) -> _Step:
    cross, (first_state,) = model.encode_source(source_ids, source_mask)
    states = (first_state[:, None],)  # (B, 1, H)

    def step(tokens: Tensor, _position: int) -> Tensor:
        nonlocal states
        logits, states, _ = model.step(tokens, states, cross, source_mask)
        return logits

    return step


def _until(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos)] if eos in tokens else tokens
