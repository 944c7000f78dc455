"""Waiting in a blocking and in an asyncio program: the pairs of names that the generated client exchanges."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from threading import Event
from time import sleep
from typing import TypeVar

__all__ = ["AsyncEvent", "Event", "async_call_all", "async_sleep", "call_all", "sleep"]

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")

MAX_CALLS_AT_ONCE = 4
"""Most concurrent calls of one method of the asyncio client."""

async_sleep = asyncio.sleep


class AsyncEvent(asyncio.Event):
    """An event with a timeout, like that of `threading`."""

    async def wait(self, timeout_s: float | None = None) -> bool:  # type: ignore[override]  # the time
        """Waits until the event is set or the time is over; returns True if it is set."""
        try:
            async with asyncio.timeout(timeout_s):
                await super().wait()
        except TimeoutError:
            return False
        return True


def call_all(function: Callable[[InputT], ResultT], inputs: Iterator[InputT]) -> list[ResultT]:
    """Calls a function with one input after the other; returns the results in order."""
    return [function(each) for each in inputs]


async def async_call_all(function: Callable[[InputT], Awaitable[ResultT]], inputs: Iterator[InputT]) -> list[ResultT]:
    """Calls a function with every input, `MAX_CALLS_AT_ONCE` at a time; returns the results in order.

    The inputs are made off the event loop, because that may read files. A failed call cancels the others.
    """
    results: dict[int, ResultT] = {}
    numbered: Iterator[tuple[int, InputT] | None] = enumerate(inputs)
    making = asyncio.Lock()

    async def call_some() -> None:
        while True:
            async with making:
                found = await asyncio.to_thread(next, numbered, None)
            if found is None:
                return
            number, each = found
            results[number] = await function(each)

    tasks = [asyncio.create_task(call_some()) for _ in range(MAX_CALLS_AT_ONCE)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[number] for number in sorted(results)]
