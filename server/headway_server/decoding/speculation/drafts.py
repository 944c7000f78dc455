"""Drafts of the running sequences, slot by slot, and the run that verifies them (docs/speculation.md).

The stepper asks for a run before it decodes, and takes rows of logits from it as if each came from a step of its own.
So text, penalties, constraints, stop strings and log-probabilities know nothing of drafts.

R running sequences (slots 0 to R-1), T tokens of a verifying run, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.speculation.prompt_lookup import MAX_ROWS, DraftVerifier, PromptLookup


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """Logits of one sequence after its newest token and after each of its drafted ones."""

    slot: int
    drafted: NDArray[np.int64]
    """(T - 1,)"""
    logits: NDArray[np.float32]
    """(T, V): a view that the next run overwrites."""
    lookup: PromptLookup
    """The sequence's own."""

    def __iter__(self) -> Iterator[tuple[NDArray[np.float32], int | None]]:
        """Yields logits (V,) and the token that must be chosen from them for the next to count; None at the end."""
        return zip(self.logits, [*self.drafted.tolist(), None], strict=True)


class Drafting:
    """What was said in every slot, and what is drafted of it. For the engine's thread alone.

    Attributes:
        num_drafted_tokens: Tokens that were drafted and verified, since the start.
        num_accepted_tokens: Those of them that the model chose too.
    """

    def __init__(self, verifier: DraftVerifier, *, num_slots: int, max_length: int) -> None:
        """Drafts nothing yet.

        Args:
            verifier: Runs the decoder's slots.
            num_slots: Slots there are.
            max_length: Positions of a slot.
        """
        self._verifier = verifier
        self._max_length = max_length
        self._lookups: list[PromptLookup | None] = [None] * num_slots
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    def __repr__(self) -> str:
        return f"Drafting({self.num_accepted_tokens} of {self.num_drafted_tokens} tokens accepted)"

    def assign(self, slot: int, prompt_ids: NDArray[np.int64]) -> None:
        """Begins with the prompt (T,) of the sequence that joins in a slot."""
        self._lookups[slot] = PromptLookup(prompt_ids.tolist())

    def move(self, source: int, target: int) -> None:
        """Takes what belongs to slot `source` to slot `target`."""
        self._lookups[target], self._lookups[source] = self._lookups[source], None

    def append(self, first_slot: int, token_ids: NDArray[np.int64]) -> None:
        """Takes the next token of each slot from `first_slot`, (n,)."""
        for slot, token_id in enumerate(token_ids.tolist(), first_slot):
            self._lookup(slot).append(token_id)

    def verify(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], num_left: Sequence[int]
    ) -> list[VerifiedDraft]:
        """Runs all sequences by their newest token and a draft.

        Only where all of them have a draft: a run takes as long as two decode steps, and a sequence without one would
        wait for another's.

        Args:
            token_ids: (R,) the newest token of each.
            positions: (R,) where they stand.
            num_left: Tokens that each may still have.

        Returns:
            One for each sequence; the last slot is the first, since whoever retires is replaced from behind. Empty
            where nothing was run, because there are too many sequences, too few tokens to come, or no draft.
        """
        width = self._verifier.width
        if len(token_ids) > MAX_ROWS or min(num_left) < 2 or positions.max() + width > self._max_length:
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
        """Notes how many tokens of a draft the model chose too."""
        num_drafted = len(verified.drafted)
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        verified.lookup.settle(num_drafted, num_accepted)

    def _lookup(self, slot: int) -> PromptLookup:
        lookup = self._lookups[slot]
        assert lookup is not None, "a sequence that runs has joined"
        return lookup
