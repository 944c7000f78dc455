"""How far one sequence is in its constraint.

V is the number of the model's logits, W = ceil(V / 32) the words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMasks:
    """What the masks of all constraints of a model have in common."""

    text: NDArray[np.int32]
    """(W,) the tokens that are part of a text."""
    spaced: NDArray[np.int32]
    """(W,) those of them that begin with a space."""
    num_words: int
    """Words of the library's mask: it has one token more than the model, its own end."""
    spells_everything: bool
    """Whether every text can be written with the vocabulary, so that no text ends for want of a token."""


class ConstraintState:
    """What may follow in one sequence. One thread at a time calls it.

    Attributes:
        failure: Why nothing may follow although the text is not complete; None as long as something may.
    """

    __slots__ = ("_buffer", "_end_ids", "_is_at_beginning", "_masks", "_matcher", "_only_end_follows", "failure")

    def __init__(
        self, matcher: LLMatcher, masks: ModelMasks, *, end_ids: frozenset[int], is_at_beginning: bool
    ) -> None:
        self._matcher = matcher
        self._masks = masks
        self._end_ids = tuple(end_ids)
        self._is_at_beginning = is_at_beginning
        self._only_end_follows = False
        self._buffer = np.zeros(masks.num_words, np.int32)  # (ceil((V + 1) / 32),)
        self.failure: str | None = None

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Marks the tokens that may follow.

        Where the text may end, the tokens that end it are among them. Where nothing may follow, no token is marked:
        the text is complete, or `failure` says why there is nothing.

        Args:
            mask: (W,) int32, overwritten: bit i % 32 of word i // 32 for token i.
        """
        if self.failure is None:
            self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        self._finish(self._buffer, mask)

    def accept(self, token_id: int) -> None:
        """Takes the next token, one of those that may follow and not one that ends the text.

        Raises:
            ValueError: It may not follow.
        """
        self._is_at_beginning = False
        if not self._matcher.consume_token(token_id):
            self._fail()
            raise ValueError(f"token {token_id} may not follow: {self.failure}")
        if not self._masks.spells_everything and not self._matcher.is_stopped() and self._matcher.is_accepting():
            self.fill(mask := np.empty_like(self._masks.text))
            self._only_end_follows = not (mask & self._masks.text).any()

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return self.failure is None and (self._only_end_follows or self._matcher.is_stopped())

    def _finish(self, words: NDArray[np.int32], mask: NDArray[np.int32]) -> None:
        """Makes the model's mask (W,) of the library's (ceil((V + 1) / 32),)."""
        if self.failure is None and self._matcher.is_error():
            self._fail()
        if self.failure is not None:
            mask[:] = 0
            return
        np.bitwise_and(words[: len(mask)], self._masks.text, out=mask)
        if self._is_at_beginning:
            mask &= ~self._masks.spaced
        if self._end_ids and (self._matcher.is_stopped() or self._matcher.is_accepting()):
            for token_id in self._end_ids:
                mask[token_id // 32] |= np.uint32(1 << token_id % 32).view(np.int32)

    def _fail(self) -> None:
        reason = self._matcher.stop_reason()
        self.failure = (
            "no token of the model leads on"
            if reason in {"NoExtension", "NoExtensionBias"}
            else f"the constraint is too complex to go on ({reason})"
        )

    def __repr__(self) -> str:
        return f"ConstraintState({'complete' if self.is_complete else self.failure or 'open'})"


def fill_many(
    constraints: Sequence[ConstraintState], masks: NDArray[np.int32], rows: Sequence[int], executor: LLExecutor
) -> None:
    """Does `fill` for many sequences at once, on several threads.

    Args:
        constraints: The sequences' states, all different, of one model.
        masks: (R, W) int32; rows that are not named stay as they are.
        rows: The row of each constraint.
        executor: The threads.
    """
    raise NotImplementedError
