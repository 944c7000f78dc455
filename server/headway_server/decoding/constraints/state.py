"""How far one sequence has come in its constraint.

Shapes: V logits of the model, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from headway_server.decoding.constraints.closing import Closing
from headway_server.decoding.rules import Logits, Mask, TokenRule, mask_of

_DEAD_END = "no token of the model leads to a text that satisfies the constraint"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMasks:
    """Masks that all constraints of a model need."""

    text: NDArray[np.int32]
    """(W,) tokens that are part of a text."""
    first: NDArray[np.int32]
    """(W,) tokens that have the same text at the very beginning of a text."""
    num_words: int
    """Words of the library's mask, which has one token more than the model: an end of its own."""
    spells_everything: bool
    """True if the vocabulary can write every text, so that no text ends for lack of a token."""

    def with_tokens(self, token_ids: frozenset[int]) -> ModelMasks:
        """Returns masks for a constraint that special tokens are part of."""
        if not token_ids:
            return self
        bits = mask_of(token_ids, len(self.text))
        return replace(self, text=self.text | bits, first=self.first | bits)


class ConstraintState(TokenRule):
    """Constraint state of one sequence.

    Attributes:
        failure: Why nothing may follow although the text is not complete; None as long as something may.
    """

    __slots__ = (
        "_allowed",
        "_can_run_out",
        "_closing",
        "_end_bits",
        "_first",
        "_matcher",
        "_num_words",
        "_only_end_follows",
        "_reservation",
        "failure",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        masks: ModelMasks,
        *,
        end_ids: frozenset[int],
        is_at_beginning: bool,
        closing: Closing | None = None,
        reservation: object = None,
    ) -> None:
        """Starts at a matcher's state; `closing` ends a JSON text, `reservation` lives as long as the matcher."""
        self._reservation = reservation
        self._closing = closing
        self._matcher = matcher
        self._num_words = masks.num_words
        self._end_bits = mask_of(end_ids, len(masks.text))
        self._allowed = masks.text & ~self._end_bits
        self._first = masks.first if is_at_beginning else None
        # A stop token cannot be part of the text, even if the text would need it.
        self._can_run_out = not masks.spells_everything or bool((masks.text & self._end_bits).any())
        self._only_end_follows = False
        self.failure: str | None = None

    def restart(self) -> None:
        """Begins anew, after the text so far."""
        self._matcher.reset()
        self._first = None
        self._only_end_follows = False
        self.failure = None

    def allow(self, mask: Mask, logits: Logits | None = None) -> None:  # noqa: ARG002 (of the interface)
        """Clears the bits (W,) of forbidden tokens; end tokens stay allowed where the text may end.

        If nothing may follow, none is left: the text is complete and the model has no token that ends it, or `failure`
        says what is wrong.
        """
        if self.failure is None:
            words = np.zeros(self._num_words, np.int32)  # (ceil((V + 1) / 32),)
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                self._fail()
        if self.failure is not None:
            mask[:] = 0
            return
        words = words[: len(mask)] & (self._allowed if self._first is None else self._allowed & self._first)
        may_end = self._may_end
        mask &= words | self._end_bits if may_end else words
        if not may_end and not mask.any():
            self.failure = _DEAD_END
        elif self._closing is not None:
            self._close(self._closing, mask, words, may_end=may_end)

    def _close(self, closing: Closing, mask: Mask, words: Mask, *, may_end: bool) -> None:
        """Leaves the tokens in the mask (W,) after which the text ends within its maximum, if there are any."""
        if not may_end:
            some = closing.restrict(self._matcher, words, self._allowed)
        elif (some := closing.restrict_complete(self._matcher, words, self._allowed)) is not None:
            some = some | self._end_bits
        if some is not None and (some := some & mask).any():
            mask[:] = some

    def follow(self, token_id: int) -> ConstraintState:
        """Takes the next token, an allowed one that does not end the text, and returns itself.

        Raises:
            ValueError: It may not follow, or the constraint has become too complex.
        """
        if self.failure is None and not self._matcher.consume_token(token_id):
            self._fail()
        if self.failure is not None:
            raise ValueError(f"token {token_id} cannot be taken: {self.failure}")
        self._first = None
        self.pass_by(token_id)
        if self._can_run_out and self._may_end and not self._matcher.is_stopped():
            self.allow(mask := self._allowed.copy())
            self._only_end_follows = not mask.any()
        return self

    def pass_by(self, token_id: int | None = None) -> None:
        """Counts a token, by default one before the text."""
        if self._closing is not None:
            self._closing.follow(token_id)

    @property
    def is_complete(self) -> bool:
        """True if nothing but the end may follow."""
        return self.failure is None and (self._only_end_follows or self._matcher.is_stopped())

    @property
    def _may_end(self) -> bool:
        return self._matcher.is_stopped() or self._matcher.is_accepting()

    def _fail(self) -> None:
        complaint = self._matcher.get_error()
        if "NoExtension" in complaint:
            self.failure = _DEAD_END
        elif "too " in complaint or "max is" in complaint:
            self.failure = "the constraint became too complex; use smaller repetitions and fewer alternatives"
        else:
            self.failure = "it does not satisfy the constraint"

    def __repr__(self) -> str:
        return f"ConstraintState({'complete' if self.is_complete else self.failure or 'open'})"
