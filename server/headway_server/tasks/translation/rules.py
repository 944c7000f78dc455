"""What a translation without a search is held to, as a constraint on its next token.

A beam search has these rules of its own; here they are for the likeliest token alone, and for drawing at random.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ALL = np.int32(-1)
"""A word of a mask that allows all of its 32 tokens."""


class TranslationRules:
    """Begins a translation with given tokens, and keeps n tokens from following each other twice.

    It follows `interfaces.Constraint`; the engine's thread alone calls it.
    """

    failure: str | None = None
    is_complete = False

    def __init__(self, prefix_ids: Sequence[int], no_repeat_ngram_size: int) -> None:
        """Starts at the beginning of a translation.

        Args:
            prefix_ids: Tokens that it begins with, whatever they repeat.
            no_repeat_ngram_size: n; 0 allows repetitions.
        """
        self._prefix_ids = tuple(prefix_ids)
        self._size = no_repeat_ngram_size
        self._token_ids: list[int] = []
        self._followers: dict[tuple[int, ...], set[int]] = {}
        """What has come after n - 1 tokens."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Marks the tokens that may follow in the words (M,) of `mask`."""
        count = len(self._token_ids)
        if count < len(self._prefix_ids):
            mask[:] = 0
            _flip(mask, self._prefix_ids[count])
            return
        mask[:] = _ALL
        if self._size:
            for token_id in self._followers.get(self._tail(), ()):
                _flip(mask, token_id)

    def accept(self, token_id: int) -> None:
        """Takes the next token."""
        if self._size and len(self._token_ids) >= self._size - 1:
            self._followers.setdefault(self._tail(), set()).add(token_id)
        self._token_ids.append(token_id)

    def __repr__(self) -> str:
        return f"TranslationRules({len(self._prefix_ids)} given, {len(self._token_ids)} tokens so far)"

    def _tail(self) -> tuple[int, ...]:
        """Returns the last n - 1 tokens."""
        return tuple(self._token_ids[len(self._token_ids) - self._size + 1 :])


def _flip(mask: NDArray[np.int32], token_id: int) -> None:
    """Allows a token that is forbidden, or forbids one that is allowed."""
    word, bit = divmod(token_id, 32)
    mask[word] ^= np.array(1 << bit, np.uint32).view(np.int32)
