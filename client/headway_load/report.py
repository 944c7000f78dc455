"""The report of a load test: an object for JSON, lines for people, and the comparison of two."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headway_load.objectives import Result
from headway_load.processes import Outcome
from headway_load.recorder import Interval, Recorder, TimeHistogram
from headway_load.search import Probe, best, judge

SCHEMA_VERSION = 2

Report = dict[str, Any]

_BUSY_SHARE = 0.85
"""CPU share above which a process may send late."""
_LATE_MS = 10.0
"""Send delay above which the load tester was late; an idle one sends within about a millisecond."""
_TIMES = {"latency": "latency", "first_token": "first token", "token_gap": "token gap", "send_delay": "send delay"}
_COUNTS = ("calls_per_s", "goodput_per_s", "inputs_per_s", "tokens_per_s")


def make_report(
    outcome: Outcome, server: str, started_at: datetime, *, processes: int = 1, probes: Sequence[Probe] = ()
) -> Report:
    """Returns the plan and all measurements; times are in milliseconds, rates per second.

    Args:
        outcome: The measurements.
        server: Address of the server.
        started_at: Start time.
        processes: Number of calling processes.
        probes: Rates that a search tried; `outcome` is of the best one.
    """
    plan = outcome.plan
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started_at.isoformat(timespec="seconds"),
        "server": server,
        "mode": "open" if plan.is_open else "closed",
        "latency_counts_from": "the time a call was due" if plan.is_open else "the sending of a call",
        "plan": plan.as_dict(),
        "summary": plan.describe(),
        "measured_s": round(outcome.elapsed_s, 3),
        **_figures(outcome.recorder, outcome.elapsed_s),
        "workloads": [
            {"name": workload.name, "weight": workload.weight, **_figures(recorder, outcome.elapsed_s)}
            for workload, recorder in zip(plan.workloads, outcome.recorders, strict=True)
        ],
        "objectives": [result._asdict() for result in judge(outcome)],
        "search": _search(probes) if probes else None,
        "client": {
            "version": version("headway-client"),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cpu_count": os.cpu_count(),
            "process_count": processes,
            "busy_share": round(outcome.busy_share, 3),
        },
    }


def _figures(recorder: Recorder, elapsed_s: float) -> dict[str, Any]:
    """Returns the measurements of all calls or of one workload."""
    errors = recorder.error_counts
    return {
        "model": asdict(recorder.model) if recorder.model else None,
        "call_count": recorder.outcomes.total(),
        "ok_count": recorder.ok_count,
        "good_count": recorder.good_count,
        "error_count": sum(errors.values()),
        "errors": errors,
        "not_sent_count": recorder.not_sent_count,
        "outstanding_limit_count": recorder.limit_count,
        "completed_count": recorder.completed_count,
        "calls_per_s": _rate(recorder.completed_count, elapsed_s),
        "goodput_per_s": _rate(recorder.good_count, elapsed_s),
        "inputs_per_s": _rate(recorder.input_count, elapsed_s),
        "tokens_per_s": _rate(recorder.token_count, elapsed_s),
        **{f"{name}_ms": getattr(recorder, name).summary_ms() for name in _TIMES},
        "series": _series(recorder),
        # In HdrHistogram's own format, in microseconds, so that reports can be drawn and added up.
        "histograms": {name: times.encode() for name in _TIMES if len(times := getattr(recorder, name))},
    }


def _series(recorder: Recorder) -> dict[str, Any]:
    """Returns the time series: an element for each interval of the measured phase."""
    measured_s, interval_s = recorder.end_s - recorder.start_s, recorder.interval_s
    num_intervals = math.ceil(measured_s / interval_s - 1e-6) if measured_s > 0 else 0
    parts = [
        (recorder.intervals.get(number, Interval()), min(interval_s, measured_s - number * interval_s))
        for number in range(num_intervals)
    ]
    return {
        "interval_s": round(interval_s, 6),
        "due_per_s": [_rate(part.due_count, length_s) for part, length_s in parts],
        "calls_per_s": [_rate(part.completed_count, length_s) for part, length_s in parts],
        "failed_per_s": [_rate(part.failed_count, length_s) for part, length_s in parts],
        **{
            f"{name}_ms": [part.latency.statistic_ms(name) if len(part.latency) else None for part, _ in parts]
            for name in ("p50", "p99", "max")
        },
    }


def _search(probes: Sequence[Probe]) -> dict[str, Any]:
    highest = best(list(probes))
    return {
        "max_rate_per_s": highest and round(highest.rate_per_s, 3),
        "probes": [
            {
                "rate_per_s": round(probe.rate_per_s, 3),
                "met": probe.met,
                "keeps_up": probe.keeps_up,
                "calls_per_s": _rate(probe.outcome.recorder.completed_count, probe.outcome.elapsed_s),
                "latency_ms": probe.outcome.recorder.latency.summary_ms(),
                "objectives": [result._asdict() for result in probe.results],
            }
            for probe in probes
        ],
    }


def read_report(file: Path) -> Report:
    """Reads a report.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no report of this version.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no report: {error}") from error
    found = report.get("schema_version") if isinstance(report, dict) else None
    if found != SCHEMA_VERSION:
        raise ValueError(f"{file} is no report of version {SCHEMA_VERSION}; its schema_version is {found}")
    return report  # type: ignore[no-any-return]  # checked above


