"""Greedy decoding in PyTorch, with a key/value cache: the reference that exports are held to, and an evaluation's loop.

B rows, T tokens, S source tokens, V vocabulary. A model should be in evaluation mode, or dropout joins in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway_training.models.parts.attention import (
    Attend,
    Kernel,
    cross_attention,
    scaled_dot_product_attention,
)
from headway_training.models.parts.cache import CachedAttention
from headway_training.models.protocols import Decoder, EncoderDecoder


@torch.inference_mode()
def generate_greedily(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_id: int | None = None,
    device: torch.device | str = "cpu",
    kernel: Kernel = scaled_dot_product_attention,
) -> list[list[int]]:
    """Continues each prompt with its most probable token, again and again.

    Args:
        model: what predicts the next token.
        prompts: token ids; each prompt has at least one, and may be of any length.
        max_new_tokens: most tokens to add; fewer where `max_length` is reached.
        eos_id: a row ends with this token; None: none does.
        device: where the model is.
        kernel: what computes attention.

    Returns:
        The new tokens of each row, the end token not included.

    Raises:
        ValueError: a prompt is empty or longer than the model's `max_length`.
    """
    for prompt in prompts:
        if not 0 < len(prompt) <= model.max_length:
            raise ValueError(f"a prompt must have 1 to {model.max_length} tokens, and has {len(prompt)}")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)

    def step(input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        return model.hidden_states(input_ids, position_ids, attend)

    cache = CachedAttention(model.max_length, kernel)
    room = [min(max_new_tokens, model.max_length - len(prompt)) for prompt in prompts]
    return _decode(step, model.logits, cache, _pad(prompts, device), lengths, room=room, eos_id=eos_id)


@torch.inference_mode()
def translate_greedily(
    model: EncoderDecoder,
    source_ids: Tensor,
    source_mask: Tensor,
    *,
    bos_id: int,
    eos_id: int,
    max_new_tokens: int,
    kernel: Kernel = scaled_dot_product_attention,
) -> list[list[int]]:
    """Translates each source sentence by its most probable next token, again and again.

    Args:
        model: what predicts the next token.
        source_ids: int64 (B, S).
        source_mask: int64 (B, S), 1 at tokens and 0 at padding.
        bos_id: the first token of a target.
        eos_id: a target ends with this token.
        max_new_tokens: most tokens after the first; fewer where `max_target_length` is reached.
        kernel: what computes attention.

    Returns:
        The tokens of each translation, neither the first nor the end token included.
    """
    keys_values = model.cross_keys_values(model.encode(source_ids, source_mask))
    attend_cross = cross_attention(keys_values, source_mask, kernel)

    def step(input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        return model.decode(input_ids, position_ids, attend, attend_cross)

    rows = len(source_ids)
    cache = CachedAttention(model.max_target_length, kernel)
    first = source_ids.new_full((rows, 1), bos_id)
    room = [min(max_new_tokens, model.max_target_length - 1)] * rows
    return _decode(step, model.logits, cache, first, torch.ones_like(first[:, 0]), room=room, eos_id=eos_id)


def _decode(
    step: Callable[[Tensor, Tensor, Attend], Tensor],
    logits: Callable[[Tensor], Tensor],
    cache: CachedAttention,
    input_ids: Tensor,
    lengths: Tensor,
    *,
    room: Sequence[int],
    eos_id: int | None,
) -> list[list[int]]:
    """Reads the prompts (B, T) of `lengths` (B) in one step, then a token of every row a step.

    A row that has ended is carried along, at its last position, until all have.
    """
    rows = torch.arange(len(input_ids), device=input_ids.device)
    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)  # (B, T)
    hidden_states = step(input_ids, position_ids, cache.at(position_ids))  # (B, T, D)
    last = hidden_states[rows, lengths - 1]  # (B, D)
    outputs: list[list[int]] = [[] for _ in room]
    running = [limit > 0 for limit in room]
    while any(running):
        tokens = logits(last).argmax(dim=-1)  # (B)
        for row, token in enumerate(tokens.tolist()):
            if running[row] and token != eos_id:
                outputs[row].append(token)
            running[row] = running[row] and token != eos_id and len(outputs[row]) < room[row]
        if any(running):
            lengths = lengths + torch.tensor(running, device=lengths.device)
            position_ids = lengths[:, None] - 1  # (B, 1)
            last = step(tokens[:, None], position_ids, cache.at(position_ids))[:, 0]  # (B, D)
    return outputs


def _pad(prompts: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    longest = max(len(prompt) for prompt in prompts)
    return torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)  # (B, T)
