"""What a call asks for, and the sequences that answer it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Elements
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.output.text import TextAssembly
from headway_server.decoding.rules import begin_with, distinct_ngrams
from headway_server.decoding.sequence import Sequence, SequenceResult
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import EncodedText, SplitText, TextTokenizer
from headway_server.serving.calls import current_caller
from headway_server.serving.limits import num_bytes
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
_NO_TEXT = "holds no text; give it at least one word"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What is read by itself: a text, or a sentence of a text."""

    text: str
    field: str
    """What the request calls its text."""
    text_index: int
    """Number of its text in the call."""
    sentence_index: int = 0
    place: str = ""
    """Which part of the text it is, for messages; empty for a whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A passage as tokens, with the limits and rules of its output."""

    text: str
    encoded: EncodedText
    max_new_tokens: int
    seed: int
    sample: int
    prefix_ids: Tokens = ()
    phrases: EncodedPhrases = _NO_PHRASES
    read: EncoderInput | None = None
    """What the encoder reads in place of the tokens, which then stand for its positions; None: the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToTextCall:
    """What a call asks for every text, checked."""

    plan: TextToTextPlan
    request: TextToTextRequest
    tokenizer: TextTokenizer
    phrases: PhraseEncoder
    start_ids: Tokens
    """What the decoder reads before it writes."""
    eos_id: int | None
    source_prefix: Tokens = ()
    """Tokens that come before each source."""
    is_stream: bool = False
    """True if the output is sent as it appears."""

    @property
    def has_rules(self) -> bool:
        """True if the call sets any prefix or phrase for its outputs."""
        return bool(self.request.target_prefixes or self.request.phrases)

    @property
    def longest_rule(self) -> int:
        """Characters of the longest prefix or phrase."""
        phrases = (text for one in self.request.phrases for text in (*one.required, *one.forbidden))
        return max(map(len, (*self.request.target_prefixes, *phrases)), default=0)

    @property
    def most_rule_bytes(self) -> int:
        """What the tokens of its prefixes and phrases take at most, before they are read (`rule_bytes`)."""
        prefixes = TOKEN_BYTES * sum(map(num_bytes, self.request.target_prefixes))
        return prefixes + sum(phrases.most_bytes for phrases in set(self.request.phrases))

    def sentences(self, splits: Elements[SplitText], fields: Elements[str]) -> list[Passage]:
        """Returns the sentences of all texts, in order.

        Raises:
            InvalidInputError: A text has none.
        """
        for split, field in zip(splits, fields, strict=True):
            if not split.sentences:
                raise InvalidInputError(field, _NO_TEXT)
        return [
            Passage(
                text=sentence.text,
                field=fields[text_index],
                text_index=text_index,
                sentence_index=index,
                place=f"sentence {index + 1} (characters {sentence.start} to {sentence.end}) ",
            )
            for text_index, split in enumerate(splits)
            for index, sentence in enumerate(split.sentences)
        ]

    def sources(self, passages: Elements[Passage], encoded: Elements[EncodedText]) -> Iterator[Source]:
        """Yields passages with their tokens and with the limits and rules of their outputs.

        Raises:
            InvalidInputError: The model cannot write a prefix or a phrase, or one leaves no room.
        """
        seeds = [self.plan.draw_seed() for _ in range(passages[-1].text_index + 1)]
        known: dict[PhraseRequest, EncodedPhrases] = {}  # the texts of a call often share a glossary
        for passage, text in zip(passages, encoded, strict=True):
            yield self._source(passage, text, seeds[passage.text_index], known)

    def forbid_spellings(self, sources: Elements[Source], results: Elements[SequenceResult]) -> dict[int, Source]:
        """Finds outputs that have a forbidden phrase in a spelling that is not forbidden yet.

        Returns:
            By its number, each source that has such an output, with these tokens forbidden too.
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
        rule = None  # a search has rules of its own
        if search is None:
            rule = begin_with(source.prefix_ids, distinct_ngrams(self.plan.search.no_repeat_ngram_size))
        return Sequence(
            prompt_ids=np.array(self.start_ids, np.int64),
            source=source.read or EncoderInput.of_tokens(source.encoded.input_ids),
            parameters=self.plan.sampling_for(source.max_new_tokens, source.seed, source.sample),
            output=TextAssembly(self.tokenizer.decoder(), eager=self.is_stream),
            eos_id=self.eos_id,
            deadline=self.request.deadline,
            caller=current_caller(),
            wants_deltas=self.is_stream,
            rule=rule,
            search=search,
            wants_alignment=self.request.wants_alignment,
        )

    def _source(
        self, passage: Passage, encoded: EncodedText, seed: int, known: dict[PhraseRequest, EncodedPhrases]
    ) -> Source:
        index = passage.text_index
        max_new_tokens = self.plan.max_tokens(len(encoded))
        prefix_ids: Tokens = ()
        if self.request.target_prefixes and self.request.target_prefixes[index]:
            field = "target_prefix" if self.is_stream else f"target_prefixes[{index}]"
            prefix_ids = self.phrases.encode_prefix(field, self.request.target_prefixes[index], max_new_tokens)
        phrases = _NO_PHRASES
        if self.request.phrases:
            asked = self.request.phrases[index]
            field = f"phrase_constraints[{index}]"
            if asked not in known:
                known[asked] = self.phrases.encode_phrases(field, asked)
            phrases = known[asked]
            _check_room(field, phrases, prefix_ids, max_new_tokens)
        return Source(
            text=passage.text,
            encoded=encoded,
            max_new_tokens=max_new_tokens,
            seed=seed,
            sample=passage.sentence_index,
            prefix_ids=prefix_ids,
            phrases=phrases,
        )


