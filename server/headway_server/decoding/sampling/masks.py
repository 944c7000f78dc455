"""The masks of all slots: which tokens may follow in each (`rules.py`).

Shapes: n rows, R rows of a step, C tokens of a row, V vocabulary, M words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.rules import WORD_BITS, Mask, mask_of, num_words, unpack
from headway_server.decoding.slots import Slots

_BYTE_BITS = 8
_BLOCK_TOKENS = 2**17
"""Logits masked at a time, whose addends fit in a core's cache."""
_SPARSE = 16
"""Forbidden tokens are masked one by one if fewer than one word in this number has any."""
_FEW_WORDS = 16
"""Words that allow anything, of a mask that allows few tokens."""


class TokenMasks:
    """A mask for each slot, which is begun and cleared. A slot without one may choose all but suppressed tokens.

    Attributes:
        slots: The slots.
        vocab_size: V.
        restricts: (num_slots,) True for slots in which some token may not follow.
    """

    def __init__(self, slots: Slots, *, vocab_size: int, suppressed_ids: Sequence[int] = ()) -> None:
        """Allows every slot all tokens but the suppressed ones.

        Args:
            slots: Storage of the masks.
            vocab_size: V.
            suppressed_ids: Tokens that may never follow.
        """
        self.slots = slots
        self.vocab_size = vocab_size
        self._base: Mask = ~mask_of(suppressed_ids, num_words(vocab_size))
        self._words: NDArray[np.int32] = slots.array(np.int32, self._base, shape=self._base.shape)
        self._suppressed_ids = np.array(suppressed_ids, np.int64)
        self.restricts: NDArray[np.bool_] = slots.array(np.bool_, bool(suppressed_ids))
        self._is_begun: NDArray[np.bool_] = slots.array(np.bool_)
        bits = unpack(np.arange(256, dtype=np.int32)[:, np.newaxis])[:, :_BYTE_BITS]
        self._addends = np.where(bits, np.float32(0), np.float32(-np.inf))  # (256, 8) to the logits of a byte's tokens

    def __repr__(self) -> str:
        return f"TokenMasks({np.count_nonzero(self._is_begun)} of {self.slots.num_slots} slots)"

    def begin(self, slot: int) -> Mask:
        """Returns a slot's mask (M,), for rules to clear bits in."""
        self.restricts[slot] = self._is_begun[slot] = True
        mask: Mask = self._words[slot]
        mask[:] = self._base
        return mask

    def clear(self, slots: int | NDArray[np.intp]) -> None:
        """Allows slots all but suppressed tokens."""
        if self._is_begun[slots].any():
            self._words[slots] = self._base
            self.restricts[slots] = self._suppressed_ids.size > 0
            self._is_begun[slots] = False

    def allows(self, slots: NDArray[np.intp], token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether the tokens (n,) or (n, C) may follow in the slots (n,)."""
        if token_ids.ndim > 1:
            slots = slots[:, np.newaxis]
        bits = self._words[slots, token_ids // WORD_BITS] >> (token_ids % WORD_BITS) & 1
        return bits.astype(np.bool_)

    def apply(self, slots: NDArray[np.intp], rows: NDArray[np.intp], logits: NDArray[np.float32]) -> None:
        """Sets the logits of tokens that may not follow to minus infinity.

        Args:
            slots: (n,) slots.
            rows: (n,) their rows in `logits`.
            logits: (R, V) float32; changed in place.
        """
        logits[rows[:, np.newaxis], self._suppressed_ids] = -np.inf
        is_begun = self._is_begun[slots]
        if not is_begun.any():
            return
        words, rows = self._words[slots[is_begun]], rows[is_begun]  # (n, M)
        positions = np.flatnonzero(words != -1)
        if len(positions) * _SPARSE < words.size:
            self._set(words, positions, rows, logits)
            return
        step = max(_BLOCK_TOKENS // self.vocab_size, 1)
        for start in range(0, len(rows), step):
            self._add(words[start : start + step], rows[start : start + step], logits)

    def few(self, slot: int) -> NDArray[np.int64] | None:
        """Returns the tokens that may follow in a slot, rising; None if they may be many."""
        words = self._words[slot]
        positions = np.flatnonzero(words)
        if len(positions) > _FEW_WORDS:
            return None
        index, bit = np.nonzero(unpack(words[positions, np.newaxis]))
        token_ids = positions[index] * WORD_BITS + bit
        return token_ids[token_ids < self.vocab_size]

    def _set(
        self, words: NDArray[np.int32], positions: NDArray[np.intp], rows: NDArray[np.intp], logits: NDArray[np.float32]
    ) -> None:
        """Sets the logits of few tokens one by one; `positions` are the indices of the words that forbid them."""
        index, bit = np.nonzero(~unpack(words.reshape(-1)[positions, np.newaxis]))
        row, word = np.divmod(positions[index], words.shape[1])
        token_ids = word * WORD_BITS + bit
        is_token = token_ids < self.vocab_size
        logits[rows[row[is_token]], token_ids[is_token]] = -np.inf

    def _add(self, words: NDArray[np.int32], rows: NDArray[np.intp], logits: NDArray[np.float32]) -> None:
        """Adds 0 or minus infinity to all logits, by bytes: choosing one by one is many times slower."""
        mask_bytes: NDArray[Any] = words.astype("<i4", copy=False).view(np.uint8)
        addends = np.empty((*mask_bytes.shape, _BYTE_BITS), np.float32)
        self._addends.take(mask_bytes, axis=0, out=addends, mode="clip")
        with np.errstate(invalid="ignore"):  # a row with an infinite logit is reported
            logits[rows] += addends.reshape(len(words), -1)[:, : self.vocab_size]
