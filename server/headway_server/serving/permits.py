"""How much is taken on at once: a permit is asked for before any work is done for a call.

A queue is bounded by a count, by bytes, and by time: where the model's pace is known, a call is refused at once that
could not be answered before its deadline. So a model that is asked for more than it can do spends its time on answers
that are in time, and those it has no time for can ask elsewhere. What a refused caller is told to wait is the time that
the queue takes.
"""

from __future__ import annotations

import math
import time
from typing import Protocol, Self

from headway_server.errors import OverloadedError
from headway_server.serving.counts import Row

_SMOOTHING = 0.1
_LEAST_MARGIN = 1.15
_MOST_MARGIN = 2.0
_MORE_MARGIN = 0.02
_LESS_MARGIN = 0.0002
"""An estimate is multiplied by a margin, since a call that is late has cost more than one refused at once. The margin
grows with each admitted call that is late, and falls with each that is not: so about one in a hundred is late."""
_LATE = 0.1
"""A call that ends with less than this share of its time left has run out of it."""
_NEW_WINDOW = 0.0, math.inf, 0.0, False
"""Of a measured pace: work that was done, the least that was left, seconds, and whether there was silence in them."""
_SHORTEST_RETRY_S = 0.05
_LONGEST_RETRY_S = 30.0


class Pace(Protocol):
    """How fast a model works."""

    def queue_s(self, ahead: float, work: float) -> float | None:
        """Returns the seconds until an input of `work` begins that has `ahead` before it, running or waiting.

        None while it is not known.
        """

    def service_s(self, work: float) -> float:
        """Returns the seconds that an input of `work` takes from then on."""


class MeasuredPace:
    """The pace of a model that answers inputs one after another, from what it has answered.

    While there is always work, it is what the model answers. What it answers in a while with little to do says nothing
    of what it can do: then it is the best of late. Silence between two pieces of work counts for nothing, and work with
    silence in it says what the model can do at least: so estimates that are too low do not last.
    """

    _WINDOW_S = 0.5
    _DECAY = 0.98
    _SMOOTHING = 0.4
    _BUSY_S = 0.1
    """A model that had work for so long, at each moment of a window, was busy in it."""

    def __init__(self) -> None:
        self._rate = 0.0  # work a second
        self._counted_until = time.monotonic()
        self._done, self._least_left, self._elapsed_s, self._has_silence = _NEW_WINDOW

    def note(self, work: float, *, left: float) -> None:
        """Counts work that was done; `left` is what is still to be done."""
        now = time.monotonic()
        self._elapsed_s += now - self._counted_until
        self._counted_until = now
        self._done += work
        self._least_left = min(self._least_left, left)
        if self._elapsed_s < self._WINDOW_S:
            self._has_silence = self._has_silence or not left
            return
        rate = self._done / self._elapsed_s
        if self._has_silence:
            self._rate = max(self._rate, rate) if self._rate else 0.0
        elif self._rate and self._least_left >= self._BUSY_S * rate:
            self._rate += self._SMOOTHING * (rate - self._rate)
        else:
            self._rate = max(self._rate * self._DECAY, rate)
        self._done, self._least_left, self._elapsed_s, self._has_silence = _NEW_WINDOW

    def begin(self) -> None:
        """Notes that there is work again."""
        self._counted_until = time.monotonic()

    def queue_s(self, ahead: float, work: float) -> float | None:  # noqa: ARG002 (one after another, whatever it is)
        """See `Pace`."""
        return ahead / self._rate if self._rate else None

    def service_s(self, work: float) -> float:
        """See `Pace`."""
        return work / self._rate if self._rate else 0.0


