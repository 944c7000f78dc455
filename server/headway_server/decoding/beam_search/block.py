"""In which slots the beams of one sentence are, and what must be copied when they go on.

A beam that goes on stays in its slot. Where several beams continue the same one, one of them stays, and the others take
slots whose own beams have ended. Two slots have the same content up to where their histories parted, and nowhere after,
since at each step every slot writes for a beam of its own. So only what lies after that is copied, to the free slot
whose history parted last.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from headway_server.decoding.beam_search.beams import BeamSearch


class SlotCopy(NamedTuple):
    """Positions of a slot that are copied over the same positions of another."""

    source: int
    """Slot that they are read from. No copy of the same step writes there."""
    target: int
    start: int
    """First position."""
    stop: int
    """Position after the last."""


class BeamBlock:
    """A search and the block of K slots that it runs in, whose slots are counted from 0 here.

    Attributes:
        search: The search.
        slots: K slots, each once: first those of the beams, in their order, then those without a beam.
    """

    def __init__(self, search: BeamSearch, num_slots: int) -> None:
        """Begins with nothing written.

        Args:
            search: The search.
            num_slots: K.
        """
        self.search = search
        self.slots = list(range(num_slots))
        # Of each two slots: how many positions they have in common.
        self._shared = [[0] * num_slots for _ in range(num_slots)]

    def __repr__(self) -> str:
        return f"BeamBlock({self.search!r}, beams in {self.slots[: len(self.search.beams)]})"

    def log_probabilities(self) -> list[float]:
        """Returns those of the beams, in the order of `slots`; minus infinity of slots without a beam."""
        values = [beam.log_probability for beam in self.search.beams]
        return values + [-inf] * (len(self.slots) - len(values))

    def next_inputs(self, first_id: int) -> list[int]:
        """Returns the token that each slot reads next; a slot without a beam reads what the best one reads."""
        beams = self.search.beams
        last_ids = [beam.token_ids[-1] if beam.token_ids else first_id for beam in beams]
        token_ids = [last_ids[0]] * len(self.slots)
        for slot, token_id in zip(self.slots, last_ids, strict=False):
            token_ids[slot] = token_id
        return token_ids

    def reorder(self, first_slot: int, num_written: int) -> list[SlotCopy]:
        """Finds a slot for each beam after the search has advanced.

        Args:
            first_slot: Where the block begins, for the copies.
            num_written: Positions that are written in each of its slots.

        Returns:
            What must be copied.
        """
        before = self.slots
        staying: set[int] = set()
        slots: list[int] = []
        moving: list[tuple[int, int]] = []  # places of beams whose parent's slot is taken, and that slot
        for place, beam in enumerate(self.search.beams):
            home = before[beam.parent]
            if home in staying:
                moving.append((place, home))
            staying.add(home)
            slots.append(home)
        free = [slot for slot in before if slot not in staying]
        copies: list[SlotCopy] = []
        for place, source in moving:
            shared = self._shared[source]
            target = slots[place] = max(free, key=shared.__getitem__)
            free.remove(target)
            copies.append(SlotCopy(first_slot + source, first_slot + target, shared[target], num_written))
            self._note_copy(source, target, num_written)
        self.slots = slots + free
        return copies

    def _note_copy(self, source: int, target: int, num_written: int) -> None:
        """Notes that the target has the source's content now, and shares with others what the source does."""
        shared = self._shared
        shared[target] = shared[source].copy()
        shared[target][source] = shared[source][target] = num_written
        for slot, row in enumerate(shared):
            if slot != target:
                row[target] = shared[target][slot]
