"""Timeouts of slow callers, and limits of long-lived streams.

A call waits for its caller twice: for the request after its headers, and for the client to read the answer. The
transports' libraries limit neither the number nor the time of such waits. Here each has a timeout, and few may be slow
at once: past that limit the longest waits end with an error. So a client cannot block others by sending half a request
or reading nothing. The transports share one `PeerWaits`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from headway_server.errors import DeadlineError, OverloadedError, RequestError

_SWEEP_S: Final = 0.1
_FEWEST_SWEEPS: Final = 4
"""Sweeps before a wait counts as slow: a late event loop has not yet read the data that arrived."""
_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLimits:
    """Limits of calls that wait for their callers."""

    timeout_s: float
    """Timeout of a wait in seconds; 0: no limit."""
    max_slow: int
    """Limit of concurrent waits longer than `slow_s`."""
    slow_s: float = 1.0
    """Shorter waits do not count."""
    max_waits: int | None = None
    """Limit of concurrent waits; None: no limit."""


class _Wait:
    """A wait for a caller, as a context."""

    __slots__ = ("_waits", "error", "num_sweeps", "since", "task")

    def __init__(
        self, waits: dict[_Wait, None], num_sweeps: int = 0, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._waits = waits
        self.num_sweeps = num_sweeps
        self.since = time.monotonic()
        self.task = asyncio.current_task(loop)
        self.error: RequestError | None = None

    def __enter__(self) -> Self:
        self._waits[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waits.pop(self, None)
        if isinstance(error, asyncio.CancelledError) and self.error is not None and self.task is not None:
            self.task.uncancel()
            raise self.error from None

    def cut(self, error: RequestError) -> None:
        """Ends the wait with an error."""
        if self.error is None and self.task is not None:
            self.error = error
            self.task.cancel()


class _Waits:
    """Waits of one kind, the longest first."""

    def __init__(self, limits: WaitLimits, fault: str, advice: str) -> None:
        self._limits = limits
        self._fault = fault
        self._advice = advice
        self._waits: dict[_Wait, None] = {}
        self._num_sweeps = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._waits)

    def wait(self) -> _Wait:
        """Returns the context of a wait.

        Raises:
            DeadlineError: It took too long.
            OverloadedError: It was ended in favour of others.
        """
        waits, most = self._waits, self._limits.max_waits
        if most is not None and len(waits) >= most:
            oldest = next(iter(waits))
            del waits[oldest]
            oldest.cut(self._overload())
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return _Wait(waits, self._num_sweeps, self._loop)

    def sweep(self, now: float) -> None:
        """Ends waits past their timeout, and the longest ones if too many are slow."""
        slow, limits = [], self._limits
        self._num_sweeps += 1
        for wait in self._waits:
            if now - wait.since < limits.slow_s or self._num_sweeps - wait.num_sweeps < _FEWEST_SWEEPS:
                break
            if wait.error is None:
                slow.append(wait)
        for number, wait in enumerate(slow):
            if limits.timeout_s and now - wait.since > limits.timeout_s:
                wait.cut(DeadlineError(f"{self._fault} within {limits.timeout_s:g} s; {self._advice}"))
            elif len(slow) - number > limits.max_slow:
                wait.cut(self._overload())

    def _overload(self) -> OverloadedError:
        limits = self._limits
        return OverloadedError(
            f"{self._fault} in time, and others wait: at most {limits.max_slow} slow ones are allowed at once; "
            f"{self._advice}",
            _RETRY_S,
        )


class PeerWaits:
    """Calls that wait for their callers, and long-lived streams. For the event loop's thread only."""

    def __init__(
        self,
        *,
        requests: WaitLimits,
        answers: WaitLimits,
        max_lasting: int,
        max_lasting_per_connection: int,
        max_receiving: int | None = None,
    ) -> None:
        """Starts with no call.

        Args:
            requests: Limits of waits for a request.
            answers: Limits of waits for the client to read.
            max_lasting: Limit of long-lived streams, such as health watches.
            max_lasting_per_connection: The same for one connection.
            max_receiving: The same for streams of requests, each of which may buffer part of a request; None:
                `max_lasting`.
        """
        self._arriving = _Waits(requests, "the request was not received", "send it at once after its headers")
        self._unread = _Waits(answers, "the answer was not read", "read what the server sends")
        self._max_lasting = max_lasting
        self._max_lasting_per_connection = max_lasting_per_connection
        self._max_receiving = max_lasting if max_receiving is None else max_receiving
        self._num_receiving = 0
        self._lasting: dict[_Wait, None] = {}
        self._lasting_of: Counter[str] = Counter()
        self._gate: asyncio.Event | None = None

    def arriving(self) -> AbstractContextManager[object]:
        """Returns the context of the wait for a request.

        Raises:
            DeadlineError: It was not received in time.
            OverloadedError: It was slow, and too many calls were waiting.
        """
        return self._arriving.wait()

    def unread(self) -> AbstractContextManager[object]:
        """Returns the context of sending a message of a stream.

        Raises:
            DeadlineError: It was not read in time.
            OverloadedError: It was read slowly, and too many calls were waiting.
        """
        return self._unread.wait()

    @contextmanager
    def lasting(self, peer: str, *, receives: bool = False) -> Iterator[None]:
        """Returns the context of a long-lived stream, which may receive requests.

        Raises:
            OverloadedError: There are too many, of all callers or of this connection.
            RequestError: The error given to `end_lasting`.
        """
        most = self._max_lasting_per_connection
        if self._lasting_of[peer] >= most:
            raise OverloadedError(f"this connection has {most} such streams, which is the limit", _RETRY_S)
        if len(self._lasting) >= self._max_lasting:
            raise OverloadedError(f"there are {self._max_lasting} such streams, which is the limit", _RETRY_S)
        if receives and self._num_receiving >= self._max_receiving:
            raise OverloadedError(
                f"there are {self._max_receiving} streams of requests, which is the limit; raise --max-arriving-mib",
                _RETRY_S,
            )
        self._num_receiving += receives
        self._lasting_of[peer] += 1
        try:
            with _Wait(self._lasting):
                yield
        finally:
            self._num_receiving -= receives
            self._lasting_of[peer] -= 1
            if not self._lasting_of[peer]:
                del self._lasting_of[peer]

    async def wait_while_paused(self) -> None:
        """Waits while calls are paused."""
        if self._gate is not None:
            await self._gate.wait()

    def pause(self) -> None:
        """Pauses calls after the receipt of their requests, until `resume`."""
        self._gate = asyncio.Event()

    def resume(self) -> None:
        """Resumes paused calls."""
        if self._gate is not None:
            self._gate.set()

    def end_lasting(self, error: RequestError) -> None:
        """Ends every long-lived stream."""
        for wait in self._lasting:
            wait.cut(error)

    async def watch(self) -> None:
        """Sweeps periodically, until it is cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            self._arriving.sweep(now)
            self._unread.sweep(now)

    def __repr__(self) -> str:
        return f"PeerWaits({len(self._arriving)} arriving, {len(self._unread)} unread, {len(self._lasting)} lasting)"
