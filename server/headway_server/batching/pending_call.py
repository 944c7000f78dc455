"""A call that waits for the results of its items, which may come from several batches.

N is the number of a call's items.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ItemTimes(NamedTuple):
    """When an item was submitted and when the run it was part of began and ended, by `time.monotonic`."""

    arrived_at: float
    started_at: float
    finished_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedResults:
    """The results of a call, in its order."""

    rows: list[NDArray[np.float32]]
    """N of them."""
    runs: list[ItemTimes]
    """One for each row."""


class PendingCall:
    """A call that waits for its results. Belongs to the event loop."""

    def __init__(self, num_items: int) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rows: dict[int, NDArray[np.float32]] = {}
        self._runs: dict[int, ItemTimes] = {}
        self._num_items = num_items
        self._arrived_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it: answered, failed, or its caller has gone. May be asked from any thread."""
        return self.future.done()

    def put(self, index: int, row: NDArray[np.float32], start: float, end: float) -> None:
        """Takes the result of one item, from a run between `start` and `end`."""
        self._rows[index] = row
        self._runs[index] = ItemTimes(self._arrived_at, start, end)
        if len(self._rows) == self._num_items and not self.future.done():
            self.future.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fails the whole call."""
        if not self.future.done():
            self.future.set_exception(error)

    def results(self) -> BatchedResults:
        """Returns the results, all of which must be there."""
        return BatchedResults(
            rows=[self._rows[index] for index in range(self._num_items)],
            runs=[self._runs[index] for index in range(self._num_items)],
        )
