"""Admission: each call needs a permit before any work is done for it.

A queue is bounded by count, by bytes, and by time: with a known pace of the model, a call that would miss its deadline
is refused at once. So an overloaded model spends its time on answers that are in time, and refused callers can try
elsewhere. Their retry delay is the time of the queue.
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
"""Steps of the safety margin of estimates, since a late call costs more than a refused one. The margin grows with each
late call and falls with each timely one, so that about one in a hundred is late."""
_LATE = 0.1
"""A call that ends with less than this share of its time left counts as late."""
_NEW_WINDOW = 0.0, math.inf, 0.0, False
"""A window of a measured pace: work done, the least work left, seconds, and whether it was idle in between."""
_SHORTEST_RETRY_S = 0.05
_LONGEST_RETRY_S = 30.0


class Pace(Protocol):
    """The pace of a model."""

    def queue_s(self, ahead: float, work: float) -> float | None:
        """Returns the seconds until an input of `work` starts, behind running and waiting work of `ahead`.

        None while the pace is unknown.
        """

    def service_s(self, work: float) -> float:
        """Returns the seconds of an input of `work` from its start."""


class MeasuredPace:
    """The pace of a model that answers inputs one after another, measured by its answers.

    In a busy window, the pace is the rate of answers. In a window with little work, the rate says nothing of the
    capacity, so the best recent pace is kept. Idle time between two pieces of work is not counted. A window with idle
    time gives a lower bound, so low estimates do not last.
    """

    _WINDOW_S = 0.5
    _DECAY = 0.98
    _SMOOTHING = 0.4
    _BUSY_S = 0.1
    """Seconds without an empty queue after which a window is busy."""

    def __init__(self) -> None:
        self._rate = 0.0  # work a second
        self._counted_until = time.monotonic()
        self._done, self._least_left, self._elapsed_s, self._has_silence = _NEW_WINDOW

    def note(self, work: float, *, left: float) -> None:
        """Counts finished work; `left` is the work still queued."""
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
        """Marks the end of idle time."""
        self._counted_until = time.monotonic()

    def queue_s(self, ahead: float, work: float) -> float | None:  # noqa: ARG002 (one after another, whatever it is)
        """See `Pace`."""
        return ahead / self._rate if self._rate else None

    def service_s(self, work: float) -> float:
        """See `Pace`."""
        return work / self._rate if self._rate else 0.0


class Permit:
    """A call's share of an admission; its inputs release their parts one by one, or all at the end.

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
        """True if the estimate at admission was too optimistic.

        The caller has stopped waiting or is about to, since its clock began before the server's; or the model dropped
        the call. A call refused for another reason does not count.
        """
        deadline = self._deadline
        if deadline is None:
            return False
        if isinstance(error, OverloadedError):
            return error.is_late
        return time.monotonic() >= deadline - _LATE * (deadline - self._began)

    def resize(self, count: int, num_bytes: int) -> None:
        """Changes the permit to `count` inputs of `num_bytes` in all; only for an admission without a pace.

        Raises:
            OverloadedError: It is more than before and there is no room. The permit is unchanged.
        """
        self._admission.exchange(self._count, self._bytes, count, num_bytes)
        self._count, self._bytes = count, num_bytes

    def release(self, count: int | None = None, *, is_done: bool = True) -> None:
        """Releases the part of `count` inputs, or the rest; `is_done` is False for unanswered inputs."""
        if not self._count:
            return
        count = self._count if count is None else min(count, self._count)
        part = count / self._count
        num_bytes, work = (self._bytes, self._work) if part == 1 else (round(self._bytes * part), self._work * part)
        self._count -= count
        self._bytes -= num_bytes
        self._work -= work
        duration_s = time.monotonic() - self._began
        self._admission.take_back(count, num_bytes, work, self._caller, duration_s, is_done=is_done)


