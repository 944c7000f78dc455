"""A prompt's tokens, held to what the model can read and what the call asks to follow.

T is the number of tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.engine.request import DecodingLimits, SamplingPlan
from headway_server.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompt:
    """A prompt that fits the model."""

    text: str
    """As the caller gave it, or as its conversation reads."""
    input_ids: NDArray[np.int64]
    """(T,)"""
    max_new_tokens: int
    truncated: bool


def fit_prompt(
    text: str,
    input_ids: NDArray[np.int64],
    *,
    field: str,
    plan: SamplingPlan,
    limits: DecodingLimits,
    truncate: bool,
) -> FittedPrompt:
    """Holds a prompt to the model's limits.

    A prompt may have `max_input_tokens`, and must leave room for the tokens that were asked for, or for one where
    no number was. A longer one is refused, or loses its beginning: until it fits, and where no number was asked
    for, until the default number fits too (half of the model's length at most).

    Args:
        text: The prompt.
        input_ids: (T,) its tokens.
        field: What the request calls it.
        plan: The call's parameters.
        limits: The model's.
        truncate: Whether a longer one is shortened.

    Raises:
        InvalidInputError: It has no tokens, is too long, or leaves no room for what was asked for.
    """
    total, requested = limits.max_total_tokens, plan.requested_new_tokens
    if len(input_ids) == 0:
        raise InvalidInputError(field, "has nothing the model reads; give it at least one word")
    limit = min(limits.max_input_tokens, total - (requested or 1))
    truncated = len(input_ids) > limit
    if truncated and not truncate:
        raise _too_long(len(input_ids), limit, field, requested, limits)
    if truncated:
        room = requested or min(plan.default_new_tokens, total // 2)
        input_ids = input_ids[-min(limit, total - room) :]
    max_new_tokens = requested or min(plan.default_new_tokens, total - len(input_ids))
    if plan.parameters.min_new_tokens > max_new_tokens:
        raise InvalidInputError(
            "sampling.min_new_token_count",
            f"is {plan.parameters.min_new_tokens}; must be from 0 to {max_new_tokens}, the most tokens that follow "
            f"{field}; ask for fewer, or set max_new_token_count too",
        )
    return FittedPrompt(text=text, input_ids=input_ids, max_new_tokens=max_new_tokens, truncated=truncated)


def _too_long(
    length: int, limit: int, field: str, requested_new_tokens: int | None, limits: DecodingLimits
) -> InvalidInputError:
    total = limits.max_total_tokens
    if length <= min(limits.max_input_tokens, total - 1):
        return InvalidInputError(
            "sampling.max_new_token_count",
            f"is {requested_new_tokens}; {field} has {length} tokens and the model holds {total}, so at most "
            f"{total - length} can follow; ask for fewer, shorten the prompt, or set truncate to have it cut",
        )
    return InvalidInputError(
        field,
        f"has {length} tokens; at most {limit} leave room in the {total} the model holds; "
        "shorten it, or set truncate to have its beginning cut",
    )
