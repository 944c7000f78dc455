"""How long an event loop is kept busy at a stretch, by the processor time of its own thread.

The time on the clock would count what other processes and other threads do, which no test can help. Objects of other
tests are kept from the garbage collector, as a server that is ready keeps its own from it.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class LongestTurn:
    """The callback that has kept the event loop busy for longest."""

    seconds: float = 0.0
    callback: str = ""

    def forget(self) -> None:
        """Begins anew."""
        self.seconds, self.callback = 0.0, ""


@contextmanager
def longest_turn() -> Iterator[LongestTurn]:
    """Measures every callback of the event loop of this thread, steps of tasks among them."""
    longest = LongestTurn()
    gc.collect()
    gc.freeze()
    run = asyncio.events.Handle._run

    def measured(handle: asyncio.Handle) -> Any:
        began = time.thread_time()
        try:
            return run(handle)
        finally:
            if (seconds := time.thread_time() - began) > longest.seconds:
                longest.seconds, longest.callback = seconds, repr(handle)

    asyncio.events.Handle._run = measured  # type: ignore[method-assign]
    try:
        yield longest
    finally:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
