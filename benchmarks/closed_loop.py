"""Callers that each wait for their answer before they ask again, and what is counted of them.

It is used by the processes of the peers too, in environments without headway: nothing of it is imported here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

WARM_UP_SHARE = 0.25
"""Of a measurement's time that passes before it, with the same callers."""


async def measure_callers(
    ask: Callable[[int], Awaitable[None]], *, num_callers: int, seconds: float, min_answers: int = 0
) -> dict[str, Any]:
    """Keeps callers busy for a while.

    A call that was running when the measured window began or ended counts by the part of its time that lies within.

    Args:
        ask: Makes the call of a running number and waits for its answer.
        num_callers: Calls at a time.
        seconds: The shortest window.
        min_answers: Answers that the window waits for, if that takes longer.

    Returns:
        `requests_per_s`, `latency_p50_ms`, `latency_p99_ms` and `call_count`, of calls that ended in the window.
    """
    spans: list[tuple[float, float]] = []
    numbers = iter(range(1 << 62))

    async def call_again_and_again() -> None:
        while True:
            sent_s = time.perf_counter()
            await ask(next(numbers))
            spans.append((sent_s, time.perf_counter()))

    callers = [asyncio.ensure_future(call_again_and_again()) for _ in range(num_callers)]
    try:
        await _sleep(seconds * WARM_UP_SHARE, callers)
        while len(spans) < num_callers:  # until everybody was answered once, on average
            await _sleep(0.01, callers)
        start_s, num_before = time.perf_counter(), len(spans)
        await _sleep(seconds, callers)
        while len(spans) - num_before < min_answers:
            await _sleep(0.05, callers)
        end_s = time.perf_counter()
        # Calls that run at the end count by their part, so their ends must be known.
        num_after = len(spans)
        while len(spans) - num_after < num_callers:
            await _sleep(0.005, callers)
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    return _figures(spans, start_s, end_s)


async def _sleep(seconds: float, callers: list[asyncio.Future[None]]) -> None:
    """Sleeps, unless a caller fails: its error is raised."""
    done, _ = await asyncio.wait(callers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for caller in done:
        caller.result()


def _figures(spans: list[tuple[float, float]], start_s: float, end_s: float) -> dict[str, Any]:
    parts = (max(0.0, min(ended, end_s) - max(sent, start_s)) / (ended - sent) for sent, ended in spans)
    latencies_ms = sorted((ended - sent) * 1e3 for sent, ended in spans if start_s <= ended <= end_s)
    return {
        "requests_per_s": sum(parts) / (end_s - start_s),
        "latency_p50_ms": percentile(latencies_ms, 50),
        "latency_p99_ms": percentile(latencies_ms, 99),
        "call_count": len(latencies_ms),
    }


def percentile(ascending: list[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed (the nearest rank)."""
    rank = -(-len(ascending) * percent // 100)
    return ascending[max(0, int(rank) - 1)]
