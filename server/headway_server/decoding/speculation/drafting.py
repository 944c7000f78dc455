"""Drafts the next tokens of sequences by prompt lookup, and has them verified (docs/speculation.md).

A text that repeats its prompt, an edited file or a list of records, has long stretches that stand in it already. The
draft is what followed the last few tokens where they stood before. It costs next to nothing, and where the model
agrees, one step gives several tokens.

The stepper asks for a run before it decodes, and takes rows of logits from it as if each came from a step of its own.
So text, penalties, constraints, stop strings and log-probabilities know nothing of drafts.

Shapes: R running sequences (slots 0 to R-1), T tokens of a verifying run, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.interfaces import Decoder, DraftVerifier
from headway_server.decoding.slots import Slots

MAX_ROWS = 8
"""Most sequences that run while drafts are verified. With eight sequences that copy, drafts give 1.24 times as many
tokens a second (docs/speculation.md); with more, arithmetic takes longer than memory."""
MIN_MATCH = 3
"""Last tokens of the text that must have stood in it before."""
LONG_MATCH = 6
"""Last tokens that are looked up first, since a longer match is likelier to go on."""
MIN_ACCEPTED = 1.5
"""Drafted tokens of a draft that the model must accept, on average, to save time; a verifying step gives one token more
than it accepts."""
LONGEST_PAUSE = 64
"""Maximum tokens between two drafts, after rejected drafts."""

_WEIGHT = 0.25  # of the newest draft in the running average


class PromptLookup:
    """The tokens of one sequence, where each short run of them stood last, and how well its drafts do.

    A token takes two entries of a dictionary, made when a draft is asked for. So memory and time grow with the text,
    whose length the model limits.

    Attributes:
        num_drafted: Tokens that were drafted and verified.
        num_accepted: Accepted draft tokens.
    """

    __slots__ = (
        "_average",
        "_ends",
        "_next_draft_at",
        "_num_indexed",
        "_pause",
        "_token_ids",
        "num_accepted",
        "num_drafted",
    )

    def __init__(self, token_ids: Iterable[int]) -> None:
        """Starts with the tokens of the prompt."""
        self._token_ids = list(token_ids)
        self._ends: dict[tuple[int, ...], int] = {}  # by n-gram: the position after its last occurrence
        self._num_indexed = 0
        self._average = MIN_ACCEPTED  # of tokens accepted a draft
        self._pause = 1
        self._next_draft_at = 0
        self.num_drafted = 0
        self.num_accepted = 0

    def __repr__(self) -> str:
        return f"PromptLookup({len(self._token_ids)} tokens, {self.num_accepted} of {self.num_drafted} drafts accepted)"

    def append(self, token_id: int) -> None:
        """Takes the next token of the text."""
        self._token_ids.append(token_id)

    def draft(self, num_tokens: int) -> NDArray[np.int64] | None:
        """Predicts the next tokens.

        Args:
            num_tokens: Tokens that are wanted, at least one.

        Returns:
            (num_tokens,) int64; None if nothing is found, or during a pause because too few were accepted.
        """
        if len(self._token_ids) < self._next_draft_at:
            return None
        self._index()
        start = self._find()
        if start is None:
            return None
        period = self._token_ids[start:]  # if the text repeats itself up to its end, so does the draft
        repeats = -(-num_tokens // len(period))
        return np.array((period * repeats if repeats > 1 else period)[:num_tokens], np.int64)

    def settle(self, num_drafted: int, num_accepted: int) -> None:
        """Records the accepted tokens of a draft; each rejected draft doubles the pause before the next."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._average += _WEIGHT * (num_accepted - self._average)
        if self._average >= MIN_ACCEPTED:
            self._pause = 1
            return
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._next_draft_at = len(self._token_ids) + self._pause

    def _index(self) -> None:
        """Notes where runs of tokens stand, except for the one at the end, which is looked up."""
        for end in range(max(self._num_indexed, 1), len(self._token_ids)):
            for length in (MIN_MATCH, LONG_MATCH):
                if end >= length:
                    self._ends[tuple(self._token_ids[end - length : end])] = end
        self._num_indexed = len(self._token_ids)

    def _find(self) -> int | None:
        """Returns the position after the last earlier occurrence of the last tokens."""
        for length in (LONG_MATCH, MIN_MATCH):
            end = self._ends.get(tuple(self._token_ids[-length:]))
            if end is not None:
                return end
        return None


