"""Drives a server through the client's load tester, with a number of callers that each wait for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from headway_client import AsyncClient
from headway_client.load import OK, CallRecord, LoadPlan, LoadRunner, LoadTask, Sender
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

    Rates count what was done within the measured window: of a call that was running when it began or ended, the part of
    its duration that lies within. The load tester's own rate, calls begun in the window over the time until the last
    answer, is low where an answer takes long.

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
    figures: dict[str, Any] = {
        "requests_per_s": sum(_part_within(call, start_s, end_s) for call in answered) / plan.duration_s,
        "latency_p50_ms": recorder.latency.percentile_ms(50),
        "latency_p99_ms": recorder.latency.percentile_ms(99),
        "call_count": len(recorder.latency),
        "error_count": sum(call.outcome != OK for call in sender.calls),
    }
    if plan.task in (LoadTask.GENERATE_TEXT, LoadTask.TRANSLATE_TEXT):
        tokens = sum(_count_tokens(call, start_s, end_s) for call in answered)
        figures["tokens_per_s"] = tokens / plan.duration_s
    if plan.stream:
        figures |= {
            "first_token_p50_ms": recorder.first_token.percentile_ms(50),
            "first_token_p99_ms": recorder.first_token.percentile_ms(99),
            "token_gap_p50_ms": recorder.token_gap.percentile_ms(50),
            "token_gap_p99_ms": recorder.token_gap.percentile_ms(99),
        }
    return figures


def _part_within(call: CallRecord, start_s: float, end_s: float) -> float:
    """Part of a call's duration that lies within a window, 0 to 1."""
    overlap_s = min(call.ended_s, end_s) - max(call.sent_s, start_s)
    return max(0.0, overlap_s) / (call.ended_s - call.sent_s)


def _count_tokens(call: CallRecord, start_s: float, end_s: float) -> float:
    """Tokens of a call that came within a window; those of a call without a stream as evenly as it ran."""
    if not call.token_times_s:
        return call.token_count * _part_within(call, start_s, end_s)
    total = last_count = 0
    for time_s, count in call.token_times_s:
        total += (count - last_count) * (start_s <= time_s < end_s)
        last_count = count
    return total
