"""What happens around every call, whichever transport it came by: counted, admitted, timed, observed, drained."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar

from headway_server.errors import DeadlineError, DrainingError
from headway_server.observers import NO_OBSERVER, CallEvent, Observer
from headway_server.preprocessing.pool import current_caller
from headway_server.serving.permits import Admission

_current: ContextVar[Call | None] = ContextVar("current_call", default=None)


class Call:
    """A call that is being answered."""

    def __init__(self, event: CallEvent) -> None:
        self.event = event
        self.callbacks: list[Callable[[], None]] = []
        """What is called on the event loop when the call has ended, however it ends."""

    def __repr__(self) -> str:
        return f"Call({self.event.method}, {time.monotonic() - self.event.started_at:.3f} s)"


def current_call() -> Call | None:
    """Returns the call that the present task answers; None outside of every call."""
    return _current.get()


class Calls:
    """The calls that are being answered. Belongs to the event loop.

    Every transport holds its calls to this one object, so that they share the limits and are drained together.
    """

    def __init__(
        self, *, max_calls: int | None = None, max_bytes: int | None = None, observer: Observer = NO_OBSERVER
    ) -> None:
        """Starts with no call.

        Args:
            max_calls: Calls that are answered at a time; None: any number.
            max_bytes: Bytes that the requests of these have together; None: any number. A request of more bytes than
                that is answered when there is no other.
            observer: Learns of every call.
        """
        self._admission = Admission(limit=max_calls, noun="calls", owner="the server", max_bytes=max_bytes)
        self._observer = observer
        self._ids = itertools.count(1)
        self._num_running = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Calls that have begun and not ended."""
        return self._num_running

    @property
    def is_draining(self) -> bool:
        """True once new calls are refused."""
        return self._is_draining

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        *,
        metadata: Sequence[tuple[str, str]] = (),
        num_bytes: int = 0,
        caller: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[Call]:
        """Surrounds all work that is done for a call, from the moment its bytes are there.

        Args:
            method: Full name of the RPC or path of the route.
            metadata: What the caller sent beside the request; keys in lower case.
            num_bytes: Size of the request as it was received.
            caller: Whom it is from: a key's name, or the address of the caller's machine. Callers share the threads for
                texts, images and constraints equally.
            timeout_s: Seconds after which the call is ended; None where there is no limit, or where the transport
                itself ends a call whose deadline has passed.

        Raises:
            DrainingError: The server is shutting down.
            OverloadedError: There are too many calls, or too many bytes of them.
            DeadlineError: The time is over.
        """
        event = CallEvent(call_id=next(self._ids), method=method, metadata=tuple(metadata), started_at=time.monotonic())
        call, outer = Call(event), _current.get()
        current_caller.set(caller)
        self._num_running += 1
        self._idle.clear()
        self._observer.call_started(event)
        _current.set(call)
        failure: BaseException | None = None
        limit: asyncio.Timeout | None = None
        try:
            if self._is_draining:
                raise DrainingError("the server is shutting down; call another one, or this one when it is back")
            with self._admission.admit(1, num_bytes):
                if timeout_s is None:
                    yield call
                else:
                    async with asyncio.timeout(timeout_s) as limit:
                        yield call
        except TimeoutError as error:
            failure = error
            if limit is not None and limit.expired():
                failure = DeadlineError(f"the call took longer than its {timeout_s:g} s")
                raise failure from error
            raise
        except GeneratorExit:  # a stream whose reader has gone
            failure = asyncio.CancelledError()
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            # A stream may be closed in another context than it was begun in, where a token could not be reset.
            _current.set(outer)
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
            for callback in call.callbacks:
                callback()
            self._observer.call_finished(event, error=failure, duration_s=time.monotonic() - event.started_at)
            failure = None  # its traceback holds this frame

    def refuse_new(self) -> None:
        """Refuses every further call with DrainingError; those that run go on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Waits until no call is running."""
        await self._idle.wait()

    def __repr__(self) -> str:
        return f"Calls({self._num_running} running{', draining' if self._is_draining else ''})"