class Permit:
    """What a call holds of an admission; its inputs give their parts back one by one, or all at the end.

    A context manager, which releases what is left. All of it runs for every call, so no generator stands behind it.
    """

    __slots__ = ("_admission", "_began", "_bytes", "_caller", "_count", "_deadline", "_work")

    def __init__(
        self,
        admission: Admission,
        count: int,
        num_bytes: int,
        work: float,
        *,
        caller: str,
        deadline: float | None,
    ) -> None:
        self._admission = admission
        self._count = count
        self._bytes = num_bytes
        self._work = work
        self._caller = caller
        self._deadline = deadline
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.release(is_done=error is None)
        if error is None:
            self._admission.note_in_time()
        elif self._is_late(error):
            self._admission.note_late()

    def _is_late(self, error: BaseException) -> bool:
        """True if the estimate that let the call in has promised too much.

        The caller has stopped waiting or is about to: its own clock began before the server's. Or the model has given
        it up. A call that was refused for lack of something else says nothing of the time.
        """
        deadline = self._deadline
        if deadline is None:
            return False
        if isinstance(error, OverloadedError):
            return error.is_late
        return time.monotonic() >= deadline - _LATE * (deadline - self._began)

    def resize(self, count: int, num_bytes: int) -> None:
        """Holds `count` inputs of `num_bytes` together from now on; only for an admission without a pace.

        Raises:
            OverloadedError: It is more than was held, and others leave no room for it. What was held is still held.
        """
        self._admission.exchange(self._count, self._bytes, count, num_bytes)
        self._count, self._bytes = count, num_bytes

    def release(self, count: int | None = None, *, is_done: bool = True) -> None:
        """Gives back the part of `count` inputs, or all that is left; `is_done` is False where it was not answered."""
        if not self._count:
            return
        count = self._count if count is None else min(count, self._count)
        part = count / self._count
        num_bytes, work = (self._bytes, self._work) if part == 1 else (round(self._bytes * part), self._work * part)
        self._count -= count
        self._bytes -= num_bytes
        self._work -= work
        held_s = time.monotonic() - self._began
        self._admission.take_back(count, num_bytes, work, self._caller, held_s, is_done=is_done)


