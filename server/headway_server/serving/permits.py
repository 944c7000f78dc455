"""How much is taken on at once: a permit is asked for before any work is done for a call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from headway_server.errors import OverloadedError

_SMOOTHING = 0.1
_SHORTEST_RETRY_S = 0.05
_LONGEST_RETRY_S = 30.0


class Admission:
    """Counts what is admitted and not yet answered, and its bytes. Belongs to the event loop."""

    def __init__(self, *, limit: int | None, noun: str, owner: str, max_bytes: int | None = None) -> None:
        """Starts with nothing admitted.

        Args:
            limit: How many may be admitted at once; None: any number.
            noun: What is counted, for messages, such as "texts".
            owner: Who takes it on, for messages, such as the name of a model.
            max_bytes: How many bytes they may have together; None: any number.
        """
        self._limit = limit
        self._max_bytes = max_bytes
        self._noun = noun
        self._owner = owner
        self._num_admitted = 0
        self._num_bytes = 0
        self._mean_held_s = _SHORTEST_RETRY_S

    @property
    def num_admitted(self) -> int:
        """How many are admitted and not yet answered."""
        return self._num_admitted

    @contextmanager
    def admit(self, count: int, num_bytes: int = 0) -> Iterator[None]:
        """Holds a permit for `count` inputs of `num_bytes` together.

        Inputs of more bytes than the limit are admitted when nothing else is.

        Raises:
            OverloadedError: There is no room; it says when to come back.
        """
        self._check(count, num_bytes)
        began = time.monotonic()
        self._num_admitted += count
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_admitted -= count
            self._num_bytes -= num_bytes
            self._mean_held_s += _SMOOTHING * (time.monotonic() - began - self._mean_held_s)

    def _check(self, count: int, num_bytes: int) -> None:
        if self._limit is not None and self._num_admitted + count > self._limit:
            raise self._overload(f"{self._num_admitted} {self._noun} waiting", self._limit, count)
        if self._max_bytes is not None and self._num_admitted and self._num_bytes + num_bytes > self._max_bytes:
            waiting = f"{self._num_bytes} bytes of {self._noun} waiting"
            raise self._overload(waiting, self._max_bytes, num_bytes)

    def _overload(self, waiting: str, limit: int, brought: int) -> OverloadedError:
        # After the mean time that a permit is held, most of what waits now has been answered.
        retry_after_s = min(max(self._mean_held_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
        return OverloadedError(
            f"{self._owner} has {waiting}, the limit is {limit} and this call brings {brought}; "
            f"try again in {retry_after_s:.2f} s",
            retry_after_s,
        )

    def __repr__(self) -> str:
        limit = "any number" if self._limit is None else self._limit
        return f"Admission({self._num_admitted} of {limit} {self._noun}, {self._num_bytes} bytes)"
