"""Threads that compute submitted work for a model: their start and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import Any, Final, Generic, TypeVar

import structlog

from headway_server.errors import DrainingError, ModelRunError
from headway_server.observers import ModelUsage
from headway_server.runtime.cores import BusyLanes
from headway_server.runtime.threads import CLOSE_TIMEOUT_S, Heartbeat, join_threads, own_niceness, set_own_niceness

_DRAINING: Final = "the server is shutting down; call another one, or this one when it is back"
_STOPPED: Final = "the model has stopped; restart the server"
_FAILED: Final = "the model could not be run; the server's log says why"

_log = structlog.get_logger(__name__)

ErrorType = TypeVar("ErrorType", bound=ModelRunError)
ResultType = TypeVar("ResultType")


class Pending(Generic[ResultType]):
    """Submitted work that waits for its result. For the event loop alone.

    Attributes:
        result: The result or the error; cancelled if the caller disconnects.
    """

    def __init__(self) -> None:
        self.result: asyncio.Future[ResultType] = asyncio.get_running_loop().create_future()

    def end(self, outcome: ResultType | BaseException) -> None:
        """Takes the result, or the error instead. The first end counts."""
        if self.result.done():
            return
        if isinstance(outcome, BaseException):
            self.result.set_exception(outcome)
        else:
            self.result.set_result(outcome)


class Worker:
    """Threads of a model.

    Public methods belong to the event loop, except for `stop`, `close`, `usage` and `stalled_s`, which any thread may
    call. Private ones belong to the threads, except where they say otherwise.

    Attributes:
        name: Name of the threads, also in the log.
    """

    def __init__(
        self,
        name: str,
        error: type[ModelRunError],
        *,
        num_threads: int = 1,
        busy_lanes: BusyLanes | None = None,
    ) -> None:
        """Makes threads that `start` starts.

        Args:
            name: Name of the threads.
            error: Error of calls if a thread ends by an error.
            num_threads: Threads there are.
            busy_lanes: Counter of the lanes that share the cores; None: these threads have them alone.
        """
        self.name = name
        self._error = error
        self._busy_lanes = busy_lanes
        self._heartbeat = Heartbeat()
        self._niceness = own_niceness()  # of the thread that loads the model
        self._changed = Condition()  # guards submissions, refused once the worker is closed
        self._open: set[Pending[Any]] = set()  # submitted and not answered; the event loop's
        self._is_closed = False
        self._has_failed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_working = num_threads
        names = [name] if num_threads == 1 else [f"{name}-{number}" for number in range(num_threads)]
        self._threads = [Thread(target=self._live, name=each, daemon=True) for each in names]

    @property
    def is_alive(self) -> bool:
        """True from `start` to `close`, unless a thread has ended by an error."""
        return self._loop is not None and not self._is_closed and not self._has_failed

    @property
    def state(self) -> str:
        """`failed`, `closed` or `open`, for `__repr__`."""
        return "failed" if self._has_failed else "closed" if self._is_closed else "open"

    def stalled_s(self) -> float:
        """Returns the running seconds of the oldest step or batch; 0.0 without one. Takes no lock."""
        return self._heartbeat.stalled_s()

    def usage(self) -> ModelUsage:
        """Returns waiting work and used capacity. Takes no lock that a run may hold."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts the threads. Results go to the event loop that calls."""
        assert self._loop is None, "a worker is started once"
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Makes the threads end after their current run."""
        with self._changed:
            self._is_closed = True
            self._wake()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Ends the threads after their current run. Unfinished work then fails with DrainingError.

        A run that hangs cannot be interrupted. After `timeout_s` its thread is left behind, which the log says, and
        what it runs fails all the same. On the event loop's own thread, running calls would not hear of their results
        meanwhile.

        Returns:
            True if the threads have ended.
        """
        self.stop()
        if join_threads(self._threads, owner=self.name, timeout_s=timeout_s):
            return True
        self._post(self._fail_open, self.end_error())
        return False

    def end_error(self) -> DrainingError | ModelRunError:
        """Returns why nothing is taken in any more: a thread has ended by an error, or the worker was closed."""
        return self._error(_STOPPED) if self._has_failed else DrainingError(_DRAINING)

    @contextmanager
    def _accept(self, *pending: Pending[Any]) -> Iterator[None]:
        """Context of a submission, with the lock. On the event loop.

        Raises:
            DrainingError: The worker was closed.
            ModelRunError: A thread has ended by an error.
        """
        with self._changed:
            if self._has_failed or self._is_closed:
                raise self.end_error()
            self._open.update(pending)
            yield
        for one in pending:
            one.result.add_done_callback(partial(self._forget, one))

    def _work(self) -> None:
        """Works until the worker is closed or has failed."""
        raise NotImplementedError

    def _wake(self) -> None:
        """Wakes the threads to end, and fails or drops waiting work. Called by any thread, with the lock."""
        raise NotImplementedError

    def _live(self) -> None:
        set_own_niceness(self._niceness)
        error: BaseException | None = None
        try:
            self._work()
        except BaseException as raised:  # a bug: without this thread, calls would wait for ever
            error = raised
        self._heartbeat.rest()
        with self._changed:
            self._num_working -= 1
            if error is not None:
                self._has_failed = True
                self._wake()
            is_last = not self._num_working
        if error is not None:
            self._post(self._fail_open, run_error(self._error, error))
            with suppress(Exception):  # a blocked log must delay no call
                _log.critical("a thread of a model has ended by itself", worker=self.name, exc_info=error)
        elif is_last:
            self._post(self._fail_open, self.end_error())

    def _set_busy(self, count: int) -> None:
        """Updates the number of busy threads."""
        if self._busy_lanes is not None:
            self._busy_lanes.set(count)

    def _forget(self, pending: Pending[Any], _: asyncio.Future[Any]) -> None:
        """Removes answered work; on the event loop."""
        self._open.discard(pending)

    def _fail_open(self, error: Exception) -> None:
        """Fails unanswered work; on the event loop."""
        for pending in list(self._open):
            pending.end(error)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function on the event loop."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                self._loop.call_soon_threadsafe(function, *arguments)


