"""Masks of allowed tokens, packed: bit i % 32 of word i // 32 is set where token i is allowed.

Shapes: n rows, V vocabulary, M words of a mask.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD_BITS = 32
_BYTE_BITS = 8
_BLOCK_TOKENS = 2**17
"""Logits that are masked at a time, so that what is added to them stays in the processor's cache."""


def _penalty_table() -> NDArray[np.float32]:
    """Returns, for every byte of a mask, what is added to its 8 logits: 0, or minus infinity; (256, 8)."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(-np.inf))


class TokenMasks:
    """The mask of every slot, each for one draw."""

    def __init__(self, *, num_slots: int, vocab_size: int) -> None:
        """Makes the masks when the first of them is needed.

        Args:
            num_slots: Slots there are.
            vocab_size: V.
        """
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._words: NDArray[np.int32] | None = None  # (num_slots, M)
        self._table: NDArray[np.float32] = np.zeros((0, _BYTE_BITS), np.float32)
        self.is_set = np.zeros(num_slots, np.bool_)
        """Which slots may choose only what their masks allow."""

    def __repr__(self) -> str:
        return f"TokenMasks({np.count_nonzero(self.is_set)} of {len(self.is_set)} slots)"

    def row(self, slot: int) -> NDArray[np.int32]:
        """Returns the words (M,) of a slot's mask, to be filled in place."""
        if self._words is None:
            self._words = np.zeros((len(self.is_set), self._num_words), np.int32)
            self._table = _penalty_table()
        row: NDArray[np.int32] = self._words[slot]
        return row

    def set(self, slot: int, mask: NDArray[np.int32]) -> None:
        """Sets a slot's mask (M,); its own words may be that mask already."""
        row = self.row(slot)
        assert mask.shape == row.shape, "a mask has a bit for every token"
        row[:] = mask
        self.is_set[slot] = True

    def clear(self, slots: int | slice) -> None:
        """Lets slots choose any token."""
        self.is_set[slots] = False

    def move(self, source: int, target: int) -> None:
        """Takes a slot's mask to another slot."""
        self.is_set[target] = self.is_set[source]
        if self.is_set[source]:
            self.row(target)[:] = self.row(source)
        self.is_set[source] = False

    def apply(self, slots: NDArray[np.intp], rows: NDArray[np.intp], logits: NDArray[np.float32]) -> None:
        """Sets the logits of tokens that are not allowed to minus infinity.

        Args:
            slots: (n,) slots, all of them with a mask.
            rows: (n,) which rows of `logits` are theirs.
            logits: (R, V) float32; changed in place.
        """
        assert self._words is not None, "a mask is set"
        width = logits.shape[1]
        step = max(_BLOCK_TOKENS // width, 1)
        for start in range(0, len(slots), step):
            words = self._words[slots[start : start + step]].astype("<i4", copy=False)
            # By bytes, because choosing one by one between a logit and minus infinity is many times slower.
            addends = np.empty((*words.view(np.uint8).shape, _BYTE_BITS), np.float32)
            self._table.take(words.view(np.uint8), axis=0, out=addends, mode="clip")
            with np.errstate(invalid="ignore"):  # a row with an infinite logit is reported anyway
                logits[rows[start : start + step]] += addends.reshape(len(words), -1)[:, :width]
