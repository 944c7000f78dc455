"""A call's parameters, checked against the model: what passes here is not looked at again."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import SamplingDefaults
from headway_server.engine.sequence import SamplingParameters
from headway_server.errors import InvalidInputError

MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Sampling parameters as a call gives them; None takes the model's default."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingLimits:
    """What a model can hold, in tokens."""

    max_input_tokens: int
    """Of a prompt or a source."""
    max_total_tokens: int
    """Of prompt and continuation together, or of a translation."""
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompt:
    """A prompt that fits the model."""

    input_ids: NDArray[np.int64]
    """(T,)"""
    max_new_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Checked sampling parameters of a call, before its prompts are known."""

    requested_new_tokens: int | None
    default_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop_strings: tuple[str, ...]

    def for_prompt(self, prompt: FittedPrompt) -> SamplingParameters:
        """Returns the parameters of one prompt; without a seed of the caller's, each prompt gets one of its own."""
        return SamplingParameters(
            max_new_tokens=prompt.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=secrets.randbits(64) if self.seed is None else self.seed,
            stop_strings=self.stop_strings,
        )

    def fit(self, input_ids: NDArray[np.int64], *, field: str, limits: DecodingLimits, truncate: bool) -> FittedPrompt:
        """Holds a prompt to the model's limits.

        A prompt may have `max_input_tokens`, and must leave room for the tokens that were asked for, or for one where
        no number was. A longer one is refused, or loses its beginning: until it fits, and where no number was asked
        for, until the default number fits too (half of the model's length at most).

        Args:
            input_ids: (T,) tokens of the prompt.
            field: What the request calls it.
            limits: The model's.
            truncate: Whether a longer one is shortened.

        Raises:
            InvalidInputError: It has no tokens, is too long, or leaves no room for what was asked for.
        """
        total = limits.max_total_tokens
        if len(input_ids) == 0:
            raise InvalidInputError(field, "has nothing the model reads; give it at least one word")
        limit = min(limits.max_input_tokens, total - (self.requested_new_tokens or 1))
        truncated = len(input_ids) > limit
        if truncated and not truncate:
            raise self._too_long(len(input_ids), limit, field, limits)
        if truncated:
            room = self.requested_new_tokens or min(self.default_new_tokens, total // 2)
            input_ids = input_ids[-min(limit, total - room) :]
        max_new_tokens = self.requested_new_tokens or min(self.default_new_tokens, total - len(input_ids))
        return FittedPrompt(input_ids=input_ids, max_new_tokens=max_new_tokens, truncated=truncated)

    def _too_long(self, length: int, limit: int, field: str, limits: DecodingLimits) -> InvalidInputError:
        if length <= min(limits.max_input_tokens, limits.max_total_tokens - 1):
            return InvalidInputError(
                "sampling.max_new_token_count",
                f"is {self.requested_new_tokens}; {field} has {length} tokens and the model holds "
                f"{limits.max_total_tokens}, so at most {limits.max_total_tokens - length} can follow; ask for fewer, "
                "shorten the prompt, or set truncate to have it cut",
            )
        return InvalidInputError(
            field,
            f"has {length} tokens; at most {limit} leave room in the {limits.max_total_tokens} the model holds; "
            "shorten it, or set truncate to have its beginning cut",
        )


def plan_sampling(
    request: SamplingRequest, *, defaults: SamplingDefaults | None, limits: DecodingLimits
) -> SamplingPlan:
    """Checks the sampling parameters of a call and fills in the model's defaults.

    Raises:
        InvalidInputError: One is out of its range.
    """
    defaults = defaults or SamplingDefaults()
    plan = SamplingPlan(
        requested_new_tokens=request.max_new_tokens,
        default_new_tokens=defaults.max_new_tokens or DEFAULT_NEW_TOKENS,
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_k=defaults.top_k if request.top_k is None else request.top_k,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        seed=request.seed,
        stop_strings=request.stop_strings,
    )
    if request.max_new_tokens is not None:
        check_range("sampling.max_new_token_count", request.max_new_tokens, 1, limits.max_total_tokens - 1)
    check_range("sampling.temperature", plan.temperature, 0, MAX_TEMPERATURE)
    check_range("sampling.top_k", plan.top_k, 0, limits.vocab_size)
    if not 0 < plan.top_p <= 1:
        raise InvalidInputError("sampling.top_p", f"is {plan.top_p:g}; must be above 0 and at most 1")
    _check_stop_strings(plan.stop_strings)
    return plan


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Checks that a number is from `low` to `high`.

    Raises:
        InvalidInputError: It is not, or is not a number.
    """
    if not low <= value <= high:
        raise InvalidInputError(field, f"is {_number(value)}; must be from {_number(low)} to {_number(high)}")


def _number(value: float) -> str:
    """Writes a whole number in full, as the caller gave it, and any other shortly."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_stop_strings(stop_strings: tuple[str, ...]) -> None:
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise InvalidInputError(
            "sampling.stop_strings", f"has {len(stop_strings)} elements; at most {MAX_STOP_STRINGS}"
        )
    for index, stop in enumerate(stop_strings):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidInputError(
                f"sampling.stop_strings[{index}]", f"has {len(stop)} characters; must be 1 to {MAX_STOP_LENGTH}"
            )
