"""Other ways to cut a text into the pieces of a byte-pair vocabulary, so that a model sees how words are spelt.

T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headway_training.tagging import IGNORED, TagScheme

_NONE = -1
_SPACE = frozenset("ĠĊĉčĀ")
"""Characters that stand for the bytes of white space in a byte-level vocabulary."""


class PieceSplitter:
    """Undoes merges of a byte-pair vocabulary at random: a piece falls into the two it was merged from, and so on.

    To the same end as BPE-dropout (Provilkov et al. 2020), which leaves merges out on the way up. That is the
    tokenizer's own business and draws from a generator that cannot be seeded; this draws from the caller's, so that a
    resumed run sees what an unbroken one does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        content = json.loads(tokenizer.to_str())["model"]
        size = tokenizer.get_vocab_size()
        self._parents = np.full((size, 2), _NONE, np.int64)
        self._blank = np.zeros(size, np.bool_)
        for token, index in tokenizer.get_vocab().items():
            self._blank[index] = set(token) <= _SPACE
        vocabulary = content["vocab"]
        for merge in content.get("merges", ()):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            self._parents[vocabulary[left + right]] = vocabulary[left], vocabulary[right]

    def split(
        self,
        ids: NDArray[np.int64],
        tags: NDArray[np.int64],
        scheme: TagScheme,
        rate: float,
        random: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Splits pieces.

        Args:
            ids: (T,).
            tags: (T,), `IGNORED` where there is none.
            scheme: The tags.
            rate: Probability that a piece is split, and each of its parts in turn.
            random: Draws which.

        Returns:
            The ids and tags of the pieces there are then: the second part continues what the first begins, and what is
            white space alone has no tag.
        """
        begins = np.array([scheme.begins(tag) for tag in range(len(scheme.names))] + [False])
        drawn = self._draw(ids, rate, random)
        while drawn.any():
            counts = np.where(drawn, 2, 1)
            places = np.cumsum(counts) - counts  # (T,), where each piece or its first part is now
            first, second = places[drawn], places[drawn] + 1
            parents, old_tags = self._parents[ids[drawn]], tags[drawn]
            ids, tags, fresh = np.repeat(ids, counts), np.repeat(tags, counts), np.repeat(drawn, counts)
            ids[first], ids[second] = parents.T
            blank = self._blank[parents[:, 0]]
            tags[first] = np.where(blank, IGNORED, old_tags)
            tags[second] = np.where(blank, old_tags, old_tags + begins[old_tags])  # `I` comes after the `B` of a label
            drawn = fresh & self._draw(ids, rate, random)
        return ids, tags

    def split_ids(self, ids: Sequence[int], rate: float, random: np.random.Generator) -> list[int]:
        """Splits the pieces of a text that has no tags, as `split` does."""
        pieces = np.asarray(ids, dtype=np.int64)
        drawn = self._draw(pieces, rate, random)
        while drawn.any():
            counts = np.where(drawn, 2, 1)
            places = np.cumsum(counts) - counts  # (T,), where each piece or its first part is now
            parents, fresh = self._parents[pieces[drawn]], np.repeat(drawn, counts)
            first = places[drawn]
            pieces = np.repeat(pieces, counts)
            pieces[first], pieces[first + 1] = parents.T
            drawn = fresh & self._draw(pieces, rate, random)
        split: list[int] = pieces.tolist()
        return split

    def _draw(self, ids: NDArray[np.int64], rate: float, random: np.random.Generator) -> NDArray[np.bool_]:
        """Which of the pieces are split: (T,)."""
        drawn: NDArray[np.bool_] = (random.random(len(ids)) < rate) & (self._parents[ids, 0] != _NONE)
        return drawn
