"""From prompts and conversations to tokens that fit the model and leave room for what the call asks to follow.

T is the number of tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.errors import InvalidInputError, NoChatTemplateError
from headway_server.preprocessing import ChatTemplate, ChatTurn, TextTokenizer
from headway_server.tasks.parameters import DecodingLimits, SamplingPlan

Conversation: TypeAlias = tuple[ChatTurn, ...]
Prompt: TypeAlias = str | Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompt:
    """A prompt that fits the model."""

    text: str
    """As the caller gave it, or as its conversation reads."""
    input_ids: NDArray[np.int64]
    """(T,)"""
    max_new_tokens: int
    truncated: bool


class PromptReader:
    """Reads prompts for one model."""

    def __init__(
        self, tokenizer: TextTokenizer, *, limits: DecodingLimits, chat_template: ChatTemplate | None, owner: str
    ) -> None:
        """Reads with the tokenizer of the model `owner`, conversations with its chat template."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._chat_template = chat_template
        self._owner = owner

    def check_kind(self, prompts: Sequence[Prompt]) -> None:
        """Checks, before anything is done for a call, that its prompts can be read at all.

        Raises:
            NoChatTemplateError: They are conversations, and there is no chat template.
        """
        if self._chat_template is None and not all(isinstance(prompt, str) for prompt in prompts):
            raise NoChatTemplateError(
                f"{self._owner} has no chat template, so it continues prompts but no conversations; "
                "write the conversation as a prompt, or ask a model that has one"
            )

    async def read(
        self, prompts: Sequence[Prompt], *, fields: Sequence[str], plan: SamplingPlan, truncate: bool
    ) -> list[FittedPrompt]:
        """Makes tokens of prompts and holds them to the model's limits; nothing follows the first refusal.

        Args:
            prompts: Texts or conversations, of one kind that can be read.
            fields: What the request calls each of them, for messages.
            plan: The call's parameters.
            truncate: Whether a prompt past the limit is shortened at its beginning instead of refused.

        Raises:
            InvalidInputError: The chat template refuses a conversation, or `fit_prompt` a prompt.
        """
        fitted: list[FittedPrompt] = []
        async with aclosing(self._encode(prompts, fields)) as encoded:
            async for text, input_ids in encoded:
                field = fields[len(fitted)]
                fitted.append(
                    fit_prompt(text, input_ids, field=field, plan=plan, limits=self._limits, truncate=truncate)
                )
        return fitted

    async def _encode(
        self, prompts: Sequence[Prompt], fields: Sequence[str]
    ) -> AsyncGenerator[tuple[str, NDArray[np.int64]], None]:
        """Yields the text and the tokens (T,) of each prompt.

        Texts go without the tokenizer's post-processor: what it adds at an end would end the prompt.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        conversations = [prompt for prompt in prompts if not isinstance(prompt, str)]
        assert not texts or not conversations, "a call has one or the other"
        async with aclosing(self._tokenizer.encode_each(texts, add_special_tokens=False)) as each:
            index = 0
            async for encoded in each:
                yield texts[index], encoded.input_ids
                index += 1
        for conversation, field in zip(conversations, fields, strict=False):
            assert self._chat_template is not None, "see check_kind"
            (prompt,) = await self._chat_template.encode([conversation], fields=[field])
            yield prompt.text, prompt.input_ids

    def __repr__(self) -> str:
        return f"PromptReader({self._owner}, {'no' if self._chat_template is None else 'a'} chat template)"


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
            "parameters.min_new_tokens",
            f"is {plan.parameters.min_new_tokens}; must be from 0 to {max_new_tokens}, the most tokens that follow "
            f"{field}; ask for fewer, or set max_new_tokens too",
        )
    return FittedPrompt(text=text, input_ids=input_ids, max_new_tokens=max_new_tokens, truncated=truncated)


def _too_long(
    length: int, limit: int, field: str, requested_new_tokens: int | None, limits: DecodingLimits
) -> InvalidInputError:
    total = limits.max_total_tokens
    if length <= min(limits.max_input_tokens, total - 1):
        return InvalidInputError(
            "parameters.max_new_tokens",
            f"is {requested_new_tokens}; {field} has {length} tokens and the model holds {total}, so at most "
            f"{total - length} can follow; ask for fewer, shorten the prompt, or set truncate to have it cut",
        )
    return InvalidInputError(
        field,
        f"has {length} tokens; at most {limit} leave room in the {total} the model holds; "
        "shorten it, or set truncate to have its beginning cut",
    )
