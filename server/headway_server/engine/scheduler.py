"""Who runs, in which slot, and what is computed next. Pure bookkeeping: it never touches a tensor.

The running sequences are always the slots 0 to R-1, so that a decode step is one contiguous batch. The sequence that is
being prefilled, at most one, sits in slot R, where it joins the batch when its prompt is read. When a sequence retires,
the last running one takes its slot, and the prefilling one follows to the new slot R: these are the only copies.

A sequence takes one slot now. With beams a sentence will own a block of K neighbouring rows; the scheduler then counts
blocks as it counts slots, and only the engine turns a block into rows.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from headway_server.engine.sequence import Sequence, Stage


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence changes its slot."""

    sequence: Sequence
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt, to be prefilled: its tokens from `start` to before `stop`."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is read with it."""
        return self.stop == len(self.sequence.input_ids)


class Scheduler:
    """The waiting queue and the slots.

    Attributes:
        waiting: Sequences without a slot, in the order of admission: by falling priority, then as they came.
        running: The sequences that decode; the index is the slot.
        prefilling: The sequence whose prompt is being read, in slot `len(running)`.
    """

    def __init__(self, *, num_slots: int, prefill_chunk: int) -> None:
        """Starts with every slot free.

        Args:
            num_slots: Slots there are.
            prefill_chunk: Tokens of a prompt that are prefilled at once; chunks begin at its multiples.
        """
        self.num_slots = num_slots
        self.prefill_chunk = prefill_chunk
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.prefilling: Sequence | None = None
        self._num_added = 0

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.running)} running, {int(self.prefilling is not None)} prefilling, "
            f"{len(self.waiting)} waiting, {self.num_free} of {self.num_slots} slots free)"
        )

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return self.num_slots - len(self.running) - (self.prefilling is not None)

    @property
    def has_work(self) -> bool:
        """Whether there is any sequence."""
        return bool(self.running or self.waiting or self.prefilling is not None)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences: before those of lower priority, after all others."""
        for sequence in sequences:
            sequence.place_in_queue = (-sequence.priority, self._num_added)
            self._num_added += 1
            insort(self.waiting, sequence, key=_place_in_queue)

    def overdue(self, now: float) -> list[Sequence]:
        """Returns the sequences, wherever they are, that were cancelled or whose deadline is before `now`."""
        everyone = [*self.running, *self.waiting]
        if self.prefilling is not None:
            everyone.append(self.prefilling)
        return [sequence for sequence in everyone if sequence.cancelled or sequence.deadline < now]

    def admit(self, now: float) -> Sequence | None:
        """Gives the first waiting sequence the slot to prefill in, if it is free and nothing prefills already."""
        if self.prefilling is not None or not self.waiting or not self.num_free:
            return None
        sequence = self._leave_queue(now)
        sequence.stage = Stage.PREFILLING
        sequence.slot = len(self.running)
        self.prefilling = sequence
        return sequence

    def admit_sources(self, now: float, max_padded_tokens: int) -> list[Sequence]:
        """Takes waiting sentences that are to be encoded together out of the queue, as many as have a slot.

        The caller encodes them and lets them `join`.

        Args:
            now: The time.
            max_padded_tokens: Limit of count times longest; the first sentence is taken whatever its length.
        """
        admitted: list[Sequence] = []
        longest = 0
        while self.waiting and len(admitted) < self.num_free:
            longest = max(longest, len(self.waiting[0].input_ids))
            if admitted and (len(admitted) + 1) * longest > max_padded_tokens:
                break
            admitted.append(self._leave_queue(now))
        return admitted

    def _leave_queue(self, now: float) -> Sequence:
        sequence = self.waiting.pop(0)
        sequence.started_at = now
        return sequence

    def next_chunk(self) -> Chunk | None:
        """Returns the next part of the prompt that is being prefilled."""
        if self.prefilling is None:
            return None
        start = self.prefilling.num_prefilled
        stop = min(start + self.prefill_chunk, len(self.prefilling.input_ids))
        return Chunk(self.prefilling, start, stop)

    def join(self, sequence: Sequence) -> None:
        """Lets a sequence run, in the first slot after the running ones."""
        if sequence is self.prefilling:
            self.prefilling = None
        assert self.num_free, "admission counts the slots"
        sequence.stage = Stage.RUNNING
        sequence.slot = len(self.running)
        self.running.append(sequence)

    def retire(self, sequences: Iterable[Sequence]) -> list[Move]:
        """Takes sequences out, wherever they are.

        Returns:
            The moves that keep the running ones a prefix of the slots, to be made in this order.
        """
        retired = list(sequences)
        if any(sequence.stage is Stage.WAITING for sequence in retired):
            gone = {id(sequence) for sequence in retired}
            self.waiting = [sequence for sequence in self.waiting if id(sequence) not in gone]
        if self.prefilling in retired:
            self.prefilling = None
        slots = sorted((sequence.slot for sequence in retired if sequence.stage is Stage.RUNNING), reverse=True)
        moves = [move for slot in slots if (move := self._vacate(slot)) is not None]
        if self.prefilling is not None and slots:
            moves.append(self._move(self.prefilling, len(self.running)))
        for sequence in retired:
            sequence.stage = Stage.FINISHED
            sequence.slot = -1
        return moves

    def _vacate(self, slot: int) -> Move | None:
        """Fills a running slot with the last running sequence. Called for the highest slot first."""
        last = self.running.pop()
        if slot == len(self.running):
            return None
        self.running[slot] = last
        return self._move(last, slot)

    def _move(self, sequence: Sequence, target: int) -> Move:
        source, sequence.slot = sequence.slot, target
        return Move(sequence, source, target)

    def reset(self) -> list[Sequence]:
        """Frees every slot and returns the sequences that were in them."""
        evicted = [*self.running, *([] if self.prefilling is None else [self.prefilling])]
        self.running = []
        self.prefilling = None
        for sequence in evicted:
            sequence.stage = Stage.FINISHED
            sequence.slot = -1
        return evicted


def _place_in_queue(sequence: Sequence) -> tuple[int, int]:
    return sequence.place_in_queue
