"""Labelled spans from the tags of pieces.

The spans of a text are those of the likeliest sequence of tags that the scheme allows: the product of the tags'
probabilities, each of them taken at its piece, is the largest (Viterbi 1967). The probability of a span is the
geometric mean of its tags'. A piece at which nothing can begin continues its span; where a label has no `I-x` to say
so, `B-x` says it there.

P is the number of pieces of a text, C that of tags, L that of labels, S that of spans.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles.tags import TagSet

START, END, LABEL, PROBABILITY = range(4)
"""Columns of what `SpanDecoder.decode` returns."""


class SpanDecoder:
    """Finds spans. Safe to use from several threads."""

    def __init__(self, tags: TagSet) -> None:
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

    def decode(
        self,
        log_probabilities: NDArray[np.float32],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        joined: NDArray[np.bool_],
    ) -> NDArray[np.float32]:
        """Finds the spans of one text.

        Args:
            log_probabilities: Of the tags at each piece, (P, C).
            starts: First character of each piece, (P,).
            ends: Character after each piece, (P,).
            joined: Whether nothing can begin at a piece, (P,).

        Returns:
            Start, end, label and probability of each span, in the order of the text: (S, 4). A float32 holds the
            positions exactly up to 16,777,216 characters.
        """
        if not len(starts):
            return np.empty((0, 4), np.float32)
        tags = self._likeliest_tags(log_probabilities, joined)  # (P,)
        continues = self._continues[tags] | (joined & self._begins[tags])  # (P,)
        breaks = np.flatnonzero(~continues)  # every piece up to the next break belongs to the first one
        sums = np.add.reduceat(log_probabilities[np.arange(len(tags)), tags], breaks)
        lengths = np.diff(breaks, append=len(tags))
        found = ~self._outside[tags[breaks]]
        firsts, lasts = breaks[found], (breaks + lengths - 1)[found]
        spans = np.empty((len(firsts), 4), np.float32)
        spans[:, START], spans[:, END] = starts[firsts], np.maximum.accumulate(ends)[lasts]
        spans[:, LABEL], spans[:, PROBABILITY] = self._labels[tags[firsts]], np.exp(sums[found] / lengths[found])
        return spans

    def _likeliest_tags(self, log_probabilities: NDArray[np.float32], joined: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The likeliest allowed tags: those that are likeliest by themselves, where they are allowed; (P,)."""
        tags: NDArray[np.int64] = log_probabilities.argmax(axis=-1)
        allowed = np.where(joined[1:], self._may_join[tags[:-1], tags[1:]], self._may_follow[tags[:-1], tags[1:]])
        if allowed.all() and not self._continues[tags[0]]:
            return tags
        return self._search(log_probabilities, joined)

    def _search(self, log_probabilities: NDArray[np.float32], joined: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Viterbi's algorithm: (P, C) to (P,)."""
        follow = np.where(self._may_follow, 0.0, -np.inf).astype(np.float32)  # (C before, C)
        join = np.where(self._may_join, 0.0, -np.inf).astype(np.float32)
        scores = np.where(self._continues, -np.inf, log_probabilities[0])  # (C,)
        back = np.empty(log_probabilities.shape, np.int64)
        columns = np.arange(log_probabilities.shape[1])
        for place, cannot_begin in enumerate(joined.tolist()):
            if place:
                steps = scores[:, None] + (join if cannot_begin else follow)  # (C before, C)
                best = steps.argmax(axis=0)
                back[place] = best
                scores = steps[best, columns] + log_probabilities[place]
        tags = np.empty(len(log_probabilities), np.int64)
        tags[-1] = scores.argmax()
        for place in range(len(tags) - 1, 0, -1):
            tags[place - 1] = back[place, tags[place]]
        return tags

    def __repr__(self) -> str:
        return f"SpanDecoder({len(self._begin)} labels, {len(self._labels)} tags)"
