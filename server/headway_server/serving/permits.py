"""How much a model takes on at once: a permit is asked for before any work is done for a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headway_server.errors import DrainingError, OverloadedError

_SMOOTHING = 0.1
_SHORTEST_RETRY_S = 0.05
_LONGEST_RETRY_S = 30.0


class Admission:
    """Counts the inputs that are admitted and not yet answered, and their bytes. Belongs to the event loop."""

    def __init__(self, *, limit: int, noun: str, owner: str, max_bytes: int | None = None) -> None:
        """`limit` inputs, called by `noun` in messages, of the model `owner`; of `max_bytes` together, if given."""
        self._limit = limit
        self._max_bytes = max_bytes
        self._noun = noun
        self._owner = owner
        self._num_admitted = 0
        self._num_bytes = 0
        self._mean_held_s = _SHORTEST_RETRY_S
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self, count: int, num_bytes: int = 0) -> Iterator[None]:
        """Holds a permit for a request of `count` inputs of `num_bytes` together.

        A request of more bytes than the limit by itself is admitted where there is no other.

        Raises:
            OverloadedError: There is no room; it says when to come back.
            DrainingError: Nothing new is taken.
        """
        self._check(count, num_bytes)
        began = time.monotonic()
        self._num_admitted += count
        self._num_bytes += num_bytes
        self._idle.clear()
        try:
            yield
        finally:
            self._num_admitted -= count
            self._num_bytes -= num_bytes
            self._mean_held_s += _SMOOTHING * (time.monotonic() - began - self._mean_held_s)
            if not self._num_admitted:
                self._idle.set()

    def _check(self, count: int, num_bytes: int) -> None:
        if self._draining:
            raise DrainingError("the server is shutting down; call another one, or this one when it is back")
        if self._num_admitted + count > self._limit:
            raise self._overload(f"{self._num_admitted} {self._noun} waiting", self._limit, count)
        if self._max_bytes is not None and self._num_admitted and self._num_bytes + num_bytes > self._max_bytes:
            waiting = f"{self._num_bytes} bytes of {self._noun} waiting"
            raise self._overload(waiting, self._max_bytes, num_bytes)

    def _overload(self, waiting: str, limit: int, brought: int) -> OverloadedError:
        # In the mean time a permit is held, most of what is waiting now will have been answered.
        retry_after_s = min(max(self._mean_held_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
        return OverloadedError(
            f"{self._owner} has {waiting}, the limit is {limit} and this call brings {brought}; "
            f"try again in {retry_after_s:.2f} s",
            retry_after_s,
        )

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits, at most `timeout_s`, until all that was admitted is answered."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return

    def __repr__(self) -> str:
        state = "draining" if self._draining else "open"
        return f"Admission({self._num_admitted}/{self._limit} {self._noun}, {self._num_bytes} bytes, {state})"