def verifies_exactly(decoder: Decoder, verifier: DraftVerifier) -> bool:
    """Returns True if verifying gives the very logits of decoding on this machine. Writes to the first slots.

    The processor's instructions, not the text, decide whether the bits of a matrix product depend on the number of
    rows. One test of all products of the model is therefore enough.
    """
    rows, width = min(MAX_ROWS, decoder.num_slots), verifier.width
    if width > decoder.max_length:
        return False
    token_ids = np.random.default_rng(0).integers(0, decoder.vocab_size, (rows, width))
    decoded = [decoder.decode(token_ids[:, index], np.full(rows, index)).copy() for index in range(width)]
    logits = np.stack(decoded, axis=1)  # (R, T, V)
    counts = range(1, rows + 1)
    return all(
        np.array_equal(verifier.verify(token_ids[:count], np.zeros(count, np.int64)), logits[:count])
        for count in counts
    )


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """Logits of one sequence after its newest token and after each of its drafted ones."""

    slot: int
    drafted: NDArray[np.int64]
    """(T - 1,)"""
    logits: NDArray[np.float32]
    """(T, V): a view that the next run overwrites."""
    lookup: PromptLookup
    """Index of the sequence's tokens."""

    def __iter__(self) -> Iterator[tuple[NDArray[np.float32], int | None]]:
        """Yields logits (V,) with the drafted token that follows; if another is chosen, the rest does not count.

        No drafted token follows the last logits: None.
        """
        return zip(self.logits, [*self.drafted.tolist(), None], strict=True)


class Drafting:
    """Drafts of all slots. For the engine's thread alone.

    Attributes:
        num_drafted_tokens: Tokens that were drafted and verified, since the start.
        num_accepted_tokens: Accepted draft tokens.
    """

    def __init__(self, verifier: DraftVerifier, decoder: Decoder, slots: Slots) -> None:
        """Starts with no tokens.

        Args:
            verifier: Runs the decoder's slots.
            decoder: The decoder.
            slots: Storage of drafts.
        """
        self._verifier = verifier
        self._decoder = decoder
        self._lookups: list[PromptLookup | None] = slots.objects()
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    def __repr__(self) -> str:
        return f"Drafting({self.num_accepted_tokens} of {self.num_drafted_tokens} tokens accepted)"

    def assign(self, slot: int, prompt_ids: NDArray[np.int64]) -> None:
        """Starts with the prompt (T,) of the sequence that joins in a slot."""
        self._lookups[slot] = PromptLookup(prompt_ids.tolist())

    def append(self, slots: NDArray[np.intp], token_ids: NDArray[np.int64]) -> None:
        """Takes the next token (n,) of each of the slots (n,)."""
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self._lookup(slot).append(token_id)

    def verify(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], num_left: Sequence[int]
    ) -> list[VerifiedDraft]:
        """Runs all sequences by their newest token and a draft.

        Only if each of them has a draft: a run takes as long as two decode steps, and a sequence without a draft would
        wait for the others'.

        Args:
            token_ids: (R,) the newest token of each.
            positions: (R,) their positions.
            num_left: Tokens that each sequence may still have.

        Returns:
            One for each sequence, from the last slot down, since a sequence that retires is replaced by the last one.
            Empty if nothing was run, because there are too many sequences, too few tokens left, no draft, or because a
            wrong draft could not be taken back from a window.
        """
        width = self._verifier.width
        if len(token_ids) > MAX_ROWS or min(num_left) < 2 or positions.max() + width > self._decoder.max_length:
            return []
        if not all(self._decoder.can_return(start + 1, start + width) for start in positions.tolist()):
            return []
        lookups = [self._lookup(slot) for slot in range(len(token_ids))]
        drafts = [draft for lookup in lookups if (draft := lookup.draft(width - 1)) is not None]
        if len(drafts) < len(lookups):
            return []
        stacked = np.stack(drafts)  # (R, T - 1)
        logits = self._verifier.verify(np.column_stack((token_ids, stacked)), positions)
        rows = zip(range(len(drafts)), stacked, logits, lookups, strict=True)
        return [VerifiedDraft(*row) for row in rows][::-1]

    def settle(self, verified: VerifiedDraft, num_accepted: int) -> None:
        """Records the number of draft tokens that the model chose."""
        num_drafted = len(verified.drafted)
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        verified.lookup.settle(num_drafted, num_accepted)

    def _lookup(self, slot: int) -> PromptLookup:
        lookup = self._lookups[slot]
        assert lookup is not None, "every running sequence has joined"
        return lookup