def format_report(report: Report) -> list[str]:
    """Returns the measurements as lines of text."""
    lines = []
    for figures in report["workloads"]:
        if len(report["workloads"]) > 1:
            lines.append(f"==> {figures['name']} <==")
        lines += _format_figures(figures, report)
    if len(report["workloads"]) > 1:
        lines += ["==> all calls <==", *_format_figures(report, report)]
    client = report["client"]
    if client["busy_share"] > _BUSY_SHARE:
        lines.append(
            f"busy           a process of the load tester computed for {client['busy_share']:.0%} of its time and may "
            "have been late; use more --processes"
        )
    late_ms = (report["send_delay_ms"] or {}).get("p99", 0.0)
    if late_ms > _LATE_MS and not report["outstanding_limit_count"]:
        lines.append(
            f"sent late      1 % of the calls by more than {late_ms:.1f} ms, which is part of their latency: "
            "the load tester's machine was busy"
        )
    lines += [f"objective      {Result(**result)}" for result in report["objectives"]]
    if report["search"]:
        rate = report["search"]["max_rate_per_s"]
        lines.append(f"highest rate   {'none meets the objectives' if rate is None else f'{rate:g} calls/s'}")
    return lines


def _format_figures(figures: dict[str, Any], report: Report) -> list[str]:
    model = figures["model"]
    lines = [
        "model          " + (f"{model['name']} {model['version']} ({model['variant']})" if model else "-"),
        f"calls          {figures['ok_count']} ok, {figures['error_count']} failed, "
        f"due in {report['measured_s']:.1f} s",
        f"throughput     {figures['calls_per_s']:g} calls/s, {figures['inputs_per_s']:g} inputs/s"
        + (f", {figures['tokens_per_s']:g} tokens/s" if figures["tokens_per_s"] else ""),
    ]
    if report["plan"]["objectives"]:
        lines.append(f"goodput        {figures['goodput_per_s']:g} calls/s within the objectives' times")
    for name, title in _TIMES.items():
        if name != "send_delay" and (times := figures[f"{name}_ms"]):
            shown = "  ".join(f"{key.replace('_', '.')} {value:.1f}" for key, value in times.items())
            lines.append(f"{title:<14} {shown} ms")
    lines += [f"error          {code}: {count}" for code, count in figures["errors"].items()]
    if figures["outstanding_limit_count"]:
        lines.append(
            f"held back      {figures['outstanding_limit_count']} calls waited while "
            f"{report['plan']['max_outstanding']} were outstanding; their latency includes this wait"
        )
    if figures["not_sent_count"]:
        lines.append(
            f"not sent       {figures['not_sent_count']} calls were still held back at the end and have no latency"
        )
    return lines


def compare(before: Report, after: Report) -> Iterator[tuple[str, str, float | None, float | None, float | None]]:
    """Yields workload, figure, both values and the change in percent, for the figures of both reports."""
    pairs = [("", before, after)] if len(before["workloads"]) * len(after["workloads"]) != 1 else []
    later = {figures["name"]: figures for figures in after["workloads"]}
    pairs += [(each["name"], each, later[each["name"]]) for each in before["workloads"] if each["name"] in later]
    for name, first, second in pairs or [("", before, after)]:
        for figure in _COUNTS:
            if first[figure] or second[figure]:
                yield name, figure, first[figure], second[figure], _change(first[figure], second[figure])
        yield name, "errors_percent", _error_percent(first), _error_percent(second), None
        for times in ("latency", "first_token", "token_gap"):
            for key in ("p50", "p95", "p99", "p99_9"):
                was, now = ((each[f"{times}_ms"] or {}).get(key) for each in (first, second))
                if was is not None or now is not None:
                    yield name, f"{times}_{key}_ms", was, now, _change(was, now)


def histogram(figures: dict[str, Any], name: str) -> TimeHistogram | None:
    """Returns the histogram of a report's or a workload's times; None if there were none."""
    encoded = figures["histograms"].get(name)
    return None if encoded is None else TimeHistogram.decode(encoded)


def _error_percent(figures: dict[str, Any]) -> float | None:
    return 100 * figures["error_count"] / figures["call_count"] if figures["call_count"] else None


def _change(before: float | None, after: float | None) -> float | None:
    return None if not before or after is None else 100 * (after / before - 1)


def _rate(count: int, elapsed_s: float) -> float:
    return round(count / elapsed_s, 2) if elapsed_s else 0.0
