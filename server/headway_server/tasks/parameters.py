"""A call's parameters, checked against the model: what passes here is not looked at again."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Elements
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np

from headway_server.bundles import SamplingDefaults
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.decoding.parameters import SamplingParameters
from headway_server.errors import InvalidInputError

_T = TypeVar("_T")

MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 256
MAX_STOP_IDS: Final = 64
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_TOP_TOKENS: Final = 20
MAX_SAMPLES: Final = 16
MAX_PRIORITY: Final = 100
DEFAULT_NEW_TOKENS: Final = 128

_RANGES: Final[dict[str, tuple[float, float]]] = {
    "parameters.sampling.temperature": (0, 2),
    "parameters.sampling.min_p": (0, 1),
    "parameters.repetition_penalty": (float(np.float32(0.01)), 100),  # the protocol's floats are a little below 0.01
    "parameters.presence_penalty": (-2, 2),
    "parameters.frequency_penalty": (-2, 2),
}
"""Ranges that are the same for every model, by the path of the request's field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Sampling parameters as a call gives them; None takes the model's default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_biases: tuple[tuple[int, float], ...] = ()
    """Token and what is added to its logit."""
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    constraint: ConstraintRequest | None = None
    """What the text must look like; None is anything. Held to its limits where it is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbabilityRequest:
    """Which log-probabilities a call asks for."""

    num_top_tokens: int = 0
    """Likeliest tokens at each position, beside the chosen one."""
    include_prompt: bool = False
    """Whether those of the prompt's tokens are wanted as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingLimits:
    """What a model can hold, in tokens."""

    max_input_tokens: int
    """Of a prompt or a source."""
    max_total_tokens: int
    """Of prompt and continuation together, or of a translation."""
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Checked sampling parameters of a call, before its prompts are known."""

    requested_new_tokens: int | None
    default_new_tokens: int
    seed: int | None
    parameters: SamplingParameters
    """Those that do not depend on the prompt."""

    def for_samples(self, max_new_tokens: int, count: int) -> list[SamplingParameters]:
        """Returns the parameters of each sample of one prompt.

        They share a seed, the caller's or one drawn for this prompt, and differ in the number of the sample.
        """
        seed = secrets.randbits(64) if self.seed is None else self.seed
        return [
            replace(self.parameters, max_new_tokens=max_new_tokens, seed=seed, sample=sample) for sample in range(count)
        ]


def plan_sampling(
    request: SamplingRequest,
    *,
    defaults: SamplingDefaults | None,
    limits: DecodingLimits,
    log_probabilities: LogProbabilityRequest | None = None,
) -> SamplingPlan:
    """Checks the sampling parameters of a call and fills in the model's defaults.

    Args:
        request: What the call gives.
        defaults: The model's.
        limits: The model's.
        log_probabilities: Which are wanted; None is none.

    Raises:
        InvalidInputError: One is out of its range.
    """
    defaults = defaults or SamplingDefaults()
    wanted = log_probabilities
    parameters = SamplingParameters(
        max_new_tokens=1,  # the prompt decides
        min_new_tokens=_given(request.min_new_tokens, 0),
        temperature=_given(request.temperature, defaults.temperature),
        top_k=_given(request.top_k, defaults.top_k),
        top_p=_given(request.top_p, defaults.top_p),
        min_p=_given(request.min_p, defaults.min_p),
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(request.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_given(request.frequency_penalty, defaults.frequency_penalty),
        logit_biases=request.logit_biases,
        stop_strings=request.stop_strings,
        stop_token_ids=request.stop_token_ids,
        num_top_tokens=None if wanted is None else min(wanted.num_top_tokens, limits.vocab_size),
        wants_prompt_log_probabilities=wanted is not None and wanted.include_prompt,
    )
    _check_counts(request, limits)
    _check_drawing(parameters, limits.vocab_size)
    _check_stop_strings(request.stop_strings)
    _check_stop_ids(request.stop_token_ids, limits.vocab_size)
    _check_logit_biases(request.logit_biases, limits.vocab_size)
    if wanted is not None:
        check_range("log_probabilities.top_token_count", wanted.num_top_tokens, 0, MAX_TOP_TOKENS)
    return SamplingPlan(
        requested_new_tokens=request.max_new_tokens,
        default_new_tokens=defaults.max_new_tokens or DEFAULT_NEW_TOKENS,
        seed=request.seed,
        parameters=parameters,
    )


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Checks that a number is from `low` to `high`.

    Raises:
        InvalidInputError: It is not, or is not a number.
    """
    if not low <= value <= high:
        raise InvalidInputError(field, f"is {_number(value)}; must be from {_number(low)} to {_number(high)}")


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _number(value: float) -> str:
    """Writes a whole number in full, as the caller gave it, and any other shortly."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_counts(request: SamplingRequest, limits: DecodingLimits) -> None:
    most = limits.max_total_tokens - 1
    if request.max_new_tokens is not None:
        check_range("parameters.max_new_tokens", request.max_new_tokens, 1, most)
        most = request.max_new_tokens
    least = _given(request.min_new_tokens, 0)
    check_range("parameters.min_new_tokens", least, 0, most)
    if least and request.constraint is not None:
        raise InvalidInputError(
            "parameters.min_new_tokens",
            f"is {least} beside a constraint, which alone says where the text ends; set one of the two",
        )


def _check_drawing(parameters: SamplingParameters, vocab_size: int) -> None:
    for field, (low, high) in _RANGES.items():
        check_range(field, getattr(parameters, field.rpartition(".")[2]), low, high)
    check_range("parameters.sampling.top_k", parameters.top_k, 0, vocab_size)
    if not 0 < parameters.top_p <= 1:
        raise InvalidInputError("parameters.sampling.top_p", f"is {parameters.top_p:g}; must be above 0 and at most 1")


def _check_stop_strings(stop_strings: Elements[str]) -> None:
    _check_at_most("parameters.stop_strings", len(stop_strings), MAX_STOP_STRINGS)
    for index, stop in enumerate(stop_strings):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidInputError(
                f"parameters.stop_strings[{index}]", f"has {len(stop)} characters; must be 1 to {MAX_STOP_LENGTH}"
            )


def _check_stop_ids(stop_ids: Elements[int], vocab_size: int) -> None:
    _check_at_most("parameters.stop_token_ids", len(stop_ids), MAX_STOP_IDS)
    for index, token_id in enumerate(stop_ids):
        check_range(f"parameters.stop_token_ids[{index}]", token_id, 0, vocab_size - 1)


def _check_logit_biases(logit_biases: Elements[tuple[int, float]], vocab_size: int) -> None:
    _check_at_most("parameters.logit_biases", len(logit_biases), MAX_LOGIT_BIASES)
    places: dict[int, int] = {}
    for index, (token_id, bias) in enumerate(logit_biases):
        field = f"parameters.logit_biases[{index}]"
        check_range(f"{field}.token_id", token_id, 0, vocab_size - 1)
        check_range(f"{field}.bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if (first := places.setdefault(token_id, index)) != index:
            raise InvalidInputError(
                f"{field}.token_id", f"is {token_id}, as is that of logit_biases[{first}]; give a token one bias"
            )


def _check_at_most(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidInputError(field, f"has {count} elements; at most {limit}")
