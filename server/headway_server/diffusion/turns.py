"""Which images take part in a step: start-time fair queueing, step by step (Goyal, Vin, Cheng 1996).

Every step has a maximum number of rows. Callers take turns by the rows that they have used, and so do the calls of one
caller; the images of a call go in order. One that gets all it asks for gathers no debt: it is set to the least time of
those that were left out. So a long call delays a short one by no more than its share, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar


class Rows(Protocol):
    """A member of a step, with a number of rows."""

    @property
    def num_rows(self) -> int:
        """How many it takes, 1 or more."""


RowsType = TypeVar("RowsType", bound=Rows)


class _Call(Generic[RowsType]):
    """Members of one call, in order, and the rows it has used."""

    def __init__(self, members: Sequence[RowsType]) -> None:
        self.members = list(members)
        self.time = 0
        self.num_taken = 0  # in the step that is being put together


class _Caller(Generic[RowsType]):
    """The calls of one caller, in order, and the rows that they have had."""

    def __init__(self) -> None:
        self.calls: list[_Call[RowsType]] = []
        self.time = 0


class Turns(Generic[RowsType]):
    """All that takes part or waits. For one thread."""

    def __init__(self) -> None:
        self._callers: dict[str, _Caller[RowsType]] = {}
        self._num_members = 0

    def __len__(self) -> int:
        return self._num_members

    def __repr__(self) -> str:
        return f"Turns({self._num_members} of {len(self._callers)} callers)"

    def add(self, members: Sequence[RowsType], caller: str) -> None:
        """Adds the members of a call."""
        self._callers.setdefault(caller, _Caller()).calls.append(_Call(members))
        self._num_members += len(members)

    def members(self) -> list[RowsType]:
        """Returns everything, caller by caller."""
        return [one for caller in self._callers.values() for call in caller.calls for one in call.members]

    def remove(self, members: Iterable[RowsType]) -> None:
        """Removes finished and cancelled members."""
        gone = {id(one) for one in members}
        if not gone:
            return
        for name, caller in list(self._callers.items()):
            for call in caller.calls:
                call.members = [one for one in call.members if id(one) not in gone]
            caller.calls = [call for call in caller.calls if call.members]
            if not caller.calls:
                del self._callers[name]
        self._num_members = sum(len(call.members) for caller in self._callers.values() for call in caller.calls)

    def take(self, max_rows: int) -> list[RowsType]:
        """Chooses the members of a step of at most `max_rows`; each member fits alone."""
        chosen: list[RowsType] = []
        room = max_rows
        for caller in self._callers.values():
            for call in caller.calls:
                call.num_taken = 0
        while waiting := [caller for caller in self._callers.values() if any(map(_is_left, caller.calls))]:
            caller = min(waiting, key=_time)
            call = min(filter(_is_left, caller.calls), key=_time)
            member = call.members[call.num_taken]
            if member.num_rows > room:
                break
            chosen.append(member)
            room -= member.num_rows
            call.num_taken += 1
            call.time += member.num_rows
            caller.time += member.num_rows
        _settle(self._callers.values(), waiting)
        for caller in self._callers.values():
            _settle(caller.calls, [call for call in caller.calls if _is_left(call)])
        return chosen


class _Timed(Protocol):
    time: int


def _time(flow: _Timed) -> int:
    return flow.time


def _is_left(call: _Call[RowsType]) -> bool:
    return call.num_taken < len(call.members)


def _settle(flows: Iterable[_Timed], left: Sequence[_Timed]) -> None:
    """Subtracts the least time of the members left out, at which new callers start; the others catch up."""
    least = min(map(_time, left), default=None)
    for flow in flows:
        flow.time = 0 if least is None else max(flow.time - least, 0)
