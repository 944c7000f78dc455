"""A translation call's parameters, checked against the model: what passes here is not looked at again."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from typing import Final

from headway_server.decoding.parameters import MAX_BEAMS, EarlyStopping, SamplingParameters, SearchParameters
from headway_server.errors import InvalidInputError
from headway_server.tasks.parameters import DecodingLimits, check_range
from headway_server.tasks.translation.phrases import EncodedPhrases, PhraseRequest, Tokens

MAX_LENGTH_RATIO: Final = 100.0
MAX_LENGTH_PENALTY: Final = 5.0
MAX_NGRAM_SIZE: Final = 16
MAX_TEMPERATURE: Final = 2.0
MAX_ALIGNED_HYPOTHESES: Final = 1024
"""Of a call, over all its texts: each has an attention of up to some 64 KiB, held until the answer has been sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationSampling:
    """How to draw tokens, as a call gives it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None draws one for every text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationParameters:
    """How to decode, as a call gives it."""

    max_new_tokens: int | None = None
    """None takes as many as the model can hold."""
    max_length_ratio: float | None = None
    beam_size: int = 1
    num_hypotheses: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    no_repeat_ngram_size: int = 0
    sampling: TranslationSampling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationRequest:
    """What a call asks for beside its texts. Lists are empty, or have one element for every text."""

    parameters: TranslationParameters = TranslationParameters()
    truncate: bool = False
    """Whether a text past the limit is shortened at its end instead of refused."""
    target_prefixes: tuple[str, ...] = ()
    """What translations begin with."""
    phrases: tuple[PhraseRequest, ...] = ()
    wants_alignment: bool = False
    split_sentences: bool = False
    deadline: float | None = None
    """When the caller stops waiting, by `time.monotonic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationPlan:
    """Checked parameters of a call, before its texts are known."""

    max_new_tokens: int
    max_length_ratio: float | None
    seed: int | None
    length_penalty: float
    num_hypotheses: int
    draws: bool
    """Whether tokens are drawn at random."""
    sampling: SamplingParameters
    """Those that do not depend on the text."""
    search: SearchParameters
    """Those that do not depend on the text; for a call without a search, what it has of them."""

    def draw_seed(self) -> int:
        """Returns the caller's seed, or one for one text."""
        return secrets.randbits(64) if self.seed is None else self.seed

    def max_tokens(self, num_source_tokens: int) -> int:
        """Returns the most tokens of a translation of so many: the smaller of both limits, at least 1."""
        if self.max_length_ratio is None:
            return self.max_new_tokens
        return max(1, min(self.max_new_tokens, math.ceil(self.max_length_ratio * num_source_tokens)))

    def sampling_for(self, num_source_tokens: int, seed: int, sample: int) -> SamplingParameters:
        """Returns how to choose the tokens of one sentence, number `sample` of those that share a seed."""
        return replace(self.sampling, max_new_tokens=self.max_tokens(num_source_tokens), seed=seed, sample=sample)

    def search_for(self, prefix_ids: Tokens, phrases: EncodedPhrases) -> SearchParameters | None:
        """Returns how to search for the translation of one text; None where no search is needed."""
        if self.search.beam_size == 1 and not phrases.required and not phrases.forbidden:
            return None
        return replace(
            self.search,
            prefix_ids=prefix_ids,
            required_phrases=phrases.required,
            forbidden_phrases=phrases.forbidden,
        )

    def score(self, log_probability: float, num_tokens: int) -> float:
        """Returns what a search would rank a translation of so many tokens by."""
        return float(log_probability / max(num_tokens, 1) ** self.length_penalty)


def plan_translation(
    request: TranslationRequest,
    *,
    num_texts: int,
    limits: DecodingLimits,
    num_slots: int,
    owner: str,
    is_stream: bool = False,
) -> TranslationPlan:
    """Checks what a call asks for, as far as its texts do not matter.

    Args:
        request: What the call gives.
        num_texts: Texts that it is asked for.
        limits: The model's.
        num_slots: Slots of the model, one of which each beam takes.
        owner: Name of the model.
        is_stream: Whether the translation is sent as it appears.

    Raises:
        InvalidInputError: One is out of its range, or goes not with another.
    """
    given = request.parameters
    _check_ranges(given, limits)
    _check_beams(given.beam_size, num_slots, owner)
    if not 1 <= given.num_hypotheses <= given.beam_size:
        raise InvalidInputError(
            "parameters.hypothesis_count",
            f"is {given.num_hypotheses}; must be from 1 to {given.beam_size}, the beams of the search; ask for fewer, "
            "or set beam_size too",
        )
    if request.wants_alignment and given.num_hypotheses * num_texts > MAX_ALIGNED_HYPOTHESES:
        raise InvalidInputError(
            "parameters.hypothesis_count",
            f"is {given.num_hypotheses} for {num_texts} texts; with alignment a call answers at most "
            f"{MAX_ALIGNED_HYPOTHESES} hypotheses, all texts together; ask for fewer, or send fewer texts at once",
        )
    _check_combinations(request, is_stream=is_stream)
    sampling = given.sampling
    if sampling is not None:
        _check_sampling(sampling, limits.vocab_size)
    return TranslationPlan(
        max_new_tokens=given.max_new_tokens or limits.max_total_tokens,
        max_length_ratio=given.max_length_ratio,
        seed=None if sampling is None else sampling.seed,
        length_penalty=given.length_penalty,
        num_hypotheses=given.num_hypotheses,
        draws=sampling is not None,
        sampling=_sampling_parameters(sampling),
        search=SearchParameters(
            beam_size=given.beam_size,
            num_hypotheses=given.num_hypotheses,
            length_penalty=given.length_penalty,
            early_stopping=given.early_stopping,
            no_repeat_ngram_size=given.no_repeat_ngram_size,
            wants_alignment=request.wants_alignment,
        ),
    )


def _check_ranges(given: TranslationParameters, limits: DecodingLimits) -> None:
    if given.max_new_tokens is not None:
        check_range("parameters.max_new_tokens", given.max_new_tokens, 1, limits.max_total_tokens)
    if given.max_length_ratio is not None:
        _check_above("parameters.max_length_ratio", given.max_length_ratio, 0, MAX_LENGTH_RATIO)
    check_range("parameters.length_penalty", given.length_penalty, 0, MAX_LENGTH_PENALTY)
    check_range("parameters.no_repeat_ngram_size", given.no_repeat_ngram_size, 0, MAX_NGRAM_SIZE)


def _check_beams(beam_size: int, num_slots: int, owner: str) -> None:
    check_range("parameters.beam_size", beam_size, 1, MAX_BEAMS)
    if beam_size > num_slots:
        raise InvalidInputError(
            "parameters.beam_size",
            f"is {beam_size}, and {owner} runs {num_slots} slots, one for each beam; ask for at most {num_slots}, or "
            f"start the server with --num-slots {beam_size} or more",
        )


def _check_combinations(request: TranslationRequest, *, is_stream: bool) -> None:
    given = request.parameters
    if given.sampling is not None:
        beside = "beside sampling, which draws one translation and does not search; leave out one of the two"
        if given.beam_size > 1:
            raise InvalidInputError("parameters.beam_size", f"is {given.beam_size} {beside}")
        if any(phrases.required or phrases.forbidden for phrases in request.phrases):
            raise InvalidInputError("phrase_constraints", f"is given {beside}")
    if is_stream and given.beam_size > 1:
        raise InvalidInputError(
            "parameters.beam_size",
            f"is {given.beam_size}; must be 1 in a stream, since a search changes its mind about what it has said; "
            "ask for 1, or call TranslateText",
        )
    if not request.split_sentences:
        return
    alone = "with split_sentences, which translates each sentence by itself; leave out one of the two"
    if any(request.target_prefixes):
        raise InvalidInputError("target_prefixes", f"is given {alone}")
    if any(phrases.required or phrases.forbidden for phrases in request.phrases):
        raise InvalidInputError("phrase_constraints", f"is given {alone}")
    if given.num_hypotheses > 1:
        raise InvalidInputError("parameters.hypothesis_count", f"is {given.num_hypotheses} {alone}")


def _check_sampling(sampling: TranslationSampling, vocab_size: int) -> None:
    _check_above("parameters.sampling.temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    check_range("parameters.sampling.top_k", sampling.top_k, 0, vocab_size)
    _check_above("parameters.sampling.top_p", sampling.top_p, 0, 1)
    check_range("parameters.sampling.min_p", sampling.min_p, 0, 1)


def _check_above(field: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        raise InvalidInputError(field, f"is {value:g}; must be above {low:g} and at most {high:g}")


def _sampling_parameters(sampling: TranslationSampling | None) -> SamplingParameters:
    """Returns how to choose tokens, with limits that the text decides left open."""
    if sampling is None:
        return SamplingParameters(max_new_tokens=1)
    return SamplingParameters(
        max_new_tokens=1,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
