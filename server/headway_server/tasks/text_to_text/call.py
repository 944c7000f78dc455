"""Validated calls and their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Elements
from dataclasses import dataclass, replace

import numpy as np

from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.output.text import TextAssembly
from headway_server.decoding.rules import begin_with, distinct_ngrams
from headway_server.decoding.sequence import Sequence, SequenceResult
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import TextTokenizer
from headway_server.serving.calls import current_caller
from headway_server.serving.limits import num_bytes
from headway_server.tasks.text_to_text.alignment import Span
from headway_server.tasks.text_to_text.phrases import (
    TOKEN_BYTES,
    EncodedPhrases,
    PhraseEncoder,
    PhraseRequest,
    Tokens,
    contains,
)
from headway_server.tasks.text_to_text.request import TextToTextPlan, TextToTextRequest

_NO_PHRASES = EncodedPhrases()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An input of a call, or one of its sentences, as the encoder reads it."""

    source: EncoderInput
    input_index: int
    """Index of the input in the call."""
    sentence_index: int = 0
    spans: Callable[[], tuple[Span, ...]] = tuple
    """Finds the characters of its S tokens; none for an input that is not text."""
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A reading with the limits and rules of its output."""

    reading: Reading
    max_new_tokens: int
    seed: int
    prefix_ids: Tokens = ()
    phrases: EncodedPhrases = _NO_PHRASES


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToTextCall:
    """Validated parameters of a call."""

    plan: TextToTextPlan
    request: TextToTextRequest
    tokenizer: TextTokenizer
    phrases: PhraseEncoder
    start_ids: Tokens
    """Start tokens of the decoder."""
    eos_id: int | None
    prefix_names: Elements[str]
    """Name of each output's prefix in the request."""
    source_prefix: Tokens = ()
    """Tokens before each text."""
    is_stream: bool = False
    """True if the output is streamed."""

    @property
    def has_rules(self) -> bool:
        """True if the call sets any prefix or phrase for its outputs."""
        return bool(self.request.target_prefixes or self.request.phrases)

    @property
    def longest_rule(self) -> int:
        """Length of the longest prefix or phrase, in characters."""
        phrases = (text for one in self.request.phrases for text in (*one.required, *one.forbidden))
        return max(map(len, (*self.request.target_prefixes, *phrases)), default=0)

    @property
    def most_rule_bytes(self) -> int:
        """Maximum bytes of the tokens of its prefixes and phrases, before they are tokenized (`rule_bytes`)."""
        prefixes = TOKEN_BYTES * sum(map(num_bytes, self.request.target_prefixes))
        return prefixes + sum(phrases.most_bytes for phrases in set(self.request.phrases))

    def sources(self, readings: Elements[Reading]) -> Iterator[Source]:
        """Yields readings with the limits and rules of their outputs.

        Raises:
            InvalidInputError: The model cannot write a prefix or a phrase, or it leaves no room for the output.
        """
        seeds = [self.plan.draw_seed() for _ in range(readings[-1].input_index + 1)]
        known: dict[PhraseRequest, EncodedPhrases] = {}  # the texts of a call often share a glossary
        for reading in readings:
            yield self._source(reading, seeds[reading.input_index], known)

    def forbid_spellings(self, sources: Elements[Source], results: Elements[SequenceResult]) -> dict[int, Source]:
        """Finds outputs that contain a forbidden phrase as tokens that are not forbidden yet.

        Returns:
            Sources of such outputs by index, with these tokens forbidden too.
        """
        changed: dict[int, Source] = {}
        for index, (source, result) in enumerate(zip(sources, results, strict=True)):
            spellings = tuple(
                dict.fromkeys(
                    tokens
                    for hypothesis in result.hypotheses
                    for tokens in self.phrases.spellings(source.phrases, hypothesis.output, hypothesis.token_ids)
                )
            )
            if spellings:
                forms = (*source.phrases.forbidden_forms, spellings)
                changed[index] = replace(source, phrases=replace(source.phrases, forbidden_forms=forms))
        return changed

    def sequence(self, source: Source) -> Sequence:
        """Makes the sequence of a source; called on the event loop."""
        search = self.plan.search_for(source.prefix_ids, source.phrases)
        rule = None  # a search has its own rules
        if search is None:
            rule = begin_with(source.prefix_ids, distinct_ngrams(self.plan.search.no_repeat_ngram_size))
        return Sequence(
            prompt_ids=np.array(self.start_ids, np.int64),
            source=source.reading.source,
            parameters=self.plan.sampling_for(source.max_new_tokens, source.seed, source.reading.sentence_index),
            output=TextAssembly(self.tokenizer.decoder(), eager=self.is_stream),
            eos_id=self.eos_id,
            deadline=self.request.deadline,
            caller=current_caller(),
            wants_deltas=self.is_stream,
            rule=rule,
            search=search,
            wants_alignment=self.request.wants_alignment,
        )

    def _source(self, reading: Reading, seed: int, known: dict[PhraseRequest, EncodedPhrases]) -> Source:
        index = reading.input_index
        max_new_tokens = self.plan.max_tokens(reading.source.cost)
        prefix_ids: Tokens = ()
        if self.request.target_prefixes and self.request.target_prefixes[index]:
            field, prefix = self.prefix_names[index], self.request.target_prefixes[index]
            prefix_ids = self.phrases.encode_prefix(field, prefix, max_new_tokens)
            if prefix_ids[: len(self.start_ids)] == tuple(self.start_ids):  # the task's token of Donut's prompts
                prefix_ids = prefix_ids[len(self.start_ids) :]
        phrases = _NO_PHRASES
        if self.request.phrases:
            asked = self.request.phrases[index]
            field = f"phrase_constraints[{index}]"
            if asked not in known:
                known[asked] = self.phrases.encode_phrases(field, asked)
            phrases = known[asked]
            _check_room(field, phrases, prefix_ids, max_new_tokens)
        return Source(reading=reading, max_new_tokens=max_new_tokens, seed=seed, prefix_ids=prefix_ids, phrases=phrases)


def rule_bytes(sources: Elements[Source]) -> int:
    """Returns the bytes of the tokens of prefixes and phrases; equal phrases of texts are shared."""
    phrases = {id(source.phrases): source.phrases for source in sources}
    prefixes = sum(len(source.prefix_ids) for source in sources)
    return TOKEN_BYTES * prefixes + sum(one.num_bytes for one in phrases.values())


def _check_room(field: str, phrases: EncodedPhrases, prefix_ids: Tokens, max_new_tokens: int) -> None:
    """Checks that an output with this prefix can have all required phrases and no forbidden phrase."""
    for index, forms in enumerate(phrases.forbidden_forms):
        if any(contains(prefix_ids, form) for form in forms):
            raise InvalidInputError(
                f"{field}.forbidden[{index}]", "is in the target prefix, with which the output begins; drop one"
            )
    num_demanded = len(prefix_ids) + sum(len(phrase) for phrase in phrases.required if not contains(prefix_ids, phrase))
    if phrases.required and num_demanded > max_new_tokens:
        raise InvalidInputError(
            f"{field}.required",
            f"has {num_demanded} tokens with the target prefix; the output has at most {max_new_tokens}; "
            "leave out some, or allow more with max_new_tokens",
        )
