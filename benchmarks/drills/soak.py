"""Minutes of calls, in which memory, threads, descriptors and latency stay as they were."""

import statistics
import threading
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import psutil

from benchmarks.drills.server import check, running
from headway_client.load import (
    LoadPlan,
    LoadProcesses,
    LoadTask,
    Outcome,
    TimeHistogram,
    Workload,
    make_workload,
    read_inputs,
)

_SAMPLE_PERIOD_S = 2.0
_WARMUP_S = 10.0
"""The server's caches and pools reach their size in it."""
_MAX_GROWTH_MIB = 8.0
"""Of resident memory, from the first third of the measured time to the last."""
_MAX_MORE_THREADS = 1
_MAX_MORE_DESCRIPTORS = 4
_MAX_TIMES_LATENCY = 1.5
"""How many times the first third's p99 the last third's may be: the machine is not still."""


class Kind(StrEnum):
    """What is called."""

    SMALL = "small"
    MIXED = "mixed"


class Sample(NamedTuple):
    """What the server had at a moment."""

    resident_mib: float
    thread_count: int
    descriptor_count: int


def plan_of(kind: Kind, seconds: float) -> LoadPlan:
    """Returns what is called: 8 callers of short texts, or 60 calls a second of every task."""
    if kind is Kind.SMALL:
        return LoadPlan(workloads=(_workload("classify-text"),), concurrency=8, duration_s=seconds, warmup_s=_WARMUP_S)
    greedy, drawn = {"max_new_tokens": 24}, {"max_new_tokens": 24, "temperature": 0.8}
    workloads = (
        _workload("classify-text", weight=20),
        _workload("classify-text", name="batches", weight=2, batch_size=16),
        _workload("classify-tokens", weight=12),
        _workload("classify-image", weight=10),
        _workload("embed-text", weight=4, options={"model": "ag-news"}),
        _workload("translate-text", weight=3, options={"model": "multi30k-en-de"}),
        _workload("translate-text", name="beams", weight=1, options={"model": "multi30k-en-de", "beam_size": 4}),
        _workload("translate-text", name="streams", weight=1, stream=True, options={"model": "multi30k-en-de"}),
        _workload("generate-text", weight=1, options=greedy),
        _workload("generate-text", name="drawn", weight=1, options=drawn),
    )
    return LoadPlan(workloads=workloads, rate_per_s=60, duration_s=seconds, warmup_s=_WARMUP_S, seed=1)


def _workload(task: str, **values: Any) -> Workload:
    return make_workload(LoadTask(task), read_inputs(LoadTask(task), None), **values)


def _watch(process_id: int, samples: list[Sample], ended: threading.Event) -> None:
    process = psutil.Process(process_id)
    while not ended.wait(_SAMPLE_PERIOD_S):
        with process.oneshot():
            memory_mib = process.memory_info().rss / 2**20
            samples.append(Sample(memory_mib, process.num_threads(), process.num_fds()))


def soak(kind: Kind, seconds: float) -> dict[str, Any]:
    """Calls a server on the shipped models for a time; returns what was seen, in thirds of the time.

    Raises:
        DrillError: Something grew, or a call failed.
    """
    samples: list[Sample] = []
    ended = threading.Event()
    with running() as server, LoadProcesses({"server": server.address}) as processes:
        assert server.process is not None, "it was started"
        watching = threading.Thread(target=_watch, args=(server.process.pid, samples, ended), name="soak-watch")
        watching.start()
        try:
            outcome = processes.run(plan_of(kind, seconds))
        finally:
            ended.set()
            watching.join()
    samples = samples[round(_WARMUP_S / _SAMPLE_PERIOD_S) :]
    thirds = [[statistics.median(values) for values in zip(*part, strict=True)] for part in _thirds(samples)]
    latency_ms = {each: _latency_ms(outcome, each) for each in ("p50", "p99")}
    errors = outcome.recorder.error_counts
    limits = (_MAX_GROWTH_MIB, _MAX_MORE_THREADS, _MAX_MORE_DESCRIPTORS)
    grew = [
        name
        for name, was, now, limit in zip(Sample._fields, thirds[0], thirds[2], limits, strict=True)
        if now - was > limit
    ]
    grew += ["p99"] * (latency_ms["p99"][2] > _MAX_TIMES_LATENCY * latency_ms["p99"][0])
    seen = {
        "drill": f"soak {kind}",
        "seconds": round(outcome.elapsed_s, 1),
        "calls": outcome.recorder.ok_count,
        "calls_per_s": round(outcome.recorder.completed_count / outcome.elapsed_s, 1),
        "errors": errors,
        **{
            name: [round(value, 1) for value in of_thirds]
            for name, *of_thirds in zip(Sample._fields, *thirds, strict=True)
        },
        **{f"{name}_ms": of_thirds for name, of_thirds in latency_ms.items()},
    }
    check(not grew and not errors, f"{', '.join(grew) or 'nothing'} grew: {seen}")
    return seen


def _thirds(values: Sequence[Any]) -> list[Sequence[Any]]:
    count = max(1, len(values) // 3)
    return [values[:count], values[count:-count] or values, values[-count:]]


def _latency_ms(outcome: Outcome, name: str) -> list[float]:
    """Returns a percentile of the calls that were due in each third of the time."""
    times = []
    for part in _thirds(sorted(outcome.recorder.intervals)):
        whole = TimeHistogram(2)
        for number in part:
            whole.add(outcome.recorder.intervals[number].latency)
        times.append(round(whole.statistic_ms(name), 2))
    return times
