"""An LRU cache bounded in bytes, with an optional time to live."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from headway_server.observers import CacheUsage

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_SLACK_S: Final = 0.01
"""Delay of the timer past the next expiry, in seconds."""


@dataclass(slots=True)
class _Entry(Generic[Value]):
    value: Value
    num_bytes: int
    used_at: float
    """By `time.monotonic`."""


class LruCache(Generic[Key, Value]):
    """Values by key. For the event loop's thread; `usage` is thread-safe."""

    def __init__(
        self, name: str, *, max_bytes: int, ttl_s: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts empty.

        Args:
            name: Name in the metrics.
            max_bytes: Capacity for all values; 0: no cache.
            ttl_s: Time to live in seconds since the last use; None: no limit.
            now: The clock.
        """
        self.name = name
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self._now = now
        self._entries: OrderedDict[Key, _Entry[Value]] = OrderedDict()  # the least recently used first
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = self._num_hits = self._num_misses = 0

    def get(self, key: Key) -> Value | None:
        """Returns a value, and counts a use and a hit; or None, and counts a miss."""
        self._forget_expired()
        entry = self._entries.get(key)
        if entry is None:
            self._num_misses += 1
            return None
        self._num_hits += 1
        entry.used_at = self._now()
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: Key, value: Value, num_bytes: int) -> bool:
        """Caches a value, in place of an older one of the key; False if it exceeds the capacity by itself.

        Args:
            key: Its key.
            value: The value.
            num_bytes: Its size.
        """
        self._forget_expired()
        self._forget(key)
        if num_bytes > self.max_bytes:
            return False
        self._entries[key] = _Entry(value, num_bytes, self._now())
        self._num_bytes += num_bytes
        while self._num_bytes > self.max_bytes:
            self._forget(next(iter(self._entries)))
        self._wait_for_oldest()
        return True

    def usage(self) -> CacheUsage:
        """Returns the present size, and hits and misses since the start."""
        return CacheUsage(self.name, self._num_bytes, self._num_hits, self._num_misses)

    def _forget(self, key: Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._num_bytes -= entry.num_bytes

    def _forget_expired(self) -> None:
        if self.ttl_s is None:
            return
        limit = self._now() - self.ttl_s
        while self._entries:
            key = next(iter(self._entries))
            if self._entries[key].used_at > limit:
                return
            self._forget(key)

    def _wait_for_oldest(self) -> None:
        """Sets a timer to evict expired values without a look-up."""
        if self.ttl_s is None or self._timer is not None or not self._entries:
            return
        oldest = next(iter(self._entries.values()))
        delay_s = oldest.used_at + self.ttl_s - self._now()
        self._timer = asyncio.get_running_loop().call_later(max(delay_s, 0.0) + _SLACK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._forget_expired()
        self._wait_for_oldest()

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"LruCache({self.name}: {len(self)} values, {self._num_bytes} of {self.max_bytes} bytes)"
