"""Validation of sampling parameters against the model. Nothing is checked again after that.

A call's parameters are fields of `SamplingParameters` by name; the protocol uses the same names. A new sampling
parameter needs a field in the protocol, a field in `SamplingParameters` with its range here, and its rule in
`decoding/sampling/`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Elements
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from headway_server.bundles import SamplingDefaults
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.decoding.parameters import SamplingParameters
from headway_server.errors import FieldName, InvalidInputError
from headway_server.field_rules import FieldRules, most_characters, most_elements, rules_of

Given: TypeAlias = Mapping[str, Any]
"""Parameters of a call by the names of `SamplingParameters`; for generation also `constraint`, a
`ConstraintRequest`."""

MAX_STOP_STRINGS: Final = most_elements("GenerationParameters.stop_strings")
MAX_STOP_LENGTH: Final = most_characters("GenerationParameters.stop_strings")
MAX_STOP_IDS: Final = most_elements("GenerationParameters.stop_token_ids")
MAX_LOGIT_BIASES: Final = most_elements("GenerationParameters.logit_biases")
EXPECTED_NEW_TOKENS: Final = 128
"""Estimated length of a text without a maximum, for admission, and for the room that truncation leaves."""

_RULES: Final[Mapping[str, FieldRules]] = {
    f"parameters.{path}": rules_of(field)
    for path, field in (
        ("sampling.temperature", "SamplingParameters.temperature"),
        ("sampling.top_p", "SamplingParameters.top_p"),
        ("sampling.min_p", "SamplingParameters.min_p"),
        ("repetition_penalty", "GenerationParameters.repetition_penalty"),
        ("presence_penalty", "GenerationParameters.presence_penalty"),
        ("frequency_penalty", "GenerationParameters.frequency_penalty"),
    )
}
"""Rules common to all models, by the path of the request's field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbabilityRequest:
    """Requested log-probabilities."""

    num_top_tokens: int = 0
    """Number of likeliest tokens at each position, besides the chosen one."""
    include_prompt: bool = False
    """True returns those of the prompt's tokens as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingLimits:
    """Maximum lengths of a model, in tokens."""

    max_input_tokens: int
    """Maximum of a prompt or source."""
    max_total_tokens: int
    """Maximum of prompt and continuation together, or of a translation."""
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Validated parameters of a call, before its prompts are known."""

    requested_new_tokens: int | None
    default_new_tokens: int | None
    """The model's own default; None: up to its maximum length."""
    seed: int | None
    constraint: ConstraintRequest | None
    parameters: SamplingParameters
    """Parameters that do not depend on the prompt."""

    @property
    def expected_new_tokens(self) -> int:
        """New tokens of a prompt that leaves room for them, estimated if there is no maximum."""
        return self.requested_new_tokens or self.default_new_tokens or EXPECTED_NEW_TOKENS

    def for_samples(self, max_new_tokens: int, count: int) -> list[SamplingParameters]:
        """Returns the parameters of each sample of one prompt.

        The samples share a seed, the caller's or a random one of this prompt, and differ in their indices.
        """
        seed = draw_seed(self.seed)
        return [
            replace(self.parameters, max_new_tokens=max_new_tokens, seed=seed, sample=sample) for sample in range(count)
        ]


def plan_sampling(
    given: Given,
    *,
    defaults: SamplingDefaults | None,
    limits: DecodingLimits,
    log_probabilities: LogProbabilityRequest | None = None,
) -> SamplingPlan:
    """Validates the parameters of a generation call and fills in the model's defaults.

    Args:
        given: Parameters set by the call.
        defaults: Defaults of the model.
        limits: Limits of the model.
        log_probabilities: Requested log-probabilities; None: none.

    Raises:
        InvalidInputError: A parameter is out of its range.
    """
    defaults = defaults or SamplingDefaults()
    wanted = log_probabilities
    values = {**defaults.model_dump(exclude={"max_new_tokens"}), **given}
    requested, seed, constraint = (values.pop(name, None) for name in ("max_new_tokens", "seed", "constraint"))
    parameters = SamplingParameters(
        max_new_tokens=1,  # set when the prompt is known
        num_top_tokens=None if wanted is None else min(wanted.num_top_tokens, limits.vocab_size),
        wants_prompt_log_probabilities=wanted is not None and wanted.include_prompt,
        **values,
    )
    _check_counts(requested, parameters.min_new_tokens, limits, has_constraint=constraint is not None)
    if (budget := parameters.thinking_token_budget) is not None:
        check_rules("parameters.thinking_token_budget", budget, "GenerationParameters.thinking_token_budget")
    check_sampling(parameters, limits.vocab_size)
    _check_stop_strings(parameters.stop_strings)
    _check_stop_ids(parameters.stop_token_ids, limits.vocab_size)
    _check_logit_biases(parameters.logit_biases, limits.vocab_size)
    if wanted is not None:
        check_rules("log_probabilities.top_token_count", wanted.num_top_tokens, "LogProbabilityOptions.top_token_count")
    return SamplingPlan(
        requested_new_tokens=requested,
        default_new_tokens=defaults.max_new_tokens,
        seed=seed,
        constraint=constraint,
        parameters=parameters,
    )


