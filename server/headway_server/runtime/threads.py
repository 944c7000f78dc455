"""Threads that run models: whose turn it is, whether they make progress, and how they end."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

import structlog

CLOSE_TIMEOUT_S: Final = 10.0
"""Seconds that closing a model waits for its running threads."""

_STACK_DEPTH: Final = 4
_HAS_NICENESS: Final = sys.platform == "linux"
"""Elsewhere niceness is that of the process."""

Result = TypeVar("Result")

_log = structlog.get_logger(__name__)


class Turns:
    """Lets so many threads into its block at a time, in the order in which they came.

    `threading.Semaphore` lets a thread that comes later overtake those that wait, for as long as others keep coming.
    """

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._num_come, self._num_allowed = 0, count

    def __enter__(self) -> None:
        with self._changed:
            place = self._num_come
            self._num_come += 1
            self._changed.wait_for(lambda: place < self._num_allowed)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._num_allowed += 1
            self._changed.notify_all()


class Heartbeat:
    """Measures for how long work has made no progress.

    A thread calls `beat` when it begins a piece of work (a step, a batch), which ends the piece before, and `rest` when
    it has nothing to do; `working` does both around a block. Several threads may share a heartbeat: each has a time of
    its own, and the one that has been stuck for longest counts. Takes no lock.
    """

    def __init__(self) -> None:
        self._began: dict[int, float] = {}  # start of work, by busy thread

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
        """Returns the running seconds of the oldest piece of work; 0.0 without one."""
        began = min(list(self._began.values()), default=None)
        return 0.0 if began is None else time.monotonic() - began

    def __repr__(self) -> str:
        return f"Heartbeat({len(self._began)} threads at work, stalled for {self.stalled_s():.1f} s)"


def own_niceness() -> int:
    """Returns how much this thread gives way to others, 0 to 19; 0 where threads have no niceness of their own."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) if _HAS_NICENESS else 0


def set_own_niceness(niceness: int) -> None:
    """Raises the niceness of this thread and of threads it starts later; this is permanent."""
    if _HAS_NICENESS and niceness > own_niceness():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def run_nicely(niceness: int, function: Callable[[], Result]) -> Result:
    """Runs a function; with a niceness above 0 in a new thread, whose own threads inherit it."""
    if not niceness:
        return function()
    with ThreadPoolExecutor(1, initializer=set_own_niceness, initargs=(niceness,)) as pool:
        return pool.submit(function).result()


def join_threads(threads: Iterable[threading.Thread], *, owner: str, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
    """Waits for threads to end, `timeout_s` for all of them together.

    A run of ONNX Runtime cannot be interrupted, so a thread that hangs in one is left behind, and the log says where it
    is. Threads that were never started count as ended.

    Args:
        threads: Daemon threads that are about to end.
        owner: Their owner, for the log.
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
        _log.error(
            "a thread does not end and is left behind",
            owner=owner,
            thread=thread.name,
            at=_stack_location(thread.ident),
        )
    return not stuck


def close_together(closers: Sequence[Callable[[], bool]]) -> bool:
    """Closes several objects concurrently, so that the wait is that of one.

    Returns:
        True if the threads of each have ended.
    """
    if len(closers) < 2:
        return all(close() for close in closers)
    with ThreadPoolExecutor(len(closers), thread_name_prefix="close") as pool:
        return all(list(pool.map(lambda close: close(), closers)))


def _stack_location(ident: int | None) -> str:
    """Describes where a thread is, innermost call first."""
    frame = sys._current_frames().get(ident or 0)  # noqa: SLF001 (the documented way to a thread's frame)
    if frame is None:
        return "unknown"
    calls = traceback.extract_stack(frame)[-_STACK_DEPTH:]
    return " < ".join(f"{call.name} ({call.filename.rpartition('/')[2]}:{call.lineno})" for call in reversed(calls))
