"""What running streams notice of newcomers, and newcomers of running streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from prompts import PromptSource
from streams import Call, StreamCaller, caller, gaps_within, run_until

NUM_RUNNING = 31
NEWCOMER_TOKENS = 256
RUNNING_TOKENS = 128
"""Of the prompts of running streams; their answers fill the model's length, so that none ends meanwhile."""
NEWCOMER_NEW_TOKENS = 16
"""Few, so that a newcomer has left its slot before the next one comes."""


def measure_latency(
    address: str,
    model: str,
    *,
    newcomers: PromptSource,
    running: PromptSource,
    running_new_tokens: int,
    seconds: float,
    period_s: float = 1.0,
) -> dict[str, Any]:
    """Measures an idle server, then one with `NUM_RUNNING` streams and a newcomer every `period_s`.

    Returns:
        `idle_first_token_ms`, `first_token_ms` of the newcomers (`median`, `p95`, `count`), and `gap_ms` between tokens
        of the running streams (`median`, `p99`, `max`, `count`).
    """
    return asyncio.run(_measure(address, model, newcomers, running, running_new_tokens, seconds, period_s))


async def _measure(
    address: str,
    model: str,
    newcomers: PromptSource,
    running: PromptSource,
    running_new_tokens: int,
    seconds: float,
    period_s: float,
) -> dict[str, Any]:
    count = max(2, round(seconds / period_s))
    calls: list[Call] = []
    arrivals: list[Call] = []
    async with caller(address, model) as stream_caller:
        idle = [await _newcomer(stream_caller, newcomers) for _ in range(count)]
        done = asyncio.Event()

        async def keep_busy() -> None:
            while True:
                call = Call(time.perf_counter())
                calls.append(call)
                async for _ in stream_caller.tokens(running.take(1)[0], running_new_tokens, call):
                    pass

        async def newcomers_come() -> None:
            while sum(bool(call.token_times_s) for call in calls) < NUM_RUNNING:
                await asyncio.sleep(0.01)
            asked = []
            for _ in range(count):
                asked.append(asyncio.ensure_future(_newcomer(stream_caller, newcomers)))
                await asyncio.sleep(period_s)
            arrivals.extend(await asyncio.gather(*asked))
            done.set()
            await asyncio.Event().wait()

        await run_until(done, [*(keep_busy() for _ in range(NUM_RUNNING)), newcomers_come()])
    gaps_ms = gaps_within(calls, arrivals[0].sent_s, arrivals[-1].token_times_s[-1])
    return {
        "idle_first_token_ms": _spread([call.first_token_s * 1e3 for call in idle], 95),
        "first_token_ms": _spread([call.first_token_s * 1e3 for call in arrivals], 95),
        "gap_ms": _spread(gaps_ms, 99) | {"max": round(max(gaps_ms), 3)},
    }


async def _newcomer(stream_caller: StreamCaller, prompts: PromptSource) -> Call:
    return await stream_caller.ask(prompts.take(1)[0], NEWCOMER_NEW_TOKENS)


def _spread(values: Sequence[float], percentile: int) -> dict[str, float]:
    return {
        "median": round(float(np.median(values)), 3),
        f"p{percentile}": round(float(np.percentile(values, percentile)), 3),
        "count": len(values),
    }
