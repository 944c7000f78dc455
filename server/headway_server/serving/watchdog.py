"""A watchdog thread: logs the stacks of all threads when a model or the event loop makes no progress.

Health checks report a hanging model too. But a hanging event loop answers no health check, and neither shows the cause.
A run of ONNX Runtime cannot be interrupted; a supervisor can restart the process if it exits.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

STALLED_EXIT_CODE: Final = 70
"""Exit code of a process that ended itself because it hung: EX_SOFTWARE of sysexits.h."""

_TICK_S: Final = 1.0
_LATE_S: Final = 5.0
"""A later tick means that the whole process was stopped."""

_log = structlog.get_logger(__name__)


class Watchdog:
    """Watches the models and the event loop of a process."""

    def __init__(self, stalled: Callable[[float], Mapping[str, str]], *, limit_s: float, ends: bool) -> None:
        """Prepares the thread; `start` starts it.

        Args:
            stalled: Returns models without progress for a number of seconds, with reasons; called from the thread.
            limit_s: Limit of seconds without progress.
            ends: True to exit the process past the limit.
        """
        self._stalled = stalled
        self._limit_s = limit_s
        self._ends = ends
        self._known: set[str] = set()
        self._beat_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """Records progress of the event loop; to be called about every second."""
        self._beat_at = time.monotonic()

    def stop(self) -> None:
        """Stops the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        tick_s = min(_TICK_S, self._limit_s / 4)
        spared_until = ticked_at = time.monotonic()
        while not self._stop.wait(tick_s):
            # If the interpreter is blocked, this thread is too: then faulthandler's own thread prints the stacks.
            faulthandler.dump_traceback_later(self._limit_s + _LATE_S, exit=self._ends)
            now = time.monotonic()
            if now - ticked_at > tick_s + _LATE_S:
                _log.warning("the process was stopped", seconds=round(now - ticked_at, 1))
                spared_until = now + self._limit_s
            ticked_at = now
            if now > spared_until:
                self._look(now)
        faulthandler.cancel_dump_traceback_later()

    def _look(self, now: float) -> None:
        found = dict(self._stalled(self._limit_s))
        if now - self._beat_at > self._limit_s:
            found["event loop"] = f"has made no progress for {now - self._beat_at:.0f} s"
        new = found.keys() - self._known
        self._known = set(found)
        if not new:
            return
        _log.critical("the server hangs", stalled=found, ends=self._ends, stacks=_stacks())
        if self._ends:
            sys.stderr.flush()
            os._exit(STALLED_EXIT_CODE)

    def __repr__(self) -> str:
        return f"Watchdog({self._limit_s:g} s, {'ends the process' if self._ends else 'reports'})"


def _stacks() -> str:
    """Returns the stacks of all threads, the innermost call first, without reading source files."""
    if not hasattr(os, "memfd_create"):
        faulthandler.dump_traceback(all_threads=True)
        return "above"
    with os.fdopen(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
