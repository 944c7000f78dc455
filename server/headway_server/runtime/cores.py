"""Sharing of the cores among the threads of models: a single busy thread has all cores, several have one each.

Two runs of one thread each have a higher throughput than one run of two threads. No operator waits for the slower
thread, and work between two runs does not leave the other core idle (figures: docs/lanes.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Cores:
    """Counts the lanes that have work. May be used by any thread.

    Attributes:
        count: Number of cores.
    """

    def __init__(self, count: int) -> None:
        """Starts with no busy lane."""
        self.count = count
        self._num_busy = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Cores({self._num_busy} busy on {self.count})"

    @property
    def num_busy(self) -> int:
        """Lanes that have work."""
        return self._num_busy

    @property
    def is_shared(self) -> bool:
        """True if each run uses one core: several lanes have work, and they fill most of the cores."""
        return self._num_busy > 1 and 2 * self._num_busy > self.count

    def busy_lanes(self) -> BusyLanes:
        """Returns a counter of busy lanes for an engine or a batcher; it starts at none."""
        return BusyLanes(self)

    @contextmanager
    def all_busy(self) -> Iterator[None]:
        """Limits runs to one core each within the context, as if every core were busy."""
        self.add_busy(self.count)
        try:
            yield
        finally:
            self.add_busy(-self.count)

    def add_busy(self, change: int) -> None:
        """Changes the number of busy lanes by `change`."""
        with self._lock:
            self._num_busy += change


class BusyLanes:
    """How many lanes of one engine or batcher have work; a lane stays busy between two runs.

    To be set by one thread at a time.
    """

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._count = 0

    def set(self, count: int) -> None:
        """Sets the number of busy lanes."""
        if count != self._count:
            self._cores.add_busy(count - self._count)
            self._count = count
