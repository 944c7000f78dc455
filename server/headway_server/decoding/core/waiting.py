"""The sequences that wait for a slot, and whose turn it is.

Callers take turns by start-time fair queueing (Goyal, Vin, Cheng 1996). Each has a virtual time, advanced by the work
of its sequences when they leave, and the caller with the least goes next. One that comes back begins at the time of
whoever left last. So a caller that brings a thousand sequences delays its own, and nobody else's by more than one.
Priorities order the sequences of one caller; where callers trust each other, those of all.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from headway_server.decoding.sequence import Sequence

PriorityScope = Literal["caller", "server"]

_MAX_CALLERS_AT_REST: Final = 256


class _Caller:
    """The sequences of one caller that wait, the next one first, and its virtual time."""

    __slots__ = ("sequences", "time")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.time = 0


class WaitingQueue:
    """Queue of sequences without a slot. For the engine's thread alone."""

    def __init__(self, priority_scope: PriorityScope = "caller") -> None:
        """Starts empty; `priority_scope` says whose sequences a higher priority passes."""
        self._is_global = priority_scope == "server"
        self._callers: dict[str, _Caller] = {}
        self._num_waiting = 0
        self._num_added = 0
        self._time = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Yields the waiting sequences, caller by caller."""
        for caller in self._callers.values():
            yield from caller.sequences

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences before their caller's sequences of lower priority, and behind its others."""
        for sequence in sequences:
            sequence.queue_position = (-sequence.priority, self._num_added)
            self._num_added += 1
            caller = self._callers.setdefault(sequence.caller, _Caller())
            if not caller.sequences:
                caller.time = max(caller.time, self._time)
            insort(caller.sequences, sequence, key=_queue_position)
            self._num_waiting += 1

    def first(self) -> Sequence:
        """Returns the sequence whose turn it is; there must be one."""
        return self._next().sequences[0]

    def pop(self) -> Sequence:
        """Takes out the sequence whose turn it is; there must be one."""
        caller = self._next()
        sequence = caller.sequences.pop(0)
        self._num_waiting -= 1
        self._time = caller.time
        caller.time += sequence.num_beams * sequence.parameters.max_new_tokens
        if not self._num_waiting or len(self._callers) > _MAX_CALLERS_AT_REST + self._num_waiting:
            self._forget()
        return sequence

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Takes out sequences that wait."""
        gone = {id(sequence) for sequence in sequences}
        for caller in self._callers.values():
            left = [sequence for sequence in caller.sequences if id(sequence) not in gone]
            self._num_waiting -= len(caller.sequences) - len(left)
            caller.sequences = left

    def clear(self) -> None:
        """Takes out everything."""
        self._callers.clear()
        self._num_waiting = 0

    def _next(self) -> _Caller:
        return min((caller for caller in self._callers.values() if caller.sequences), key=self._turn)

    def _turn(self, caller: _Caller) -> tuple[int, int, int]:
        priority, number = caller.sequences[0].queue_position
        return priority if self._is_global else 0, caller.time, number

    def _forget(self) -> None:
        """Drops callers at rest that would begin at the present time anyway; all of them where nothing waits."""
        self._callers = {
            name: caller
            for name, caller in self._callers.items()
            if caller.sequences or (self._num_waiting and caller.time > self._time)
        }

    def __repr__(self) -> str:
        return f"WaitingQueue({self._num_waiting} of {len(self._callers)} callers)"


def _queue_position(sequence: Sequence) -> tuple[int, int]:
    return sequence.queue_position
