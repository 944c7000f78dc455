"""The report of a load test: an object for JSON, and lines for people."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from typing import Any

from headway_client.load.recorder import TimeHistogram
from headway_client.load.runner import LoadRunner

SCHEMA_VERSION = 1


def make_report(runner: LoadRunner, server: str, started_at: datetime) -> dict[str, Any]:
    """Returns the plan and everything that was measured; times are milliseconds, rates per second."""
    recorder, elapsed_s = runner.recorder, runner.elapsed_s
    errors = recorder.error_counts
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started_at.isoformat(timespec="seconds"),
        "server": server,
        "model": asdict(recorder.model) if recorder.model else None,
        "mode": "open" if runner.plan.rate_per_s else "closed",
        "plan": asdict(runner.plan),
        "measured_s": round(elapsed_s, 3),
        "call_count": recorder.outcomes.total(),
        "ok_count": recorder.ok_count,
        "error_count": sum(errors.values()),
        "errors": errors,
        "not_sent_count": recorder.not_sent_count,
        "outstanding_limit_count": recorder.limit_count,
        "completed_count": recorder.completed_count,
        "calls_per_s": _rate(recorder.completed_count, elapsed_s),
        "inputs_per_s": _rate(recorder.input_count, elapsed_s),
        "tokens_per_s": _rate(recorder.token_count, elapsed_s),
        "latency_ms": recorder.latency.summary_ms(),
        "first_token_ms": recorder.first_token.summary_ms(),
        "token_gap_ms": recorder.token_gap.summary_ms(),
        "send_delay_ms": recorder.send_delay.summary_ms(),
        "client": {
            "version": version("headway-client"),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cpu_count": os.cpu_count(),
        },
    }


def format_report(runner: LoadRunner) -> list[str]:
    """Returns the measured figures in lines for people."""
    recorder, elapsed_s = runner.recorder, runner.elapsed_s
    failed_count = sum(recorder.error_counts.values())
    lines = [
        f"model          {recorder.model or '-'}",
        f"calls          {recorder.ok_count} ok, {failed_count} failed, due in {elapsed_s:.1f} s",
        f"throughput     {_rate(recorder.completed_count, elapsed_s):g} calls/s, "
        f"{_rate(recorder.input_count, elapsed_s):g} inputs/s"
        + (f", {_rate(recorder.token_count, elapsed_s):g} tokens/s" if recorder.token_count else ""),
        *_format_times("latency", recorder.latency),
        *_format_times("first token", recorder.first_token),
        *_format_times("token gap", recorder.token_gap),
        *(f"error          {code}: {count}" for code, count in recorder.error_counts.items()),
    ]
    if recorder.limit_count:
        lines.append(
            f"held back      {recorder.limit_count} calls waited while {runner.plan.max_outstanding} were outstanding; "
            "their latency includes this wait"
        )
    if recorder.not_sent_count:
        lines.append(
            f"not sent       {recorder.not_sent_count} calls were still held back at the end and have no latency"
        )
    return lines


def _format_times(name: str, times: TimeHistogram) -> list[str]:
    summary = times.summary_ms()
    if summary is None:
        return []
    figures = "  ".join(f"{key.replace('_', '.')} {value:.1f}" for key, value in summary.items())
    return [f"{name:<14} {figures} ms"]


def _rate(count: int, elapsed_s: float) -> float:
    return round(count / elapsed_s, 2) if elapsed_s else 0.0
