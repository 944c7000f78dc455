"""How the threads that run models share the cores: one alone takes all of them, several take one each.

Two runs of one thread each do more than one run of two: nothing waits for the slower of two threads after every
operator, and what one thread does between runs does not leave the other core idle (docs/lanes.md gives the figures).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Cores:
    """Counts the busy lanes: threads of engines and batchers that have work.

    Attributes:
        count: Number of cores.
        num_lanes: Runs of a model that are worth having at a time.
    """

    def __init__(self, count: int, num_lanes: int = 1) -> None:
        """Starts with no busy lane."""
        self.count = count
        self.num_lanes = num_lanes
        self._num_busy = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Cores({self._num_busy} busy on {self.count})"

    @property
    def is_shared(self) -> bool:
        """True if each run is to keep to one core: several lanes are busy, and they fill most of the cores."""
        return self._num_busy > 1 and 2 * self._num_busy > self.count

    def busy_lanes(self) -> BusyLanes:
        """Returns the count of a new engine or batcher, with none of its lanes busy."""
        return BusyLanes(self)

    @contextmanager
    def all_taken(self) -> Iterator[None]:
        """Makes runs keep to one core each, as if every core had a busy lane, until the context ends."""
        self.count_busy(self.count)
        try:
            yield
        finally:
            self.count_busy(-self.count)

    def count_busy(self, change: int) -> None:
        """Counts so many more busy lanes, or fewer."""
        with self._lock:
            self._num_busy += change


class BusyLanes:
    """How many lanes of one engine or batcher are busy, from before a run until nothing waits. One thread sets it."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._count = 0

    def set(self, count: int) -> None:
        """Notes how many are busy now."""
        if count != self._count:
            self._cores.count_busy(count - self._count)
            self._count = count
