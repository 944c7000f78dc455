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

    def seat(self) -> Seat:
        """Returns a seat for a thread, not taken."""
        return Seat(self)

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


class Seat:
    """The place of one thread among those that run models: taken while it has work, between its runs too."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._is_taken = False

    def take(self) -> None:
        """Says that there is work; again and again if one likes."""
        if not self._is_taken:
            self._is_taken = True
            self._cores.count_busy(1)

    def leave(self) -> None:
        """Says that there is none for now."""
        if self._is_taken:
            self._is_taken = False
            self._cores.count_busy(-1)
