"""The report of translation, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from generation_table import NAME_WIDTH, cells, load_keys, row_lines, verdict_lines

_SERVED_FIGURES = {
    "latency_p50_ms": "latency p50, ms",
    "latency_p99_ms": "latency p99, ms",
    "client_cores": "cores of the client",
}


def format_report(report: Mapping[str, Any]) -> Iterator[str]:
    """The figures in lines."""
    loads = load_keys(report)
    yield ""
    yield "target tokens/s".ljust(NAME_WIDTH) + "".join(f"{f'{case} x {calls}':>13}" for case, calls in loads)
    for row in report["rows"]:
        yield from row_lines(row, loads)
    yield ""
    yield "headway int8, served, times the row (median of the rounds' ratios)"
    for row in report["rows"]:
        yield f"{row['name']:<{NAME_WIDTH}}" + cells(row, loads, "headway_times", "{:.2f}")
    for row in report["rows"]:
        if row["kind"] == "served":
            yield ""
            yield row["name"]
            for figure, title in _SERVED_FIGURES.items():
                yield f"  {title:<{NAME_WIDTH - 2}}" + cells(row, loads, figure, "{:.3g}")
    yield ""
    for precision, memory in report["memory"].items():
        yield (
            f"resident memory, {precision}: {memory['peak_resident_mib']:,.0f} MiB at most = "
            f"{memory['weights_mib']:,.0f} weights + {memory['cache_mib']:,.0f} caches + {memory['beyond_mib']:,.0f}"
        )
    yield ""
    yield from verdict_lines(report)
