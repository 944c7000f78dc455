"""Validation of a call's parameters against the model. Nothing is checked again after that."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Final

from headway_server.decoding.parameters import EarlyStopping, SamplingParameters, SearchParameters
from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_elements
from headway_server.tasks.parameters import (
    DecodingLimits,
    Given,
    check_range,
    check_rules,
    check_sampling,
    draw_seed,
)
from headway_server.tasks.text_to_text.phrases import EncodedPhrases, PhraseRequest, Tokens

MAX_TEXTS: Final = most_elements("TranslateTextRequest.texts")
"""Maximum texts of a call."""
MAX_ALIGNED_HYPOTHESES: Final = 1024
"""Maximum hypotheses of a call with alignment: each has an attention matrix of up to 64 KiB in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToTextParameters:
    """Decoding parameters of a call."""

    max_new_tokens: int | None = None
    """None: the model's maximum."""
    min_new_tokens: int = 0
    """Tokens before the output may end."""
    max_length_ratio: float | None = None
    """Maximum output tokens for each token of the source; None: no limit."""
    beam_size: int = 1
    num_hypotheses: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    no_repeat_ngram_size: int = 0
    sampling: Given = dataclasses.field(default_factory=dict)
    """Sampling parameters; the default temperature of 0 disables sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToTextRequest:
    """Parameters of a call. Tuples are empty or have one element for every text."""

    parameters: TextToTextParameters = dataclasses.field(default_factory=TextToTextParameters)
    truncate: bool = False
    """True truncates the end of a text that is too long; False refuses it."""
    target_prefixes: tuple[str, ...] = ()
    """Prefixes of the outputs."""
    phrases: tuple[PhraseRequest, ...] = ()
    wants_alignment: bool = False
    """For translations only, like the next three."""
    split_sentences: bool = False
    source_language: str = ""
    """BCP 47 code; empty for the model's only one."""
    target_language: str = ""
    """BCP 47 code; empty for the model's only one."""
    questions: tuple[str, ...] = ()
    """Text that the encoder reads with each image."""
    deadline: float | None = None
    """End of the caller's wait, in seconds of `time.monotonic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToTextPlan:
    """Validated parameters of a call, before its texts are known."""

    max_new_tokens: int
    max_length_ratio: float | None
    seed: int | None
    sampling: SamplingParameters
    """Sampling parameters that do not depend on the text."""
    search: SearchParameters
    """Search parameters that do not depend on the text; some apply without a search too."""

    @property
    def num_hypotheses(self) -> int:
        """Of a text."""
        return self.search.num_hypotheses

    @property
    def is_sampled(self) -> bool:
        """True if tokens are sampled."""
        return self.sampling.temperature > 0

    @property
    def num_tokens(self) -> int:
        """Maximum new tokens of a text, over all beams."""
        return self.max_new_tokens * self.search.beam_size

    def draw_seed(self) -> int:
        """Returns the caller's seed, or a random one for a text."""
        return draw_seed(self.seed)

    def max_tokens(self, num_source_tokens: int) -> int:
        """Returns the maximum tokens of the output of a source: the smaller of both limits, at least 1."""
        if self.max_length_ratio is None:
            return self.max_new_tokens
        return max(1, min(self.max_new_tokens, math.ceil(self.max_length_ratio * num_source_tokens)))

    def sampling_for(self, max_new_tokens: int, seed: int, sample: int) -> SamplingParameters:
        """Returns the sampling parameters of one sentence, at index `sample` among those that share a seed."""
        return replace(self.sampling, max_new_tokens=max_new_tokens, seed=seed, sample=sample)

    def search_for(self, prefix_ids: Tokens, phrases: EncodedPhrases) -> SearchParameters | None:
        """Returns the search parameters of one text; None if no search is needed."""
        if self.search.beam_size == 1 and not phrases.required and not phrases.forbidden:
            return None
        return replace(
            self.search,
            prefix_ids=prefix_ids,
            required_phrases=phrases.required,
            forbidden_phrases=phrases.forbidden,
        )

    def score(self, log_probability: float, num_tokens: int) -> float:
        """Returns the score of an output in a search."""
        return float(log_probability / max(num_tokens + self.search.num_given, 1) ** self.search.length_penalty)


