"""Threads that run and load models: whether they make progress, and how they end."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import structlog

CLOSE_TIMEOUT_S: Final = 10.0
"""How long closing a model waits for what its threads are running."""

_STACK_DEPTH: Final = 4
_Result = TypeVar("_Result")

_log = structlog.get_logger(__name__)


class Heartbeat:
    """Measures for how long work has made no progress.

    A thread calls `beat` when it begins a piece of work (a step, a batch), which ends the piece before, and `rest` when
    it has nothing to do; `working` does both around a block. Several threads may share a heartbeat: each has a time of
    its own, and the one that has been stuck for longest counts. Takes no lock.
    """

    def __init__(self) -> None:
        self._began: dict[int, float] = {}  # by thread, those that work

    def beat(self) -> None:
        """Notes that this thread begins a piece of work now."""
        self._began[threading.get_ident()] = time.monotonic()

    def rest(self) -> None:
        """Notes that this thread has nothing to do."""
        self._began.pop(threading.get_ident(), None)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts the block as one piece of work of this thread."""
        self.beat()
        try:
            yield
        finally:
            self.rest()

    def stalled_s(self) -> float:
        """Returns for how many seconds the oldest piece of work has been running; 0.0 where none is."""
        began = min(list(self._began.values()), default=None)
        return 0.0 if began is None else time.monotonic() - began

    def __repr__(self) -> str:
        return f"Heartbeat({len(self._began)} threads at work, stalled for {self.stalled_s():.1f} s)"


def join_threads(threads: Iterable[threading.Thread], *, owner: str, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
    """Waits for threads to end, `timeout_s` for all of them together.

    A run of ONNX Runtime cannot be interrupted, so a thread that hangs in one is left behind, and the log says where it
    is. Threads that were never started count as ended.

    Args:
        threads: Daemon threads that have been told to end.
        owner: What they belong to, for the log.
        timeout_s: Seconds to wait in all.

    Returns:
        True if all of them have ended.
    """
    end = time.monotonic() + timeout_s
    stuck: list[threading.Thread] = []
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                stuck.append(thread)
    for thread in stuck:
        _log.error("a thread does not end and is left behind", owner=owner, thread=thread.name, at=_place(thread.ident))
    return not stuck


def run_apart(function: Callable[[], _Result], *, name: str) -> asyncio.Future[_Result]:
    """Runs a function that may hang, such as one that reads a file of a network mount, in a thread of its own.

    Unlike the threads of an executor, one that hangs keeps neither other work nor the end of the process waiting.

    Args:
        function: What to run.
        name: Of the thread, for the log.

    Returns:
        What will have its result or its error, whatever that is: a panic of a library too. Cancelling it leaves the
        thread running.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()
    job = [function]
    del function  # whoever waits may count on it that nothing here holds what the function belongs to

    def finish(settle: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            settle(outcome)

    def run() -> None:
        settle: Callable[[Any], None] = future.set_result
        outcome: object
        try:
            outcome = job.pop()()
        except BaseException as error:
            settle, outcome = future.set_exception, error
        with suppress(RuntimeError):  # the loop has ended meanwhile, and nobody waits
            loop.call_soon_threadsafe(finish, settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _place(ident: int | None) -> str:
    """Describes where a thread is, innermost call first."""
    frame = sys._current_frames().get(ident or 0)  # noqa: SLF001 (the documented way to a thread's frame)
    if frame is None:
        return "unknown"
    calls = traceback.extract_stack(frame)[-_STACK_DEPTH:]
    return " < ".join(f"{call.name} ({call.filename.rpartition('/')[2]}:{call.lineno})" for call in reversed(calls))