class Admission:
    """Counts what is admitted and not yet answered, and its bytes. Belongs to the event loop."""

    def __init__(
        self,
        *,
        limit: int | None,
        noun: str,
        owner: str,
        max_bytes: int | None = None,
        pace: Pace | None = None,
        counted: Row | None = None,
    ) -> None:
        """Starts with nothing admitted.

        Args:
            limit: How many may be admitted at once; None: any number.
            noun: What is counted, for messages, such as "texts".
            owner: Who takes it on, for messages, such as the name of a model.
            max_bytes: How many bytes they may have together; None: any number.
            pace: Says how long they wait; None: nobody knows.
            counted: Where all workers of the server count what they have admitted; None: there is one.
        """
        self._counted = counted
        self._limit = limit
        self._max_bytes = max_bytes
        self._noun = noun
        self._owner = owner
        self._pace = pace
        self._num_admitted = 0
        self._num_bytes = 0
        self._work = 0.0  # in the pace's unit
        self._work_of: dict[str, float] = {}  # by caller
        self._mean_held_s = _SHORTEST_RETRY_S
        self._margin = _LEAST_MARGIN

    @property
    def num_admitted(self) -> int:
        """How many are admitted and not yet answered."""
        return self._num_admitted

    def admit(
        self,
        count: int,
        num_bytes: int = 0,
        *,
        work: float | None = None,
        deadline: float | None = None,
        caller: str = "",
    ) -> Permit:
        """Gives a permit for `count` inputs of `num_bytes` together.

        Inputs of more bytes than the limit are admitted when nothing else is.

        Args:
            count: How many.
            num_bytes: Of all of them.
            work: Of all of them, in the pace's unit; None: as much as their number.
            deadline: When the caller stops waiting, by `time.monotonic`.
            caller: Who brings them. Callers take turns, so each waits for its own share of the queue.

        Raises:
            OverloadedError: There is no room, or no time; it says when to come back.
        """
        work = float(count) if work is None else work
        is_estimated = self._check(count, num_bytes, work, deadline, caller)
        if self._pace is not None:
            if not self._num_admitted and isinstance(self._pace, MeasuredPace):
                self._pace.begin()
            self._work += work
            self._work_of[caller] = self._work_of.get(caller, 0.0) + work
        self._count(count, num_bytes)
        promised = deadline if is_estimated else None
        return Permit(self, count, num_bytes, work, caller=caller, deadline=promised)

    def exchange(self, held_count: int, held_bytes: int, count: int, num_bytes: int) -> None:
        """Takes back what a permit holds and gives it `count` inputs of `num_bytes`; called by the permit.

        Raises:
            OverloadedError: It is more, and others leave no room for it.
        """
        assert self._pace is None, "inputs that wait are not exchanged for others"
        self._count(-held_count, -held_bytes)
        try:
            if count > held_count or num_bytes > held_bytes:
                self._check(count, num_bytes, 0.0, None, "")
        except OverloadedError:
            self._count(held_count, held_bytes)
            raise
        self._count(count, num_bytes)

    def note_in_time(self) -> None:
        """Notes that what was admitted was answered; called by the permit."""
        self._margin = max(self._margin - _LESS_MARGIN, _LEAST_MARGIN)

    def note_late(self) -> None:
        """Notes that what was admitted could not be answered in time; called by the permit."""
        self._margin = min(self._margin + _MORE_MARGIN, _MOST_MARGIN)

    def take_back(self, count: int, num_bytes: int, work: float, caller: str, held_s: float, *, is_done: bool) -> None:
        """Takes back a part of a permit that was held for `held_s` seconds; called by the permit.

        Work that was given up says nothing of the pace: a model that is late would seem to be quick.
        """
        self._count(-count, -num_bytes)
        self._mean_held_s += _SMOOTHING * (held_s - self._mean_held_s)
        if self._pace is not None:
            self._work = self._work - work if self._num_admitted else 0.0
            left = self._work_of[caller] - work
            if left > 1e-6:
                self._work_of[caller] = left
            else:
                del self._work_of[caller]
            if isinstance(self._pace, MeasuredPace):
                self._pace.note(work if is_done else 0.0, left=self._work)

    def _count(self, count: int, num_bytes: int) -> None:
        self._num_admitted += count
        self._num_bytes += num_bytes
        if self._counted is not None:
            self._counted.tell(self._num_admitted, self._num_bytes)

    def _check(self, count: int, num_bytes: int, work: float, deadline: float | None, caller: str) -> bool:
        """Returns True if an estimate lets them in; False if there was nothing to estimate."""
        admitted, held = self._num_admitted, self._num_bytes
        if self._counted is not None:
            admitted, held = self._counted.num_running, self._counted.num_bytes
        if self._limit is not None and admitted + count > self._limit:
            raise self._full(f"{admitted} {self._noun} waiting", self._limit, count)
        if self._max_bytes is not None and admitted and held + num_bytes > self._max_bytes:
            waiting = f"{held} bytes of {self._noun} waiting"
            raise self._full(waiting, self._max_bytes, num_bytes)
        if self._pace is None or deadline is None or not self._num_admitted:
            return False
        each = work / count if count else 0.0
        wait_s = self._pace.queue_s(self._ahead(work, caller) - each, each)
        if not wait_s:
            return False
        takes_s, left_s = self._margin * (wait_s + self._pace.service_s(each)), deadline - time.monotonic()
        if takes_s > left_s:
            raise _overload(
                f"{self._owner} would answer in {takes_s:.2f} s, and the call has {max(left_s, 0.0):.2f} s left",
                takes_s - left_s,
            )
        return True

    def _ahead(self, work: float, caller: str) -> float:
        """Returns the work up to the end of a caller's: all of its own, and as much of each other one's."""
        own = self._work_of.get(caller, 0.0) + work
        return own + sum(min(other, own) for name, other in self._work_of.items() if name != caller)

    def _full(self, waiting: str, limit: int, brought: int) -> OverloadedError:
        # Without a pace: after the mean time that a permit is held, most of what waits now has been answered.
        wait_s = None if self._pace is None else self._pace.queue_s(self._work, 0.0)
        return _overload(
            f"{self._owner} has {waiting}, the limit is {limit} and this call brings {brought}",
            wait_s or self._mean_held_s,
        )

    def __repr__(self) -> str:
        limit = "any number" if self._limit is None else self._limit
        return f"Admission({self._num_admitted} of {limit} {self._noun}, {self._num_bytes} bytes)"


def _overload(reason: str, wait_s: float) -> OverloadedError:
    retry_after_s = min(max(wait_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
    return OverloadedError(f"{reason}; try again in {retry_after_s:.2f} s", retry_after_s)