def plan_text_to_text(
    request: TextToTextRequest,
    *,
    num_texts: int,
    limits: DecodingLimits,
    num_slots: int,
    owner: str,
    num_given: int = 0,
    is_stream: bool = False,
) -> TextToTextPlan:
    """Validates the parameters of a call that do not depend on its texts.

    Args:
        request: Parameters of the call.
        num_texts: Texts of the call.
        limits: Limits of the model.
        num_slots: Slots that one sequence can have; each beam takes one.
        owner: Name of the model.
        num_given: Start tokens of the decoder after the first one.
        is_stream: True if the output is streamed.

    Raises:
        InvalidInputError: A parameter is out of its range, or excludes another.
    """
    given = request.parameters
    most = limits.max_total_tokens - num_given
    _check_ranges(given, most)
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
    values = {name: value for name, value in given.sampling.items() if name != "seed"}
    least = given.min_new_tokens
    # max_new_tokens is set when the text is known
    sampling = SamplingParameters(max_new_tokens=1, min_new_tokens=least, **values)
    check_sampling(sampling, limits.vocab_size)
    return TextToTextPlan(
        max_new_tokens=given.max_new_tokens or most,
        max_length_ratio=given.max_length_ratio,
        seed=given.sampling.get("seed"),
        sampling=sampling,
        search=SearchParameters(
            beam_size=given.beam_size,
            num_hypotheses=given.num_hypotheses,
            length_penalty=given.length_penalty,
            early_stopping=given.early_stopping,
            no_repeat_ngram_size=given.no_repeat_ngram_size,
            min_new_tokens=least,
            wants_alignment=request.wants_alignment,
            num_given=num_given,
        ),
    )


def _check_ranges(given: TextToTextParameters, most: int) -> None:
    if given.max_new_tokens is not None:
        check_range("parameters.max_new_tokens", given.max_new_tokens, 1, most)
    check_range("parameters.min_new_tokens", given.min_new_tokens, 0, given.max_new_tokens or most)
    if given.max_length_ratio is not None:
        check_rules("parameters.max_length_ratio", given.max_length_ratio, "DecodingParameters.max_length_ratio")
    check_rules("parameters.length_penalty", given.length_penalty, "DecodingParameters.length_penalty")
    check_rules(
        "parameters.no_repeat_ngram_size", given.no_repeat_ngram_size, "DecodingParameters.no_repeat_ngram_size"
    )


def _check_beams(beam_size: int, num_slots: int, owner: str) -> None:
    check_rules("parameters.beam_size", beam_size, "DecodingParameters.beam_size")
    if beam_size > num_slots:
        raise InvalidInputError(
            "parameters.beam_size",
            f"is {beam_size}, and {owner} runs {num_slots} slots, one for each beam; ask for at most {num_slots}, or "
            f"start the server with --num-slots {beam_size} or more",
        )


def _check_combinations(request: TextToTextRequest, *, is_stream: bool) -> None:
    given = request.parameters
    if given.sampling.get("temperature"):
        reason = "together with sampling, which does not search; leave out one of the two"
        if given.beam_size > 1:
            raise InvalidInputError("parameters.beam_size", f"is {given.beam_size} {reason}")
        if any(phrases.required or phrases.forbidden for phrases in request.phrases):
            raise InvalidInputError("phrase_constraints", f"is given {reason}")
    if is_stream and given.beam_size > 1:
        raise InvalidInputError(
            "parameters.beam_size",
            f"is {given.beam_size}; must be 1 in a stream, since a search may still replace what it has sent; "
            "ask for 1, or make a call that does not stream",
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
