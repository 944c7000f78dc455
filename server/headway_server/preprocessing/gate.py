"""Bounds what several threads do at a time by its weight."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets threads pass while what they carry, together, is within a limit; they pass in the order they came."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held by the thread that is next
        self._changed = threading.Condition()
        self._held = 0

    @contextmanager
    def hold(self, weight: int, limit: int) -> Iterator[None]:
        """Waits until `weight` and what is held already are within `limit`; then holds `weight`.

        What is above the limit by itself passes alone.
        """
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._held == 0 or self._held + weight <= limit)
            self._held += weight
        try:
            yield
        finally:
            with self._changed:
                self._held -= weight
                self._changed.notify_all()

    def __repr__(self) -> str:
        return f"Gate({self._held} held)"
