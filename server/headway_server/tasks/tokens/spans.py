"""Labelled spans from the tags of subwords.

Spans come from the likeliest sequence of tags that the scheme allows, by the product of the tags' probabilities
(Viterbi 1967). The probability of a span is the geometric mean of its tags'. A subword within a character continues its
span; `B-x` stands for continuation if a label has no `I-x`.

With another aggregation (`bundles/tags.py`) each subword or word has its likeliest tag. A span then ends where the
label changes, or another begins, and its probability is the mean of its tags'.

T tokens of a text, P subwords, W words, C tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Tagging
from headway_server.bundles.tags import OF_WORDS, Aggregation, TagSet
from headway_server.preprocessing.subwords import Subwords, grapheme_ends
from headway_server.tasks.outputs import log_softmax


class Span(NamedTuple):
    """A labelled part of a text: characters `start` to `end`, `end` excluded, in Unicode code points; or words."""

    start: int
    end: int
    label: int
    """Index of the label among the labels of the tags."""
    probability: float


class SpanDecoder:
    """Finds spans. Thread-safe."""

    def __init__(self, tags: TagSet, aggregation: Aggregation = "sequence") -> None:
        """Decodes tags; errors of the two together are those of a manifest."""
        self.labels = tags.labels
        self._aggregation = aggregation
        kinds, self._labels = np.array(tags.kinds), np.array(tags.numbers)  # (C,), -1 of `O`
        self._outside = kinds == "O"  # (C,)
        self._begins = np.isin(kinds, ("B", "S"))  # (C,)
        self._ends = np.isin(kinds, ("E", "S"))  # (C,)
        continues = np.isin(kinds, ("I", "E"))  # (C,)
        same_label = self._labels[:, None] == self._labels  # (C before, C)
        self._may_start, self._may_end, self._may_follow = _transitions(tags, same_label)
        alone = ~np.isin(self._labels, self._labels[continues])
        self._may_join = same_label & (~self._begins | (np.eye(len(kinds), dtype=np.bool_) & alone))

    @classmethod
    def of(cls, labels: Sequence[str], tagging: Tagging | None) -> SpanDecoder:
        """Returns the decoder of a manifest's labels and tagging.

        Raises:
            ValueError: The labels are not of the scheme.
        """
        tagging = tagging or Tagging()
        return cls(TagSet.parse(labels, tagging.scheme), tagging.aggregation)

    def decode_text(
        self,
        logits: NDArray[np.float32],
        text: str,
        offsets: Sequence[tuple[int, int]],
        word_ids: Sequence[int | None] = (),
    ) -> list[Span]:
        """Finds the spans of a text, which end with graphemes.

        Args:
            logits: Logits of the tags at each token, (T, C).
            text: The text.
            offsets: First character and end of each of the T tokens.
            word_ids: The tokenizer's word of each token, (T,); for aggregations by word.

        Raises:
            FloatingPointError: A logit is not finite.
        """
        subwords = Subwords.find(text, offsets)
        by_word = self._aggregation in OF_WORDS
        spans = self._decode(logits, subwords, subwords.word_starts(text, word_ids) if by_word else None)
        if text.isascii():
            return spans
        ends = grapheme_ends(text, [span.end for span in spans])  # an accent may have no token
        return [span._replace(end=end) for span, end in zip(spans, ends.tolist(), strict=True)]

    def decode_words(self, logits: NDArray[np.float32], word_ids: Sequence[int | None]) -> list[Span]:
        """Finds the spans of words that a caller has split: `start` and `end` number words. None begins within one.

        Args:
            logits: Logits of the tags at each token, (T, C).
            word_ids: The number of each token's word, (T,); None of special tokens.

        Raises:
            FloatingPointError: A logit is not finite.
        """
        numbers = np.array([-1 if word is None else word for word in word_ids], np.int64)
        tokens = np.flatnonzero(numbers >= 0)
        words = numbers[tokens]  # (P,)
        starts = np.diff(words, prepend=-1) != 0
        return self._decode(logits, Subwords(tokens, words, words + 1, ~starts), starts)

    def _decode(
        self, logits: NDArray[np.float32], subwords: Subwords, word_starts: NDArray[np.bool_] | None
    ) -> list[Span]:
        """Finds spans; `word_starts` says which subwords begin a word, (P,), for aggregations by word."""
        scores = logits[subwords.tokens]  # (P, C)
        if not np.isfinite(scores).all():
            raise FloatingPointError("the model's logits are not finite")
        scores = log_softmax(scores)
        if self._aggregation not in OF_WORDS or word_starts is None or not len(scores):
            return self.decode(scores, subwords)
        return self.decode(*self._words(scores, subwords, word_starts))

    def decode(self, log_probabilities: NDArray[np.float32], subwords: Subwords) -> list[Span]:
        """Finds the spans of a text, in order, by the log-probabilities of tags, (P, C)."""
        if not len(subwords.tokens):
            return []
        joined = subwords.joined
        is_sequence = self._aggregation == "sequence"
        tags = self._likeliest_tags(log_probabilities, joined) if is_sequence else log_probabilities.argmax(axis=-1)
        labels = self._labels[tags]  # (P,)
        begins = self._begins[tags]
        begins[1:] |= self._ends[tags[:-1]] | (labels[1:] != labels[:-1])
        begins = ~joined & begins
        begins[0] = True
        breaks = np.flatnonzero(begins)  # a span extends to the next break
        own = log_probabilities[np.arange(len(tags)), tags]
        lengths = np.diff(breaks, append=len(tags))
        means = np.add.reduceat(own if is_sequence else np.exp(own), breaks) / lengths
        found = ~self._outside[tags[breaks]]
        firsts, lasts = breaks[found], (breaks + lengths - 1)[found]
        starts, ends = subwords.starts[firsts], np.maximum.accumulate(subwords.ends)[lasts]
        probabilities = (np.exp(means[found]) if is_sequence else means[found]).astype(np.float32)
        columns = (starts, ends, labels[firsts], probabilities)
        return list(map(Span._make, zip(*(column.tolist() for column in columns), strict=True)))

    def _words(
        self, log_probabilities: NDArray[np.float32], subwords: Subwords, is_start: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float32], Subwords]:
        """Returns the log-probabilities of words, (W, C), and the words in place of subwords."""
        starts = np.flatnonzero(is_start)  # (W,)
        lengths = np.diff(starts, append=len(is_start))
        if self._aggregation == "first":
            rows = log_probabilities[starts]
        elif self._aggregation == "average":
            sums = np.add.reduceat(np.exp(log_probabilities), starts, axis=0)
            rows = np.log(np.maximum(sums / lengths[:, None], np.finfo(np.float32).tiny))
        else:
            surest = log_probabilities.max(axis=-1)  # (P,)
            order = np.lexsort((np.arange(len(surest)), -surest, np.cumsum(is_start)))
            rows = log_probabilities[order[starts]]  # the surest of each word, the first of equals
        ends = np.maximum.accumulate(subwords.ends)[starts + lengths - 1]
        words = Subwords(subwords.tokens[starts], subwords.starts[starts], ends, np.zeros(len(starts), np.bool_))
        return rows.astype(np.float32), words

    def _likeliest_tags(self, log_probabilities: NDArray[np.float32], joined: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the likeliest allowed sequence of tags, (P,): the likeliest tag of each subword, if allowed."""
        tags: NDArray[np.int64] = log_probabilities.argmax(axis=-1)
        allowed = np.where(joined[1:], self._may_join[tags[:-1], tags[1:]], self._may_follow[tags[:-1], tags[1:]])
        if allowed.all() and self._may_start[tags[0]] and self._may_end[tags[-1]]:
            return tags
        return self._search(log_probabilities, joined)

    def _search(self, log_probabilities: NDArray[np.float32], joined: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Runs the Viterbi algorithm, (P, C) to (P,)."""
        follow = np.where(self._may_follow, 0.0, -np.inf).astype(np.float32)  # (C before, C)
        join = np.where(self._may_join, 0.0, -np.inf).astype(np.float32)
        scores = np.where(self._may_start, log_probabilities[0], -np.inf)  # (C,)
        back = np.empty(log_probabilities.shape, np.int64)
        columns = np.arange(log_probabilities.shape[1])
        for index, cannot_begin in enumerate(joined.tolist()):
            if index:
                steps = scores[:, None] + (join if cannot_begin else follow)  # (C before, C)
                best = steps.argmax(axis=0)
                back[index] = best
                scores = steps[best, columns] + log_probabilities[index]
        tags = np.empty(len(log_probabilities), np.int64)
        tags[-1] = np.where(self._may_end, scores, -np.inf).argmax()
        for index in range(len(tags) - 1, 0, -1):
            tags[index - 1] = back[index, tags[index]]
        return tags

    def __repr__(self) -> str:
        return f"SpanDecoder({len(self.labels)} labels, {len(self._labels)} tags, {self._aggregation})"


def _transitions(
    tags: TagSet, same_label: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns which tags may start and end a text, (C,), and which may follow which, (C before, C)."""
    kinds, labels = np.array(tags.kinds), np.array(tags.numbers)
    every = np.ones(len(kinds), np.bool_)
    if tags.scheme not in ("iob2", "bioes"):
        return every, every, np.ones((len(kinds), len(kinds)), np.bool_)
    begun = np.isin(labels, labels[kinds == "B"])  # labels whose spans have a tag that begins them
    ended = np.isin(labels, labels[kinds == "E"])
    needs_start = np.isin(kinds, ("I", "E")) & begun
    is_open = np.isin(kinds, ("B", "I"))
    needs_end = is_open & ended & (tags.scheme == "bioes")
    goes_on = same_label & is_open[:, None] & np.isin(kinds, ("I", "E"))
    return ~needs_start, ~needs_end, goes_on | (~needs_end[:, None] & ~needs_start)
