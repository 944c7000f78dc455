"""Greedy decoding in PyTorch, with the key/value cache.

B rows, T target tokens, S source tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway_training.models import Transformer
from headway_training.models.parts.attention import cross_attention
from headway_training.models.parts.cache import CachedAttention


@torch.inference_mode()
def translate_greedily(
    model: Transformer, source_ids: Tensor, source_mask: Tensor, *, bos: int, eos: int, max_length: int | None = None
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
    kernel = model.kernel
    attend_cross = cross_attention(model.cross_keys_values(model.encode(source_ids, source_mask)), source_mask, kernel)
    cache = CachedAttention(steps, kernel)
    tokens = source_ids.new_full((len(source_ids), 1), bos)  # (B, 1)
    running = torch.ones(len(source_ids), dtype=torch.bool, device=source_ids.device)  # (B)
    chosen: list[Tensor] = []
    for step in range(steps):
        position_ids = torch.full_like(tokens, step)
        hidden_states = model.decode(tokens, position_ids, cache.at(position_ids), attend_cross)  # (B, 1, D)
        tokens = model.logits(hidden_states).argmax(dim=-1)  # (B, 1)
        chosen.append(tokens)
        running &= tokens[:, 0] != eos
        if not running.any():
            break
    return [_until(row, eos) for row in torch.cat(chosen, dim=1).tolist()]


def _until(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos)] if eos in tokens else tokens