def run_error(kind: type[ErrorType], cause: BaseException | None = None) -> ErrorType:
    """Returns the error for callers of a model that could not be run; the log has the cause."""
    error = kind(_FAILED)
    error.__cause__ = cause
    return error


MessageType = TypeVar("MessageType")


class SteppingWorker(Worker, Generic[MessageType]):
    """One thread with a loop: it takes submitted work and makes a step."""

    def __init__(self, name: str, error: type[ModelRunError], *, busy_lanes: BusyLanes | None = None) -> None:
        """Makes a thread; see `Worker`."""
        super().__init__(name, error, busy_lanes=busy_lanes)
        self._inbox: SimpleQueue[MessageType | None] = SimpleQueue()

    @property
    def has_work(self) -> bool:
        """True if there is anything to make a step of."""
        raise NotImplementedError

    def _take_in(self, message: MessageType) -> None:
        """Queues submitted work."""
        raise NotImplementedError

    def _step(self) -> None:
        """Makes a step. An error ends the thread."""
        raise NotImplementedError

    def _release(self) -> None:
        """Abandons running and waiting work when the thread ends."""
        raise NotImplementedError

    def _submit(self, pending: Sequence[Pending[Any]], message: MessageType) -> None:
        """Hands a message to the thread; errors are those of `Worker._accept`. On the event loop."""
        with self._accept(*pending):
            self._inbox.put(message)

    def _wake(self) -> None:
        self._inbox.put(None)

    def _work(self) -> None:
        try:
            while self._receive():
                self._heartbeat.beat()
                self._step()
        finally:
            self._set_busy(0)
            self._release()

    def _receive(self) -> bool:
        """Takes new messages, waiting for one if idle; False once the worker is closed."""
        if not self.has_work:
            self._heartbeat.rest()
            self._set_busy(0)
        with suppress(Empty):
            message = self._inbox.get(block=not self.has_work)
            self._set_busy(1)
            while message is not None:
                self._take_in(message)
                message = self._inbox.get_nowait()
            return False
        return True