def draw_seed(given: int | None) -> int:
    """Returns the caller's seed, or a random one."""
    return random.getrandbits(64) if given is None else given


def check_sampling(parameters: SamplingParameters, vocab_size: int) -> None:
    """Checks the parameters of token sampling.

    Raises:
        InvalidInputError: A parameter is out of its range.
    """
    for field, rules in _RULES.items():
        check_rules(field, getattr(parameters, field.rpartition(".")[2]), rules)
    check_range("parameters.sampling.top_k", parameters.top_k, 0, vocab_size)


def check_rules(field: str, value: float, rules: FieldRules | str) -> None:
    """Checks a number against the rules of a protocol field.

    Args:
        field: Its name in error messages.
        value: The number.
        rules: The rules, or the field that has them, such as `LogitBias.bias`.

    Raises:
        InvalidInputError: The number breaks a rule, or is NaN.
    """
    rules = rules_of(rules) if isinstance(rules, str) else rules
    assert rules.maximum is not None, field
    if rules.above is not None:
        check_above(field, value, rules.above, rules.maximum)
    else:
        check_range(field, value, rules.minimum or 0, rules.maximum)


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Checks that a number is from `low` to `high`.

    Raises:
        InvalidInputError: It is not, or is not a number.
    """
    if not low <= value <= high:
        raise InvalidInputError(field, f"is {_number(value)}; must be from {_number(low)} to {_number(high)}")


def check_above(field: str, value: float, low: float, high: float) -> None:
    """Checks that a number is above `low` and at most `high`.

    Raises:
        InvalidInputError: It is not, or is not a number.
    """
    if not low < value <= high:
        raise InvalidInputError(field, f"is {value:g}; must be above {low:g} and at most {high:g}")


def check_at_most(field: str, count: int, limit: int) -> None:
    """Checks the number of elements of a field.

    Raises:
        InvalidInputError: It exceeds `limit`.
    """
    if count > limit:
        raise InvalidInputError(field, f"has {count} elements; at most {limit}")


def _number(value: float) -> str:
    """Formats a whole number in full, and any other in short."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_counts(requested: int | None, least: int, limits: DecodingLimits, *, has_constraint: bool) -> None:
    most = limits.max_total_tokens - 1
    if requested is not None:
        check_range("parameters.max_new_tokens", requested, 1, most)
        most = requested
    check_range("parameters.min_new_tokens", least, 0, most)
    if least and has_constraint:
        raise InvalidInputError(
            "parameters.min_new_tokens",
            f"is {least} together with a constraint, which decides where the text ends; set one of the two",
        )


def _check_stop_strings(stop_strings: Elements[str]) -> None:
    check_at_most("parameters.stop_strings", len(stop_strings), MAX_STOP_STRINGS)
    for index, stop in enumerate(stop_strings):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidInputError(
                f"parameters.stop_strings[{index}]", f"has {len(stop)} characters; must be 1 to {MAX_STOP_LENGTH}"
            )


def _check_stop_ids(stop_ids: Elements[int], vocab_size: int) -> None:
    check_at_most("parameters.stop_token_ids", len(stop_ids), MAX_STOP_IDS)
    for index, token_id in enumerate(stop_ids):
        check_range(f"parameters.stop_token_ids[{index}]", token_id, 0, vocab_size - 1)


def _check_logit_biases(logit_biases: Elements[tuple[int, float]], vocab_size: int) -> None:
    check_at_most("parameters.logit_biases", len(logit_biases), MAX_LOGIT_BIASES)
    first_indices: dict[int, int] = {}
    for index, (token_id, bias) in enumerate(logit_biases):
        field = f"parameters.logit_biases[{index}]"
        check_range(f"{field}.token_id", token_id, 0, vocab_size - 1)
        check_rules(f"{field}.bias", bias, "LogitBias.bias")
        if (first := first_indices.setdefault(token_id, index)) != index:
            raise InvalidInputError(
                f"{field}.token_id",
                f"is {token_id}, as is that of ",
                FieldName(f"logit_biases[{first}]"),
                "; give a token one bias",
            )
