"""Many calls to one server, in which memory, threads, descriptors and latency stay as they were.

First small calls, so many of them, then calls of every task for a time. Every minute is a line of its own, written
when it is over: what came of its calls, and what the server had meanwhile.
"""

import math
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import psutil
from tests.drills.server import DrillError, Server, check, running

from headway_load import LoadPlan, LoadProcesses, LoadTask, Workload, make_workload, read_inputs

_SAMPLE_PERIOD_S = 2.0
_WARMUP_S = 10.0
"""The server's caches and pools reach their size in it."""
_MAX_GROWTH_MIB = 8.0
"""Of resident memory, from the first third of the minutes to the last."""
_MAX_MORE_THREADS = 1
_MAX_MORE_DESCRIPTORS = 4
_MAX_TIMES_LATENCY = 1.5
"""How many times the first third's p99 the last third's may be: the machine is not still."""
_CALLERS = 8


class Minute(NamedTuple):
    """What a minute of calls was like; medians, where it is of many moments."""

    calls: int
    failed: int
    calls_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_call: float
    """Processor time of the server."""
    resident_mib: float
    threads: float
    descriptors: float
    load_average: float
    """Of the machine: what else it did."""


def _small(rate_per_s: float | None) -> dict[str, Any]:
    """Short texts: as many as 8 callers get answered, or at a rate."""
    workloads = (_workload("classify-text"),)
    if rate_per_s is None:
        return {"workloads": workloads, "concurrency": _CALLERS}
    return {"workloads": workloads, "rate_per_s": rate_per_s}


def _mixed(rate_per_s: float) -> dict[str, Any]:
    """Every task."""
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
    return {"workloads": workloads, "rate_per_s": rate_per_s}


def _workload(task: str, **values: Any) -> Workload:
    return make_workload(LoadTask(task), read_inputs(LoadTask(task), None), **values)