def rule_bytes(sources: Elements[Source]) -> int:
    """Returns what the tokens of prefixes and phrases take; texts with the same phrases share theirs."""
    phrases = {id(source.phrases): source.phrases for source in sources}
    prefixes = sum(len(source.prefix_ids) for source in sources)
    return TOKEN_BYTES * prefixes + sum(one.num_bytes for one in phrases.values())


def whole_texts(texts: Elements[str], fields: Elements[str]) -> list[Passage]:
    """Returns whole texts as passages.

    Raises:
        InvalidInputError: One is nothing but white space, which a model would answer with something.
    """
    for text, field in zip(texts, fields, strict=True):
        if text.isspace():
            raise InvalidInputError(field, _NO_TEXT)
    return [
        Passage(text=text, field=field, text_index=index)
        for index, (text, field) in enumerate(zip(texts, fields, strict=True))
    ]


@contextmanager
def named_passages(passages: Elements[Passage]) -> Iterator[None]:
    """Replaces the number of a passage in an error by the field of its text and its place there."""
    try:
        yield
    except InvalidInputError as error:
        passage = passages[int(error.field)]
        raise InvalidInputError(passage.field, passage.place, *error.parts) from None


def _check_room(field: str, phrases: EncodedPhrases, prefix_ids: Tokens, max_new_tokens: int) -> None:
    """Checks that an output with this prefix can have all required phrases and no forbidden one."""
    for index, forms in enumerate(phrases.forbidden_forms):
        if any(contains(prefix_ids, form) for form in forms):
            raise InvalidInputError(
                f"{field}.forbidden[{index}]", "is in the target prefix, which the output begins with; drop one"
            )
    num_demanded = len(prefix_ids) + sum(len(phrase) for phrase in phrases.required if not contains(prefix_ids, phrase))
    if phrases.required and num_demanded > max_new_tokens:
        raise InvalidInputError(
            f"{field}.required",
            f"has {num_demanded} tokens with the target prefix; the output has at most {max_new_tokens}; "
            "leave out some, or allow more with max_new_tokens",
        )
