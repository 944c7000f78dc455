"""How the threads that run models share the cores: one alone has all of them, several have one each.

Two runs of one thread each do more than one run of two: nothing waits for the slower of two threads after every
operator, and what one thread does between runs does not leave the other core idle (docs/lanes.md gives the figures).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Cores:
    """Counts who has work.

    Attributes:
        count: Cores there are.
        num_lanes: Runs of a model that are worth having at a time.
    """

    def __init__(self, count: int, num_lanes: int = 1) -> None:
        """Starts with nobody at work."""
        self.count = count
        self.num_lanes = num_lanes
        self._num_busy = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Cores({self._num_busy} busy on {self.count})"

    @property
    def is_shared(self) -> bool:
        """Whether each run shall keep to one core: more than one thread has work, and they fill most of the cores."""
        return self._num_busy > 1 and 2 * self._num_busy > self.count

    def seats(self) -> Seats:
        """Returns the seats of one who runs models, none of them taken."""
        return Seats(self)

    @contextmanager
    def all_taken(self) -> Iterator[None]:
        """Lets runs keep to one core each as if every core had its thread, as long as the context lasts."""
        self.count_busy(self.count)
        try:
            yield
        finally:
            self.count_busy(-self.count)

    def count_busy(self, change: int) -> None:
        """Notes that so many more threads have work, or fewer."""
        with self._lock:
            self._num_busy += change


class Seats:
    """Those of one engine or batcher: one for each of its threads that has work, between its runs too.

    They are taken and left by one thread at a time.
    """

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._num_taken = 0

    def take(self, count: int) -> None:
        """Takes `count` seats in all, or leaves those beyond it."""
        if count != self._num_taken:
            self._cores.count_busy(count - self._num_taken)
            self._num_taken = count