class Admission:
    """Counts admitted inputs and their bytes. For the event loop's thread only."""

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
            limit: Limit of admitted inputs; None: no limit.
            noun: Name of the inputs for messages, such as "texts".
            owner: Name of the model or server for messages.
            max_bytes: Limit of their bytes; None: no limit.
            pace: Estimates waits; None: no estimates.
            counted: Counts shared by the workers; None: a single process.
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
        self._mean_duration_s = _SHORTEST_RETRY_S
        self._margin = _LEAST_MARGIN

    @property
    def num_admitted(self) -> int:
        """Admitted inputs that are not yet answered."""
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
        """Returns a permit for `count` inputs of `num_bytes` in all.

        Inputs larger than the limit are admitted alone.

        Args:
            count: Number of inputs.
            num_bytes: Their bytes.
            work: Their work in the pace's unit; None: `count`.
            deadline: Deadline of the caller, by `time.monotonic`.
            caller: The caller. Callers take turns, so each waits for its own share of the queue.

        Raises:
            OverloadedError: There is no room, or not enough time; the error has the time to retry.
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

    def exchange(self, old_count: int, old_bytes: int, count: int, num_bytes: int) -> None:
        """Changes a permit to `count` inputs of `num_bytes`; called by the permit.

        Raises:
            OverloadedError: It is more than before and there is no room.
        """
        assert self._pace is None, "inputs that wait are not exchanged for others"
        self._count(-old_count, -old_bytes)
        try:
            if count > old_count or num_bytes > old_bytes:
                self._check(count, num_bytes, 0.0, None, "")
        except OverloadedError:
            self._count(old_count, old_bytes)
            raise
        self._count(count, num_bytes)

    def note_in_time(self) -> None:
        """Counts a timely call; called by the permit."""
        self._margin = max(self._margin - _LESS_MARGIN, _LEAST_MARGIN)

    def note_late(self) -> None:
        """Counts a late call; called by the permit."""
        self._margin = min(self._margin + _MORE_MARGIN, _MOST_MARGIN)

    def take_back(
        self, count: int, num_bytes: int, work: float, caller: str, duration_s: float, *, is_done: bool
    ) -> None:
        """Releases a part of a permit after `duration_s` seconds; called by the permit.

        Cancelled work does not count for the pace: a late model would seem fast.
        """
        self._count(-count, -num_bytes)
        self._mean_duration_s += _SMOOTHING * (duration_s - self._mean_duration_s)
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
            self._counted.set_counts(self._num_admitted, self._num_bytes)

    def _check(self, count: int, num_bytes: int, work: float, deadline: float | None, caller: str) -> bool:
        """Returns True if they were admitted by an estimate; False without one."""
        admitted, used = self._num_admitted, self._num_bytes
        if self._counted is not None:
            admitted, used = self._counted.num_running, self._counted.num_bytes
        if self._limit is not None and admitted + count > self._limit:
            raise self._full(f"{admitted} {self._noun} waiting", self._limit, count)
        if self._max_bytes is not None and admitted and used + num_bytes > self._max_bytes:
            waiting = f"{used} bytes of {self._noun} waiting"
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
        """Returns the work ahead of a caller: all of its own, and at most as much of each other caller's."""
        own = self._work_of.get(caller, 0.0) + work
        return own + sum(min(other, own) for name, other in self._work_of.items() if name != caller)

    def _full(self, waiting: str, limit: int, brought: int) -> OverloadedError:
        # Without a pace: after the mean lifetime of a permit, most of the waiting calls are answered.
        wait_s = None if self._pace is None else self._pace.queue_s(self._work, 0.0)
        return _overload(
            f"{self._owner} has {waiting}, the limit is {limit} and this call brings {brought}",
            wait_s or self._mean_duration_s,
        )

    def __repr__(self) -> str:
        limit = "any number" if self._limit is None else self._limit
        return f"Admission({self._num_admitted} of {limit} {self._noun}, {self._num_bytes} bytes)"


def _overload(reason: str, wait_s: float) -> OverloadedError:
    retry_after_s = min(max(wait_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
    return OverloadedError(f"{reason}; try again in {retry_after_s:.2f} s", retry_after_s)
