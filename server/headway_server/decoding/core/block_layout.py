"""Assignment of slots to sequences. It touches no tensors.

A sequence owns a block of neighbouring slots, one for each of its beams, or a single slot without a search. Blocks of a
kind (the same number of beams, with a search or without) are neighbours and form a group, so that one call decodes all
of them. Groups may have free slots between them, which keeps moves rare. A block that leaves is replaced by the last of
its group. The next of its kind takes the free slots behind the group, or before it. A new group begins at the far end
of the widest gap, so that it and its neighbour grow towards each other. If a group has no room beside it although there
are slots enough, the free space is gathered into one gap behind it.

With one kind, running blocks are a prefix of the slots, and the only move is that of the last block into a hole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from headway_server.decoding.sequence import Sequence


class Kind(NamedTuple):
    """Common properties of all sequences of one decode call."""

    width: int
    """Slots of each."""
    has_search: bool


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence changes its slots."""

    sequence: Sequence
    source: int
    """First of its slots so far."""
    target: int
    """First of its slots from now on."""

    def slots(self) -> Iterator[tuple[int, int]]:
        """Yields (from, to) for each slot, in an order that overwrites no slot before it has moved."""
        offsets = range(self.sequence.num_beams)
        for offset in offsets if self.target < self.source else reversed(offsets):
            yield self.source + offset, self.target + offset


@dataclass(slots=True)
class Group:
    """Neighbouring blocks of a kind."""

    kind: Kind
    start: int
    """First slot."""
    sequences: list[Sequence] = field(default_factory=list)
    """In the order of their slots."""
    has_changed: bool = True
    """True if a block has a new sequence; the engine sets it to False."""

    @property
    def stop(self) -> int:
        """The slot behind the last one."""
        return self.start + self.kind.width * len(self.sequences)


class BlockLayout:
    """Places blocks.

    Attributes:
        groups: In the order of their slots.
    """

    def __init__(self, num_slots: int) -> None:
        """Starts with every slot free."""
        self.num_slots = num_slots
        self.groups: list[Group] = []

    def __repr__(self) -> str:
        groups = ", ".join(f"{len(g.sequences)} x {g.kind.width} at {g.start}" for g in self.groups)
        return f"BlockLayout({self.num_slots} slots: {groups or 'all free'})"

    @property
    def num_used(self) -> int:
        """Slots that belong to a sequence."""
        return sum(group.stop - group.start for group in self.groups)

    def place(self, sequence: Sequence) -> list[Move]:
        """Gives a sequence its slots; enough of them must be free.

        Returns:
            The moves that make room for it, to be made in this order.
        """
        kind = Kind(sequence.num_beams, sequence.search is not None)
        assert self.num_used + kind.width <= self.num_slots, "admission counts the slots"
        number = next((i for i, group in enumerate(self.groups) if group.kind == kind), None)
        if number is None:
            moves, group = self._open(kind)
        else:
            moves, group = [], self.groups[number]
            if self._room_before(number + 1) < kind.width:
                if self._room_before(number) >= kind.width:
                    group.start -= kind.width
                    group.sequences.insert(0, sequence)
                    return self._settle(group, sequence, group.start, moves)
                moves = self._gather_behind(number)
        group.sequences.append(sequence)
        return self._settle(group, sequence, group.stop - kind.width, moves)

    def remove(self, sequence: Sequence) -> Move | None:
        """Frees a sequence's slots; the last block of its group moves there. Of several, the highest goes first."""
        kind = Kind(sequence.num_beams, sequence.search is not None)
        group = next(group for group in self.groups if group.kind == kind)
        group.has_changed = True
        last = group.sequences.pop()
        if not group.sequences:
            self.groups.remove(group)
        if last is sequence:
            return None
        group.sequences[(sequence.slot - group.start) // kind.width] = last
        return _move(last, sequence.slot)

    def clear(self) -> list[Sequence]:
        """Frees every slot and returns whose they were."""
        sequences = [sequence for group in self.groups for sequence in group.sequences]
        self.groups = []
        return sequences

    def _settle(self, group: Group, sequence: Sequence, slot: int, moves: list[Move]) -> list[Move]:
        group.has_changed = True
        sequence.slot = slot
        return moves

    def _room_before(self, number: int) -> int:
        """Returns the number of free slots before a group, or behind the last one."""
        start = self.groups[number - 1].stop if number else 0
        stop = self.groups[number].start if number < len(self.groups) else self.num_slots
        return stop - start

    def _open(self, kind: Kind) -> tuple[list[Move], Group]:
        """Begins a group at the far end of the widest gap, the very first one at slot 0."""
        if not self.groups:
            self.groups = [Group(kind, 0)]
            return [], self.groups[0]
        moves: list[Move] = []
        number = max(range(len(self.groups) + 1), key=self._room_before)
        if self._room_before(number) < kind.width:
            number = len(self.groups)
            moves = self._gather_behind(number - 1)
        stop = self.groups[number].start if number < len(self.groups) else self.num_slots
        group = Group(kind, stop - kind.width)
        self.groups.insert(number, group)
        return moves, group

    def _gather_behind(self, number: int) -> list[Move]:
        """Gathers all free slots into one gap behind a group."""
        moves: list[Move] = []
        start = 0
        for group in self.groups[: number + 1]:
            moves += _shift(group, start)
            start = group.stop
        stop = self.num_slots
        for group in reversed(self.groups[number + 1 :]):
            moves += _shift(group, stop - (group.stop - group.start))
            stop = group.start
        return moves


def _shift(group: Group, start: int) -> list[Move]:
    """Moves a group through free slots to begin at `start`, with as few moves of blocks as possible."""
    distance, group.start = start - group.start, start
    if distance == 0:
        return []
    group.has_changed = True
    count, rest = divmod(abs(distance), group.kind.width)
    sequences = group.sequences
    if rest or count >= len(sequences):  # every block moves, from the front
        pairs = list(enumerate(sequences))
        order = pairs if distance < 0 else pairs[::-1]
    elif distance < 0:  # the last blocks come to the front
        group.sequences = sequences[-count:] + sequences[:-count]
        order = list(enumerate(group.sequences[:count]))
    else:  # the first blocks come to the end
        group.sequences = sequences[count:] + sequences[:count]
        order = list(enumerate(group.sequences))[-count:]
    return [_move(sequence, start + index * group.kind.width) for index, sequence in order]


def _move(sequence: Sequence, target: int) -> Move:
    source, sequence.slot = sequence.slot, target
    return Move(sequence, source, target)
