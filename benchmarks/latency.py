"""What running streams notice of newcomers, and newcomers of running streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from prompts import PromptSource
from streams import Call, StreamCaller, Target, gaps_within, run_until

NUM_RUNNING = 31
NEWCOMER_TOKENS = 256
RUNNING_TOKENS = 128
"""Of the prompts of running streams; their answers fill the model's length, so that few end meanwhile."""
NEWCOMER_NEW_TOKENS = 16
"""Few, so that a newcomer has left its slot before the next one comes."""
PERIOD_S = 1.0
"""From newcomer to newcomer."""


def measure_latency(
    target: Target, *, newcomers: PromptSource, running: PromptSource, running_new_tokens: int, num_newcomers: int
) -> dict[str, Any]:
    """Measures an idle server, then one with `NUM_RUNNING` streams and a newcomer every `PERIOD_S`.

    Returns:
        `idle_first_token_ms` and `first_token_ms` of newcomers (`median`, `p95`, `count`), and `gap_ms` between tokens
        of the running streams (`median`, `p99`, `max`, `count`).
    """
    return asyncio.run(_Experiment(target, newcomers, running, running_new_tokens, num_newcomers).run())


class _Experiment:
    """Streams that run, and newcomers."""

    def __init__(
        self,
        target: Target,
        newcomers: PromptSource,
        running: PromptSource,
        running_new_tokens: int,
        num_newcomers: int,
    ) -> None:
        self._target = target
        self._newcomers = newcomers
        self._running = running
        self._running_new_tokens = running_new_tokens
        self._num_newcomers = num_newcomers
        self._calls: list[Call] = []
        self._num_producing = 0
        self._all_produce = asyncio.Event()
        self._done = asyncio.Event()
        self._arrivals: list[Call] = []

    async def run(self) -> dict[str, Any]:
        async with self._target.connect() as caller:
            idle = [await self._newcomer(caller) for _ in range(self._num_newcomers)]
            streams = [self._keep_busy(caller) for _ in range(NUM_RUNNING)]
            await run_until(self._done, [*streams, self._let_newcomers_come(caller)])
        gaps_ms = gaps_within(self._calls, self._arrivals[0].sent_s, self._arrivals[-1].token_times_s[-1])
        return {
            "idle_first_token_ms": _spread([call.first_token_s * 1e3 for call in idle], 95),
            "first_token_ms": _spread([call.first_token_s * 1e3 for call in self._arrivals], 95),
            "gap_ms": _spread(gaps_ms, 99) | {"max": round(max(gaps_ms), 3)},
        }

    async def _keep_busy(self, caller: StreamCaller) -> None:
        while True:
            call = Call(time.perf_counter())
            self._calls.append(call)
            async for _ in caller.tokens(self._running.take(1)[0], self._running_new_tokens, call):
                if len(call.token_times_s) == 1:
                    self._num_producing += 1
                if self._num_producing >= NUM_RUNNING:
                    self._all_produce.set()

    async def _let_newcomers_come(self, caller: StreamCaller) -> None:
        await self._all_produce.wait()
        asked = []
        for _ in range(self._num_newcomers):
            asked.append(asyncio.ensure_future(self._newcomer(caller)))
            await asyncio.sleep(PERIOD_S)
        self._arrivals = await asyncio.gather(*asked)
        self._done.set()

    async def _newcomer(self, caller: StreamCaller) -> Call:
        return await caller.ask(self._newcomers.take(1)[0], NEWCOMER_NEW_TOKENS)


def _spread(values: Sequence[float], percentile: int) -> dict[str, float]:
    return {
        "median": round(float(np.median(values)), 3),
        f"p{percentile}": round(float(np.percentile(values, percentile)), 3),
        "count": len(values),
    }
