"""Scheduling of sequences to slots and of the next computation. It touches no tensors.

A sequence takes a block of neighbouring slots, one for each of its beams; `block_layout.py` decides where. Sequences of
a kind are neighbours, so a decode step is one contiguous batch for each kind. Continuations of prompts are all of one
kind and always have slots 0 to R-1. At most one prompt is being prefilled, in slot R, where it joins the batch once it
has been read. When a sequence retires, the last of its kind takes its slots, and the sequence in prefill moves to the
new slot R. With one kind these are the only copies.

Waiting sequences are admitted strictly in the order of their queue (`waiting.py`). A sequence that needs more slots
than are free blocks the sequences behind it. Fewer slots than it needs stay idle until it fits; letting others pass
could make it wait for ever.

Sources that have slots are encoded together, since each run of the encoder reads all its weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway_server.decoding.core.block_layout import BlockLayout, Group, Move
from headway_server.decoding.core.waiting import PriorityScope, WaitingQueue
from headway_server.decoding.interfaces import next_stop
from headway_server.decoding.sequence import Sequence, Stage


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt to prefill: its tokens from `start` to before `stop`."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """True if the prompt ends with it."""
        return self.stop == len(self.sequence.prompt_ids)


class Scheduler:
    """The waiting queue and the slots.

    Attributes:
        waiting: Sequences without a slot.
        layout: Where the running sequences are.
        prefilling: Sequence in prefill, in the slot after the running ones.
    """

    def __init__(self, *, num_slots: int, prefill_chunk: int, priority_scope: PriorityScope = "caller") -> None:
        """Starts with every slot free.

        Args:
            num_slots: Slots there are.
            prefill_chunk: Tokens of a prompt that are prefilled at once; see `next_stop`.
            priority_scope: Whose sequences one of higher priority passes.
        """
        self.num_slots = num_slots
        self.prefill_chunk = prefill_chunk
        self.waiting = WaitingQueue(priority_scope)
        self.layout = BlockLayout(num_slots)
        self.prefilling: Sequence | None = None

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.running)} running, {int(self.prefilling is not None)} prefilling, "
            f"{len(self.waiting)} waiting, {self.num_free} of {self.num_slots} slots free)"
        )

    @property
    def groups(self) -> list[Group]:
        """The running sequences that are decoded together, in the order of their slots."""
        return self.layout.groups

    @property
    def running(self) -> list[Sequence]:
        """The sequences that run, in the order of their slots."""
        return [sequence for group in self.groups for sequence in group.sequences]

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return self.num_slots - self.layout.num_used - (self.prefilling is not None)

    @property
    def has_work(self) -> bool:
        """True if there is any sequence."""
        return bool(self.groups or self.waiting or self.prefilling is not None)

    def overdue(self, now: float) -> list[Sequence]:
        """Returns all sequences that were cancelled or whose deadline is before `now`."""
        everyone = [*self.running, *self.waiting]
        if self.prefilling is not None:
            everyone.append(self.prefilling)
        return [sequence for sequence in everyone if sequence.cancelled or sequence.deadline < now]

    def admit(self, now: float) -> Sequence | None:
        """Gives the first waiting prompt a slot to be prefilled in, if one is free and nothing else is prefilled."""
        if self.prefilling is not None or not self.waiting or not self.num_free:
            return None
        sequence = self._leave_queue(now)
        sequence.stage = Stage.PREFILLING
        sequence.slot = self._end_of_running
        self.prefilling = sequence
        return sequence

    def admit_sources(self, now: float, max_padded_tokens: int) -> list[Sequence]:
        """Takes sequences from the queue whose sources are encoded together, up to the free slots.

        The caller encodes the sources and calls `join`.

        Args:
            now: The time.
            max_padded_tokens: Limit of their number times the largest cost; the first is taken whatever it costs.
        """
        admitted: list[Sequence] = []
        largest, num_free = 0, self.num_free
        while self.waiting and (first := self.waiting.first()).num_beams <= num_free:
            source = first.source
            assert source is not None, "the engine checks submitted sequences"
            largest = max(largest, source.cost)
            if admitted and (len(admitted) + 1) * largest > max_padded_tokens:
                break
            admitted.append(self._leave_queue(now))
            num_free -= admitted[-1].num_beams
        return admitted

    def _leave_queue(self, now: float) -> Sequence:
        sequence = self.waiting.pop()
        sequence.started_at = now
        return sequence

    def next_chunk(self) -> Chunk | None:
        """Returns the next chunk of the prompt in prefill; None without one."""
        if self.prefilling is None:
            return None
        start = self.prefilling.num_prefilled
        stop = next_stop(start, len(self.prefilling.prompt_ids), self.prefill_chunk, self.prefilling.media)
        return Chunk(self.prefilling, start, stop)

    def join(self, sequence: Sequence) -> list[Move]:
        """Assigns slots to a sequence, adjacent to those of its kind.

        Returns:
            The moves of others that make room for it, to be made in this order; none if all are of one kind.
        """
        if sequence is self.prefilling:
            self.prefilling = None
        moves = self.layout.place(sequence)
        sequence.stage = Stage.RUNNING
        return moves

    def retire(self, sequences: Iterable[Sequence]) -> list[Move]:
        """Takes sequences out, whatever their stage.

        Returns:
            Moves that keep slots of a kind adjacent, to be made in this order.
        """
        retired = list(sequences)
        if any(sequence.stage is Stage.WAITING for sequence in retired):
            self.waiting.remove(retired)
        if self.prefilling in retired:
            self.prefilling = None
        running = sorted((sequence for sequence in retired if sequence.stage is Stage.RUNNING), key=_slot, reverse=True)
        moves = [move for sequence in running if (move := self.layout.remove(sequence)) is not None]
        if self.prefilling is not None and running:
            source, self.prefilling.slot = self.prefilling.slot, self._end_of_running
            moves.append(Move(self.prefilling, source, self.prefilling.slot))
        for sequence in retired:
            sequence.stage = Stage.FINISHED
            sequence.slot = -1
        return moves

    def reset(self) -> list[Sequence]:
        """Frees every slot and returns the sequences that were in them."""
        evicted = [*self.layout.clear(), *([] if self.prefilling is None else [self.prefilling])]
        self.prefilling = None
        for sequence in evicted:
            sequence.stage = Stage.FINISHED
            sequence.slot = -1
        return evicted

    @property
    def _end_of_running(self) -> int:
        """The slot behind the running prompts, which are all of one kind."""
        return self.groups[-1].stop if self.groups else 0


def _slot(sequence: Sequence) -> int:
    return sequence.slot
