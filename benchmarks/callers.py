"""Drives a server through the client's load tester, with a number of callers that each wait for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from headway_client import AsyncClient
from headway_client.load import LoadPlan, LoadRunner, LoadTask
from headway_client.load.recorder import OK, CallRecord
from headway_client.load.sender import Sender
from headway_client.retry import NO_RETRIES


class _CountingSender(Sender):
    """Keeps every call, those of the warm-up included, so that what was answered in a window can be counted."""

    def __init__(self, client: AsyncClient, plan: LoadPlan, inputs: Sequence[str | bytes]) -> None:
        super().__init__(client, plan, inputs)
        self.calls: list[CallRecord] = []

    async def send(self, call: CallRecord) -> None:
        await super().send(call)
        self.calls.append(call)


def measure_calls(server: str, plan: LoadPlan, inputs: Sequence[str | bytes]) -> dict[str, Any]:
    """Runs a plan; returns rates a second, and latencies in milliseconds.

    Rates count what was answered within the measured window, whenever it was asked: the load tester's own count, of the
    calls begun within it divided by the time until the last answer, is low where an answer takes long.

    Raises:
        HeadwayError: The server is not there or refuses such requests.
    """
    return asyncio.run(_measure(server, plan, inputs))


async def _measure(server: str, plan: LoadPlan, inputs: Sequence[str | bytes]) -> dict[str, Any]:
    async with AsyncClient(server, timeout_s=plan.timeout_s, retry=NO_RETRIES) as client:
        sender = _CountingSender(client, plan, inputs)
        await sender.probe()
        runner = LoadRunner(plan, sender)
        start_s = asyncio.get_running_loop().time() + plan.warmup_s
        recorder = await runner.run()
    end_s = start_s + plan.duration_s
    answered = [call for call in sender.calls if call.outcome == OK]
    in_window = [call for call in answered if start_s <= call.ended_s < end_s]
    figures: dict[str, Any] = {
        "requests_per_s": len(in_window) / plan.duration_s,
        "latency_p50_ms": recorder.latency.percentile_ms(50),
        "latency_p99_ms": recorder.latency.percentile_ms(99),
        "call_count": len(recorder.latency),
        "error_count": sum(call.outcome != OK for call in sender.calls),
    }
    if plan.task in (LoadTask.GENERATE, LoadTask.TRANSLATE):
        figures["tokens_per_s"] = _count_tokens(answered, start_s, end_s) / plan.duration_s
    if plan.stream:
        figures |= {
            "first_token_p50_ms": recorder.first_token.percentile_ms(50),
            "first_token_p99_ms": recorder.first_token.percentile_ms(99),
            "token_gap_p50_ms": recorder.token_gap.percentile_ms(50),
            "token_gap_p99_ms": recorder.token_gap.percentile_ms(99),
        }
    return figures


def _count_tokens(calls: Sequence[CallRecord], start_s: float, end_s: float) -> int:
    """Counts tokens that arrived within a window: of a stream piece by piece, of other calls with the answer."""
    total = 0
    for call in calls:
        last_count = 0
        for time_s, count in call.token_times_s or [(call.ended_s, call.token_count)]:
            total += (count - last_count) * (start_s <= time_s < end_s)
            last_count = count
    return total
