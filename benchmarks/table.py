"""Figures of several rounds put together, and shown to people."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_COUNTS = ("call_count", "error_count")


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of every figure; counts are summed."""
    return {
        key: sum(figures[key] for figures in rounds)
        if key in _COUNTS
        else round(statistics.median(figures[key] for figures in rounds), 3)
        for key in rounds[0]
    }


def format_report(report: Mapping[str, Any]) -> Iterator[str]:
    """The figures in lines; all times are milliseconds."""
    server = report["server"]
    yield ""
    yield (
        f"server: ready after {server['start_s']['median']:.2f} s (median of {len(server['start_s']['all'])}), "
        f"{_number(server['ready_memory']['resident_mib'])} MiB resident then, "
        f"{_number(server['loaded_memory']['resident_mib'])} MiB after the load"
    )
    for model in report["models"]:
        yield ""
        yield f"{model['name']}/{model['version']} {model['variant']} on {model['device']}: {model['task']}"
        yield f"  inputs: {model['input_count']} {model['input_source']}"
        columns = [column for column in _COLUMNS if any(_value(row, column[0]) is not None for row in model["loads"])]
        yield "  " + "  ".join(f"{title:>8}" for _, title in columns)
        for row in model["loads"]:
            yield "  " + "  ".join(f"{_number(_value(row, path)):>{max(8, len(title))}}" for path, title in columns)


_COLUMNS = (
    ("callers", "callers"),
    ("requests_per_s", "requests/s"),
    ("latency_p50_ms", "p50 ms"),
    ("latency_p99_ms", "p99 ms"),
    ("first_token_p50_ms", "first p50"),
    ("first_token_p99_ms", "first p99"),
    ("token_gap_p50_ms", "gap p50"),
    ("token_gap_p99_ms", "gap p99"),
    ("tokens_per_s", "tokens/s"),
    ("limit.batch_size", "batch"),
    ("limit.rows", "rows"),
    ("limit.step_p50_ms", "step ms"),
    ("limit.inputs_per_s", "bare/s"),
    ("limit.tokens_per_s", "bare tokens/s"),
    ("share_of_limit", "share"),
    ("error_count", "errors"),
)
"""Where a figure is in a row, and its title."""


def _value(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3g}"
