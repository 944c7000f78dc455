"""What watching a server costs: python -m benchmarks.monitoring [--rounds 12] [--seconds 2] [--only metrics].

A server for each way of watching it, called in turn by 32 callers that send one text each to `ag-news`, round after
round. The steady figure is the server's processor time a call; calls a second move with whatever else the machine does.
Ratios are medians over the rounds of what a server took beside the one that is not watched in the same round; a second
server that is not watched shows how much of them is chance, and so does the interval that holds each median with 95 %.
"""

import asyncio
import json
import math
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import grpc
import psutil
import typer
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.contestants.headway import running_server
from benchmarks.machine import describe_run
from benchmarks.worker import ROOT
from headway_client import AsyncClient

UNWATCHED = "nothing"
_CALLERS = 32
_TEXT = "Stocks fell on Monday as oil prices rose and investors waited for the central bank to speak."


class _Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans and drops them, as fast as a collector might."""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 (the protocol's)
        return trace_service_pb2.ExportTraceServiceResponse()


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 12,
    seconds: Annotated[float, typer.Option(min=0.1)] = 2.0,
    only: Annotated[str | None, typer.Option(help="The one way of watching that is measured.")] = None,
) -> None:
    """Measures and prints a table, and one JSON object as the last line."""
    with ExitStack() as stack:
        sink = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Sink(), sink)  # type: ignore[no-untyped-call]  # generated
        collector = f"http://127.0.0.1:{sink.add_insecure_port('127.0.0.1:0')}"
        sink.start()
        stack.callback(sink.stop, None)
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (store / "ag-news").symlink_to(ROOT / "models" / "ag-news")
        ways = {
            UNWATCHED: [],
            "nothing, again": [],
            "metrics": ["--metrics-port", "0"],
            "traces of 1 %": ["--trace-endpoint", collector, "--trace-sample-ratio", "0.01"],
            "traces of all": ["--trace-endpoint", collector],
            "access log": ["--access-log", "--log-level", "info", "--log-format", "json"],
        }
        ways = {way: flags for way, flags in ways.items() if only in (None, way) or way.startswith(UNWATCHED)}
        servers = {way: stack.enter_context(running_server(ROOT, store, flags)) for way, flags in ways.items()}
        figures: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(rounds + 1):  # the first one warms up
            turn = number % len(ways)  # nobody always comes after the same one
            for way in [*list(ways)[turn:], *list(ways)[:turn]]:
                server = servers[way]
                found = asyncio.run(_measure(server.address, server.process.process_id, seconds))
                if number:
                    figures[way].append(found)
    rows = {way: _summary(figures[way], figures[UNWATCHED]) for way in ways}
    typer.echo(
        f"{'watched by':<16}{'calls/s':>10}{'CPU us/call':>14}{'CPU, times':>12}{'95 %':>16}{'calls/s, times':>16}"
    )
    for way, row in rows.items():
        cells = f"{row['calls_per_s']:>10.0f}{row['cpu_us']:>14.1f}{row['cpu_ratio']:>12.3f}"
        cells += f"{row['cpu_ratio_low']:>10.3f}{row['cpu_ratio_high']:>6.3f}{row['rate_ratio']:>16.3f}"
        typer.echo(f"{way:<16}{cells}")
    typer.echo(json.dumps(describe_run() | {"rounds": rounds, "seconds": seconds, "rows": rows}))


async def _measure(address: str, process_id: int, seconds: float) -> tuple[float, float]:
    """Returns calls a second and the server's processor time a call, in seconds."""
    num_calls = 0
    process = psutil.Process(process_id)

    async with AsyncClient(address) as client:

        async def call() -> None:
            nonlocal num_calls
            while time.perf_counter() < end:
                await client.classify_text([_TEXT])
                num_calls += 1

        end = time.perf_counter() + 10
        await client.classify_text([_TEXT])
        began, before = time.perf_counter(), process.cpu_times()
        end = began + seconds
        await asyncio.gather(*(call() for _ in range(_CALLERS)))
        after, took_s = process.cpu_times(), time.perf_counter() - began
    cpu_s = after.user + after.system - before.user - before.system
    return num_calls / took_s, cpu_s / num_calls


def _summary(figures: list[tuple[float, float]], base: list[tuple[float, float]]) -> dict[str, float]:
    rates, times = zip(*figures, strict=True)
    base_rates, base_times = zip(*base, strict=True)
    ratios = sorted(a / b for a, b in zip(times, base_times, strict=True))
    # Order statistics around a median: as many values lie below it as heads in so many tosses.
    away = min(len(ratios) // 2, round(0.98 * math.sqrt(len(ratios))))
    return {
        "cpu_ratio_low": ratios[max(0, len(ratios) // 2 - away)],
        "cpu_ratio_high": ratios[min(len(ratios) - 1, len(ratios) // 2 + away)],
        "calls_per_s": statistics.median(rates),
        "cpu_us": statistics.median(times) * 1e6,
        "cpu_ratio": statistics.median(ratios),
        "rate_ratio": statistics.median(a / b for a, b in zip(rates, base_rates, strict=True)),
    }


if __name__ == "__main__":
    typer.run(main)