class _Watch:
    """Looks at the server's process every two seconds, in a thread, within the `with` block."""

    def __init__(self, process_id: int) -> None:
        self._process = psutil.Process(process_id)
        self._samples: list[tuple[float, int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="soak-watch", daemon=True)

    def _look(self) -> None:
        while True:
            with self._process.oneshot():
                memory_mib = self._process.memory_info().rss / 2**20
                self._samples.append((memory_mib, self._process.num_threads(), self._process.num_fds()))
            if self._ended.wait(_SAMPLE_PERIOD_S):
                return

    def medians(self) -> list[float]:
        """Returns the medians of memory, threads and descriptors."""
        return [statistics.median(values) for values in zip(*self._samples, strict=True)]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


class _Soak:
    """Calls one server, minute after minute."""

    def __init__(self, server: Server, processes: LoadProcesses, minute_s: float) -> None:
        self._server = server
        self._processes = processes
        self._minute_s = minute_s

    def phase(
        self, name: str, plan: dict[str, Any], *, calls: float = math.inf, seconds: float = math.inf
    ) -> dict[str, Any]:
        """Makes calls until so many were answered or so much time is over; returns what was seen."""
        self._processes.run(LoadPlan(**plan, duration_s=_WARMUP_S, warmup_s=0))
        minutes: list[Minute] = []
        errors: Counter[str] = Counter()
        num_calls = 0
        began = time.monotonic()
        while calls > 0 and (left_s := seconds - (time.monotonic() - began)) > _SAMPLE_PERIOD_S:
            rate_per_s = minutes[-1].calls_per_s if minutes else 0.0
            length_s = min(self._minute_s, left_s, calls / rate_per_s + 0.1 if rate_per_s else math.inf)
            minute, codes = self._minute(LoadPlan(**plan, duration_s=length_s, warmup_s=0, seed=len(minutes)))
            errors.update(codes)
            if length_s >= self._minute_s / 2 or not minutes:
                minutes.append(minute)  # what is left over is too short for a p99
            calls, num_calls = calls - minute.calls, num_calls + minute.calls
            _say(f"{name} minute {len(minutes)}: {_line(minute)} {dict(codes) or ''}")
        return {
            "phase": name,
            "seconds": round(time.monotonic() - began),
            "calls": num_calls,
            "errors": dict(errors),
            **_judged(minutes),
        }

    def _minute(self, plan: LoadPlan) -> tuple[Minute, dict[str, int]]:
        process = self._server.process
        assert process is not None, "it was started"
        if process.poll() is not None:
            raise DrillError(f"the server ended: {self._server.log.read_text()[-2000:]}")
        cpu_s = self._server.cpu_s
        with _Watch(process.pid) as watch:
            outcome = self._processes.run(plan)
        recorder, errors = outcome.recorder, outcome.recorder.error_counts
        resident_mib, threads, descriptors = watch.medians()
        minute = Minute(
            recorder.ok_count,
            sum(errors.values()),
            recorder.ok_count / outcome.elapsed_s,
            recorder.latency.percentile_ms(50),
            recorder.latency.percentile_ms(99),
            1e3 * (self._server.cpu_s - cpu_s) / max(1, recorder.ok_count),
            resident_mib,
            threads,
            descriptors,
            os.getloadavg()[0],
        )
        return minute, errors


def _judged(minutes: list[Minute]) -> dict[str, Any]:
    """Holds the last third of the minutes against the first."""
    thirds = [Minute(*map(statistics.median, zip(*part, strict=True))) for part in _thirds(minutes)]
    first, last = thirds[0], thirds[-1]
    drifts = {
        "resident_mib": last.resident_mib - first.resident_mib > _MAX_GROWTH_MIB,
        "threads": last.threads - first.threads > _MAX_MORE_THREADS,
        "descriptors": last.descriptors - first.descriptors > _MAX_MORE_DESCRIPTORS,
        "p99_ms": last.p99_ms > _MAX_TIMES_LATENCY * first.p99_ms,
    }
    return {
        "thirds": {
            field: [round(getattr(third, field), 2) for third in thirds]
            for field in Minute._fields
            if field not in ("calls", "failed")
        },
        "p99_ms_by_minute": [round(minute.p99_ms, 1) for minute in minutes],
        "resident_mib_by_minute": [round(minute.resident_mib, 1) for minute in minutes],
        "drifts": [field for field, has_drifted in drifts.items() if has_drifted],
    }


def _thirds(minutes: Sequence[Minute]) -> list[Sequence[Minute]]:
    count = max(1, len(minutes) // 3)
    return [minutes[:count], minutes[count:-count] or minutes, minutes[-count:]]


def _line(minute: Minute) -> str:
    return (
        f"{minute.calls} calls ({minute.calls_per_s:.0f}/s), {minute.failed} failed, p50 {minute.p50_ms:.1f} ms, "
        f"p99 {minute.p99_ms:.1f} ms, {minute.cpu_ms_per_call:.2f} ms CPU a call, {minute.resident_mib:.1f} MiB, "
        f"{minute.threads:g} threads, {minute.descriptors:g} descriptors, load {minute.load_average:.1f}"
    )


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()  # a log file is read meanwhile


def soak(
    *,
    num_small_calls: int,
    mixed_s: float,
    small_rate_per_s: float | None = None,
    mixed_rate_per_s: float = 60.0,
    minute_s: float = 60.0,
) -> dict[str, Any]:
    """Calls a server on the shipped models: first small calls, then those of every task.

    Args:
        num_small_calls: How many small calls; 0: none.
        mixed_s: For how many seconds calls of every task are made; 0: not at all.
        small_rate_per_s: Small calls a second; None: as many as 8 callers get answered.
        mixed_rate_per_s: Calls of every task a second.
        minute_s: Length of what is measured and told as one, in seconds.

    Raises:
        DrillError: Something has drifted, a call failed, or the server ended.
    """
    phases = []
    with running() as server, LoadProcesses({"server": server.address}) as processes:
        run = _Soak(server, processes, minute_s)
        if num_small_calls:
            phases.append(run.phase("small", _small(small_rate_per_s), calls=num_small_calls))
        if mixed_s:
            phases.append(run.phase("mixed", _mixed(mixed_rate_per_s), seconds=mixed_s))
    seen = {"drill": "soak", "phases": phases}
    bad = [
        f"{phase['phase']}: {phase['drifts']} {phase['errors']}"
        for phase in phases
        if phase["drifts"] or phase["errors"]
    ]
    check(not bad, f"drifted or failed: {'; '.join(bad)}: {seen}")
    return seen
