"""Results of translation, and which words became which. Positions in texts count Unicode code points."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from headway_client.results import FinishReason

_WORD = re.compile(r"\w+(?:[-'\u2019]\w+)*|[^\w\s]")
"""A word, with the hyphens and apostrophes within it, or a mark."""


class EarlyStopping(StrEnum):
    """When a search that has as many translations as beams ends."""

    FIRST = "first"
    """At once."""
    HEURISTIC = "heuristic"
    """When the best beam, if it ended now, would score no better than the worst of them."""
    NEVER = "never"
    """When no continuation of a beam can score better than the worst of them."""


@dataclass(frozen=True, slots=True)
class PhraseConstraints:
    """Phrases that decide what one translation says: a glossary."""

    required: tuple[str, ...] = ()
    """Phrases that must appear, at most 16."""
    forbidden: tuple[str, ...] = ()
    """Phrases that must not, at most 64."""


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A part of a text: characters `start` to `end`, `end` excluded."""

    start: int
    end: int

    def of(self, text: str) -> str:
        """This part of a text."""
        return text[self.start : self.end]


@dataclass(frozen=True, slots=True)
class TokenAlignment:
    """A token's part of a translation, and its attention over the source's tokens, with a sum of one."""

    span: TextSpan
    source_attention: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WordPair:
    """A word of a translation and the word of the source that it looked at most."""

    target: TextSpan
    source: TextSpan | None
    """None where it looked most at what stands for no characters, such as the end of the sentence."""
    attention: float
    """Share of its attention that the source's word has, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which words became which, in one sentence."""

    source_tokens: tuple[TextSpan, ...]
    """Those of the source text; one without characters stands for something else, such as the end of the sentence."""
    target_tokens: tuple[TokenAlignment, ...]
    """Those of the translation."""

    def word_pairs(self, source: str, translation: str) -> tuple[WordPair, ...]:
        """Pairs every word and mark of the translation with the word of the source that it looked at most.

        A word's attention is the mean of its tokens', a source word's share the sum of its tokens'.

        Args:
            source: The text that was translated, all of it.
            translation: Its translation, all of it.
        """
        sources = _words_of(self.source_tokens, source)
        targets = _words_of((token.span for token in self.target_tokens), translation)
        rows: dict[TextSpan, list[tuple[float, ...]]] = defaultdict(list)
        for token, word in zip(self.target_tokens, targets, strict=True):
            if word is not None:
                rows[word].append(token.source_attention)
        return tuple(_pair(word, rows[word], sources) for word in sorted(rows, key=lambda word: word.start))


@dataclass(frozen=True, slots=True)
class TranslationHypothesis:
    """One of several translations of a text."""

    text: str
    log_probability: float
    score: float
    """What it was ranked by: its log-probability divided by its token count to the power of the length penalty."""
    finish_reason: FinishReason
    new_token_count: int
    alignment: Alignment | None = None
    """Where it was asked for."""


@dataclass(frozen=True, slots=True)
class TranslatedText:
    """A translation."""

    text: str
    log_probability: float
    finish_reason: FinishReason
    source_token_count: int
    new_token_count: int
    truncated: bool
    score: float = 0.0
    """What it was ranked by; with `split_sentences` the sum over the sentences."""
    hypotheses: tuple[TranslationHypothesis, ...] = ()
    """All that were asked for, the best, which is this one, first; where more than one was."""
    alignments: tuple[Alignment, ...] = ()
    """Where it was asked for: one for the text, or one for each of its sentences."""
    seed: int | None = None
    """Seed that it was drawn with, where it was drawn at random."""
    sentence_count: int = 1

    def word_pairs(self, source: str) -> tuple[WordPair, ...]:
        """Pairs every word of the translation with the word of `source`, its text, that it looked at most.

        Raises:
            ValueError: The alignment was not asked for.
        """
        if not self.alignments:
            raise ValueError("there is no alignment; translate with alignment=True")
        return tuple(pair for alignment in self.alignments for pair in alignment.word_pairs(source, self.text))


def _words_of(spans: Iterable[TextSpan], text: str) -> list[TextSpan | None]:
    """Returns the word of a text that each span is in, by its middle; None for one without characters."""
    spans = list(spans)
    word_at: dict[int, TextSpan] = {}
    stop = max((span.end for span in spans), default=0)
    for match in _WORD.finditer(text, min((span.start for span in spans), default=0)):  # a sentence of a long text
        if match.start() >= stop:
            break
        word_at.update(dict.fromkeys(range(match.start(), match.end()), TextSpan(match.start(), match.end())))
    return [word_at.get((span.start + span.end - 1) // 2) if span.start < span.end else None for span in spans]


def _pair(target: TextSpan, rows: list[tuple[float, ...]], sources: list[TextSpan | None]) -> WordPair:
    shares: dict[TextSpan | None, float] = defaultdict(float)
    for row in rows:
        for word, attention in zip(sources, row, strict=True):
            shares[word] += attention / len(rows)
    source = max(shares, key=lambda word: shares[word])
    return WordPair(target, source, shares[source])
