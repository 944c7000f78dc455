"""Counters in memory shared by the workers: calls, bytes of requests, budgets of callers.

A table of rows, one for the server and one for each caller that has a budget. In a row each worker writes cells of its
own and reads those of all, so a worker that dies takes nothing with it. The level of a bucket is one for all workers,
who change it under a lock on the row. A call costs 1.5 µs more than with one process, that of a caller with budgets
4 µs on top.

Behind the rows stand the generation of what the workers agree on (`workers/agreement.py`), how far each has followed
it, and how many models of each are out of order.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from types import TracebackType
from typing import Final, Self

import structlog

_NUM_ROWS: Final = 16_384
_OF_SERVER: Final = 0
_BUCKET_CELLS: Final = 2
"""Level and time of a bucket."""
_NUM_BUCKETS: Final = 2
"""Buckets of calls and tokens."""
_FIRST_COUNT: Final = 1 + _NUM_BUCKETS * _BUCKET_CELLS
"""Cells before a row's counts: its key and its buckets."""
_CELL_BYTES: Final = 8
_GENERATION: Final = 0
_RESTARTS: Final = 1
_NUM_COMMON: Final = 2
"""Common cells after the rows."""
FIRST_GENERATION: Final = 1
"""Of what workers agree on before a call has changed anything; 0 stands for a worker that is not there."""

_log = structlog.get_logger(__name__)


class Row:
    """A row of the table, as one worker sees it. As a context manager, a lock against other workers."""

    __slots__ = ("_bytes", "_fd", "_index", "_num_workers", "_running", "_start", "buckets")

    def __init__(self, cells: memoryview[float], fd: int, start: int, *, index: int, num_workers: int) -> None:
        self._fd = fd
        self._start = start
        self._index = index
        self._num_workers = num_workers
        row = cells[start : start + row_cells(num_workers)]
        self.buckets = (row[1:3], row[3:5])
        """Buckets of calls and of tokens: level and time of each; time 0: unused."""
        self._running = row[_FIRST_COUNT : _FIRST_COUNT + num_workers]
        self._bytes = row[_FIRST_COUNT + num_workers :]

    def __enter__(self) -> Self:
        fcntl.lockf(self._fd, fcntl.LOCK_EX, _CELL_BYTES, self._start * _CELL_BYTES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, _CELL_BYTES, self._start * _CELL_BYTES)

    def set_counts(self, num_running: int, num_bytes: int = 0) -> None:
        """Sets this worker's running calls and the bytes of their requests."""
        self._running[self._index] = num_running
        self._bytes[self._index] = num_bytes

    @property
    def num_running(self) -> int:
        """Running calls of all workers."""
        return int(sum(self._running))

    @property
    def num_bytes(self) -> int:
        """Bytes of the requests of running calls."""
        return int(sum(self._bytes))

    def __repr__(self) -> str:
        return f"Row({self.num_running} running in {self._num_workers} workers)"


class Counts:
    """The table, as one worker sees it.

    A process that locks rows opens the table once: closing any map of it releases all of the process's locks.
    """

    def __init__(self, fd: int, *, index: int, num_workers: int) -> None:
        """Maps the table.

        Args:
            fd: File descriptor of the table, from `create`.
            index: Of the worker, from 0.
            num_workers: How many there are.
        """
        self._fd = fd
        self._index = index
        self._num_workers = num_workers
        self._mapped = mmap.mmap(fd, _table_bytes(num_workers))
        self._cells = memoryview(self._mapped).cast("d")
        self._keys = memoryview(self._mapped).cast("Q")
        self.server = self._row(_OF_SERVER)
        """All calls of the server."""
        common = self._cells[_NUM_ROWS * row_cells(num_workers) :]
        self._common = common[:_NUM_COMMON]
        self._followed = common[_NUM_COMMON : _NUM_COMMON + num_workers]
        self._unhealthy = common[_NUM_COMMON + num_workers :]

    @staticmethod
    def create(num_workers: int) -> int:
        """Makes an empty table; returns a file descriptor, which workers inherit."""
        fd = os.memfd_create("headway-counts")
        os.ftruncate(fd, _table_bytes(num_workers))
        Counts(fd, index=0, num_workers=num_workers).generation = FIRST_GENERATION
        return fd

    def of_caller(self, name: str) -> Row | None:
        """Returns the row of a caller; None if the table is full: then each worker counts for itself."""
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) or 1
        width = row_cells(self._num_workers)
        with self.server:
            for step in range(_NUM_ROWS - 1):
                number = 1 + (key + step) % (_NUM_ROWS - 1)
                if self._keys[number * width] in (0, key):
                    self._keys[number * width] = key
                    return self._row(number)
        _log.warning("too many callers with budgets; each worker counts the budget of this one by itself", caller=name)
        return None

    @property
    def generation(self) -> int:
        """Generation of the shared state (`workers/agreement.py`); each change increments it."""
        return int(self._common[_GENERATION])

    @generation.setter
    def generation(self, generation: int) -> None:
        self._common[_GENERATION] = generation

    @property
    def num_restarts(self) -> int:
        """Restarts of workers; written by the supervisor."""
        return int(self._common[_RESTARTS])

    @num_restarts.setter
    def num_restarts(self, number: int) -> None:
        self._common[_RESTARTS] = number

    def begin(self, index: int) -> None:
        """Marks a worker as started, at the first generation."""
        self._followed[index] = FIRST_GENERATION

    def set_followed(self, generation: int, *, failed: bool = False) -> None:
        """Sets the generation that this worker has applied, or failed to apply."""
        self._followed[self._index] = -generation if failed else generation

    def lagging(self, generation: int) -> list[int]:
        """Returns the running workers that are behind a generation."""
        return [index for index, followed in enumerate(self._followed) if followed and abs(followed) < generation]

    def failed(self, generation: int) -> list[int]:
        """Returns the workers that failed to apply a generation."""
        return [index for index, followed in enumerate(self._followed) if followed == -generation]

    def set_unhealthy(self, num_models: int) -> None:
        """Sets the number of unhealthy models of this worker."""
        self._unhealthy[self._index] = num_models

    def unhealthy_elsewhere(self) -> dict[int, int]:
        """Returns the numbers of unhealthy models of other workers, without zeros."""
        return {index: int(number) for index, number in enumerate(self._unhealthy) if number and index != self._index}

    def try_lock(self) -> bool:
        """Locks the shared state for changes by this process; False: another process holds the lock.

        The lock ends with `unlock`, or with the process.
        """
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _table_bytes(self._num_workers))
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        """Releases the lock of the shared state."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _table_bytes(self._num_workers))

    def forget(self, index: int) -> None:
        """Clears the counts of a worker that has ended."""
        self._followed[index] = self._unhealthy[index] = 0
        width = row_cells(self._num_workers)
        for number in range(_NUM_ROWS):
            if number == _OF_SERVER or self._keys[number * width]:
                start = number * width + _FIRST_COUNT + index
                self._cells[start] = self._cells[start + self._num_workers] = 0.0

    def _row(self, number: int) -> Row:
        start = number * row_cells(self._num_workers)
        return Row(self._cells, self._fd, start, index=self._index, num_workers=self._num_workers)

    def __repr__(self) -> str:
        return f"Counts(worker {self._index} of {self._num_workers}, {self.server!r})"


def row_cells(num_workers: int) -> int:
    """Returns the number of cells of a row."""
    return _FIRST_COUNT + 2 * num_workers


def _table_bytes(num_workers: int) -> int:
    return (_NUM_ROWS * row_cells(num_workers) + _NUM_COMMON + 2 * num_workers) * _CELL_BYTES
