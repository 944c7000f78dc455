"""Labelled spans from the tags of subwords.

Spans come from the likeliest sequence of tags that the scheme allows, by the product of the tags' probabilities
(Viterbi 1967). The probability of a span is the geometric mean of its tags'. A subword within a word continues its
span; `B-x` stands for continuation if a label has no `I-x`.

T tokens of a text, P subwords, C tags, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles.tags import TagSet
from headway_server.preprocessing.subwords import Subwords
from headway_server.tasks.outputs import log_softmax


class Span(NamedTuple):
    """A labelled part of a text: characters `start` to `end`, `end` excluded, in Unicode code points."""

    start: int
    end: int
    label: int
    """Index of the label among the labels of the tags."""
    probability: float


class SpanDecoder:
    """Finds spans. Thread-safe."""

    def __init__(self, tags: TagSet) -> None:
        self.labels = tags.labels
        num_tags = len(tags.labels) + sum(tag is not None for tag in (*tags.inside, tags.outside))
        self._begin = np.array(tags.begin)  # (L,)
        self._labels = np.full(num_tags, -1)  # (C,), -1 of `O`
        self._labels[self._begin] = np.arange(len(tags.labels))
        for label, tag in enumerate(tags.inside):
            if tag is not None:
                self._labels[tag] = label
        self._outside = self._labels < 0  # (C,)
        self._begins = np.zeros(num_tags, np.bool_)  # (C,)
        self._begins[self._begin] = True
        self._continues = ~(self._begins | self._outside)  # (C,)
        same_label = self._labels[:, None] == self._labels  # (C before, C)
        self._may_follow = np.where(self._continues, same_label, True)
        self._may_join = np.where(self._begins, False, same_label)
        alone = [tag for tag, inside in zip(tags.begin, tags.inside, strict=True) if inside is None]
        self._may_join[alone, alone] = True

    def decode_text(self, logits: NDArray[np.float32], text: str, offsets: Sequence[tuple[int, int]]) -> list[Span]:
        """Finds the spans of a text.

        Args:
            logits: Logits of the tags at each token, (T, C).
            text: The text.
            offsets: First character and end of each of the T tokens.

        Raises:
            FloatingPointError: A logit is not finite.
        """
        subwords = Subwords.find(text, offsets)
        scores = logits[subwords.tokens]  # (P, C)
        if not np.isfinite(scores).all():
            raise FloatingPointError("the model's logits are not finite")
        return self.decode(log_softmax(scores), subwords)

    def decode(self, log_probabilities: NDArray[np.float32], subwords: Subwords) -> list[Span]:
        """Finds the spans of a text, in order, by the log-probabilities of tags, (P, C)."""
        if not len(subwords.tokens):
            return []
        joined = subwords.joined
        tags = self._likeliest_tags(log_probabilities, joined)  # (P,)
        continues = self._continues[tags] | (joined & self._begins[tags])  # (P,)
        breaks = np.flatnonzero(~continues)  # a span extends to the next break
        sums = np.add.reduceat(log_probabilities[np.arange(len(tags)), tags], breaks)
        lengths = np.diff(breaks, append=len(tags))
        found = ~self._outside[tags[breaks]]
        firsts, lasts = breaks[found], (breaks + lengths - 1)[found]
        starts, ends = subwords.starts[firsts], np.maximum.accumulate(subwords.ends)[lasts]
        probabilities = np.exp(sums[found] / lengths[found]).astype(np.float32)
        columns = (starts, ends, self._labels[tags[firsts]], probabilities)
        return list(map(Span._make, zip(*(column.tolist() for column in columns), strict=True)))

    def _likeliest_tags(self, log_probabilities: NDArray[np.float32], joined: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the likeliest allowed sequence of tags, (P,): the likeliest tag of each subword, if allowed."""
        tags: NDArray[np.int64] = log_probabilities.argmax(axis=-1)
        allowed = np.where(joined[1:], self._may_join[tags[:-1], tags[1:]], self._may_follow[tags[:-1], tags[1:]])
        if allowed.all() and not self._continues[tags[0]]:
            return tags
        return self._search(log_probabilities, joined)

    def _search(self, log_probabilities: NDArray[np.float32], joined: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Runs the Viterbi algorithm, (P, C) to (P,)."""
        follow = np.where(self._may_follow, 0.0, -np.inf).astype(np.float32)  # (C before, C)
        join = np.where(self._may_join, 0.0, -np.inf).astype(np.float32)
        scores = np.where(self._continues, -np.inf, log_probabilities[0])  # (C,)
        back = np.empty(log_probabilities.shape, np.int64)
        columns = np.arange(log_probabilities.shape[1])
        for index, cannot_begin in enumerate(joined.tolist()):
            if index:
                steps = scores[:, None] + (join if cannot_begin else follow)  # (C before, C)
                best = steps.argmax(axis=0)
                back[index] = best
                scores = steps[best, columns] + log_probabilities[index]
        tags = np.empty(len(log_probabilities), np.int64)
        tags[-1] = scores.argmax()
        for index in range(len(tags) - 1, 0, -1):
            tags[index - 1] = back[index, tags[index]]
        return tags

    def __repr__(self) -> str:
        return f"SpanDecoder({len(self._begin)} labels, {len(self._labels)} tags)"
