"""The load tester against independent ones: a loop, a clock and NumPy, on raw gRPC and on headway's client.

All three call the shipped `ag-news` in a closed loop and at a fixed rate, each from a process of its own, in turn,
round after round. Raw gRPC sends prepared bytes and reads no answers: what it is faster by is what the client takes.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from tests.drills.server import ROOT, running

from headway.v1.text_classification_service_pb2 import ClassifyTextRequest
from headway_client import AsyncClient
from headway_load import Arrivals, LoadPlan, LoadProcesses, LoadTask, make_workload, read_inputs

_METHOD = "/headway.v1.TextClassificationService/ClassifyText"
_WARMUP_S = 1.0
_PERCENTILES = (50, 90, 99)

Figures = dict[str, float]


async def _call_by_hand(
    address: str, seconds: float, callers: int | None, rate_per_s: float | None, *, raw: bool
) -> Figures:
    """Calls with as many callers, or at a rate; latency counts from the time a call was due."""
    payloads: list[Any] = list(read_inputs(LoadTask.CLASSIFY_TEXT, None).inputs)
    calls: list[tuple[float, float]] = []  # when they were due, and answered
    async with grpc.aio.insecure_channel(address) as channel, AsyncClient(address) as client:
        rpc: Any = client.classify_text
        if raw:
            rpc = channel.unary_unary(_METHOD)
            payloads = [ClassifyTextRequest(texts=[text]).SerializeToString() for text in payloads]
        await rpc(payloads[0])
        start_s = time.perf_counter() + _WARMUP_S
        end_s = start_s + seconds

        async def call(number: int, due_s: float) -> None:
            await rpc(payloads[number % len(payloads)])
            calls.append((due_s, time.perf_counter()))

        async def caller(number: int) -> None:
            while (now_s := time.perf_counter()) < end_s:
                await call(number, now_s)
                number += 1

        if rate_per_s is None:
            await asyncio.gather(*(caller(number) for number in range(callers or 1)))
        else:
            running = []
            for number in range(round((seconds + _WARMUP_S) * rate_per_s)):
                due_s = start_s - _WARMUP_S + number / rate_per_s
                # The event loop's own timers are late by up to 1 ms.
                while (wait_s := due_s - time.perf_counter()) > 0:  # noqa: ASYNC110 (a clock, not an event)
                    await asyncio.sleep(wait_s - 1e-3 if wait_s > 2e-3 else 0)
                running.append(asyncio.create_task(call(number, due_s)))
            await asyncio.gather(*running)
    latencies_ms = [(ended_s - due_s) * 1e3 for due_s, ended_s in calls if due_s >= start_s]
    figures = dict(
        zip((f"p{each}_ms" for each in _PERCENTILES), np.percentile(latencies_ms, _PERCENTILES), strict=True)
    )
    return {"calls_per_s": sum(start_s <= ended_s < end_s for _, ended_s in calls) / seconds, **figures}


def _by_hand(raw: bool, *how: Any) -> Figures:
    """The same in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run_by_hand, (raw, *how))


def _run_by_hand(raw: bool, *how: Any) -> Figures:
    return asyncio.run(_call_by_hand(*how, raw=raw))


def _by_load_tester(address: str, seconds: float, callers: int | None, rate_per_s: float | None) -> Figures:
    workload = make_workload(LoadTask.CLASSIFY_TEXT, read_inputs(LoadTask.CLASSIFY_TEXT, None))
    plan = LoadPlan(
        workloads=(workload,),
        concurrency=callers,
        rate_per_s=rate_per_s,
        arrivals=Arrivals.CONSTANT,
        duration_s=seconds,
        warmup_s=_WARMUP_S,
    )
    with LoadProcesses({"server": address}) as processes:
        outcome = processes.run(plan)
    times = {f"p{each}_ms": outcome.recorder.latency.percentile_ms(each) for each in _PERCENTILES}
    return {"calls_per_s": outcome.recorder.completed_count / outcome.elapsed_s, **times}


def compare(address: str, rounds: int, seconds: float, **how: Any) -> dict[str, Any]:
    """Measures in turn; returns of each figure the medians, and how many times the others' the load tester's was."""
    clients: dict[str, Callable[..., Figures]] = {
        "raw": partial(_by_hand, True),
        "client": partial(_by_hand, False),
        "load_tester": _by_load_tester,
    }
    measured: dict[str, list[Figures]] = {name: [] for name in clients}
    for number in range(rounds):
        for name in list(clients)[:: 1 if number % 2 else -1]:
            measured[name].append(clients[name](address, seconds, how.get("callers"), how.get("rate_per_s")))
    ours = measured.pop("load_tester")
    return {
        figure: {name: round(statistics.median(each[figure] for each in rows), 2) for name, rows in measured.items()}
        | {"load_tester": round(statistics.median(each[figure] for each in ours), 2)}
        | {
            f"times_{name}": sorted(round(a[figure] / b[figure], 2) for a, b in zip(ours, rows, strict=True))
            for name, rows in measured.items()
        }
        for figure in ours[0]
    }


def agreement(rounds: int, seconds: float) -> dict[str, Any]:
    """Compares the three with one caller, with eight, and at 100 and 200 calls a second."""
    ways: list[dict[str, Any]] = [{"callers": 1}, {"callers": 8}, {"rate_per_s": 100.0}, {"rate_per_s": 200.0}]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ag-news").symlink_to(ROOT / "models" / "ag-news")
        with running(store=Path(folder)) as server:
            return {
                "drill": "agreement",
                "ways": [how | compare(server.address, rounds, seconds, **how) for how in ways],
            }
