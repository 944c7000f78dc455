"""Who may come in: a bound on the sequences of an engine, taken before any work is done for a call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from headway_server.errors import DrainingError, InvalidInputError, OverloadedError

_FIRST_CALL_S = 1.0
_SMOOTHING = 0.1


class Admission:
    """Permits for sequences, running and waiting. For the event loop alone."""

    def __init__(self, *, name: str, num_slots: int, max_waiting: int) -> None:
        """Gives out at most `num_slots + max_waiting` permits at once, for the model `name`."""
        self._name = name
        self._num_slots = num_slots
        self._max_waiting = max_waiting
        self._num_permits = 0
        self._mean_call_s = _FIRST_CALL_S
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __repr__(self) -> str:
        state = "draining" if self._is_draining else "open"
        return f"Admission({self._name}, {state}, {self._num_permits} of {self._capacity} permits taken)"

    @property
    def _capacity(self) -> int:
        return self._num_slots + self._max_waiting

    @contextmanager
    def permit(self, count: int, field: str) -> Iterator[None]:
        """Holds permits for a call's `count` sequences until the call is over.

        Args:
            count: Sequences of the call.
            field: The request's field that holds them.

        Raises:
            DrainingError: The server is shutting down.
            InvalidInputError: The call alone has more sequences than fit.
            OverloadedError: There is no room for it now.
        """
        self._check(count, field)
        self._num_permits += count
        self._is_idle.clear()
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        try:
            yield
        finally:
            self._num_permits -= count
            self._mean_call_s += _SMOOTHING * (loop.time() - begun_at - self._mean_call_s)
            if self._num_permits == 0:
                self._is_idle.set()

    def _check(self, count: int, field: str) -> None:
        if self._is_draining:
            raise DrainingError("the server is shutting down; try another one")
        if count > self._capacity:
            raise InvalidInputError(
                field,
                f"has {count} elements; {self._name} takes at most {self._capacity} at once "
                f"({self._num_slots} that run and {self._max_waiting} that wait); split the call",
            )
        if self._num_permits + count > self._capacity:
            raise OverloadedError(
                f"{self._name} has {self._num_permits} inputs under way and room for {self._capacity} "
                f"({self._num_slots} that run and {self._max_waiting} that wait); {count} more do not fit now",
                retry_after_s=max(self._mean_call_s, 0.1),
            )

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new calls and waits for those under way.

        Returns:
            Whether all ended within `timeout_s` seconds.
        """
        self._is_draining = True
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
