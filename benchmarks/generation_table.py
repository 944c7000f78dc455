"""The report of generation, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAME_WIDTH = 30


def format_report(report: Mapping[str, Any]) -> Iterator[str]:
    """The figures in lines."""
    loads = load_keys(report)
    yield ""
    yield "tokens/s" + " " * (NAME_WIDTH - 8) + "".join(f"{f'{name} x {streams}':>13}" for name, streams in loads)
    for row in report["rows"]:
        yield from row_lines(row, loads)
    yield from _limits(report, loads)
    yield ""
    yield "headway int8, served, times the row (median of the rounds' ratios)"
    for row in report["rows"]:
        yield f"{row['name']:<{NAME_WIDTH}}" + cells(row, loads, "headway_times", "{:.2f}")
    yield from _streams(report, loads)
    yield from _latency(report)
    yield ""
    yield from verdict_lines(report)


def verdict_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What was aimed at, and whether it was reached."""
    for target in report["targets"]:
        verdict = "hit   " if target["hit"] else "MISSED"
        sign = ">=" if target["at_least"] else "<="
        yield f"{verdict} {target['name']}: {target['value']:.3g} (target {sign} {target['target']:.3g})"


def load_keys(report: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Returns case and streams of the columns."""
    found = [(load["case"], load["streams"]) for row in report["rows"] for load in row.get("loads", ())]
    return list(dict.fromkeys(found))


def row_lines(row: Mapping[str, Any], loads: list[tuple[str, int]]) -> Iterator[str]:
    """A row's tokens a second, and what is to be said of it."""
    if "error" in row:
        yield f"{row['name']:<{NAME_WIDTH}}{row['error']}"
        return
    yield f"{row['name']:<{NAME_WIDTH}}" + cells(row, loads, "tokens_per_s", "{:,.0f}")
    for load in row["loads"]:
        if "error" in load:
            yield f"  {load['case']} x {load['streams']}: {load['error']}"
    settings = {load["settings"]: None for load in row["loads"] if "settings" in load}
    for setting in settings:
        where = [f"{load['case']} x {load['streams']}" for load in row["loads"] if load.get("settings") == setting]
        yield f"  {', '.join(where)}: {setting}"


def cells(row: Mapping[str, Any], loads: list[tuple[str, int]], figure: str, form: str) -> str:
    """A figure of a row in the columns."""
    values = {(load["case"], load["streams"]): load.get(figure) for load in row.get("loads", ())}
    return "".join(f"{'-' if values.get(key) is None else form.format(values[key]):>13}" for key in loads)


def _limits(report: Mapping[str, Any], loads: list[tuple[str, int]]) -> Iterator[str]:
    bandwidth = report["bandwidth"]
    limits = {(limit["precision"], limit["streams"]): limit["tokens_per_s"] for limit in bandwidth["decode_limits"]}
    for precision in dict.fromkeys(precision for precision, _ in limits):
        cells = "".join(f"{limits[precision, streams]:>13,.0f}" for _, streams in loads)
        yield f"{f'{precision}: weights and cache read':<{NAME_WIDTH}}{cells}"
    yield f"  the last rows: decode steps at {bandwidth['gb_per_s']} GB/s, what memory was read with; no prefill"


def _streams(report: Mapping[str, Any], loads: list[tuple[str, int]]) -> Iterator[str]:
    titles = {
        "first_token_p50_ms": "first token p50, ms",
        "token_gap_p50_ms": "gap p50, ms",
        "token_gap_p99_ms": "gap p99, ms",
        "client_cores": "cores of the client",
    }
    for row in report["rows"]:
        if row["kind"] == "served":
            yield ""
            yield row["name"]
            for figure, title in titles.items():
                yield f"  {title:<{NAME_WIDTH - 2}}" + cells(row, loads, figure, "{:.3g}")


def _latency(report: Mapping[str, Any]) -> Iterator[str]:
    latency = report["latency"]
    gap, first, idle = latency["gap_ms"], latency["first_token_ms"], latency["idle_first_token_ms"]
    yield ""
    yield f"31 streams and a newcomer of 256 tokens every second, {first['count']} of them (int8):"
    yield f"  gap between tokens: median {gap['median']:.1f} ms, p99 {gap['p99']:.1f}, max {gap['max']:.1f}"
    yield (
        f"  newcomer's first token: median {first['median']:.1f} ms, p95 {first['p95']:.1f}; "
        f"on an idle server {idle['median']:.1f}, p95 {idle['p95']:.1f}"
    )
    yield ""
    for precision, memory in report["memory"].items():
        yield (
            f"resident memory, {precision}: {memory['peak_resident_mib']:,.0f} MiB at most = "
            f"{memory['weights_mib']:,.0f} weights + {memory['cache_mib']:,.0f} cache + {memory['beyond_mib']:,.0f}"
        )
    for variant in report["model"]["variants"]:
        quality = variant["quality"]
        if quality:
            yield (
                f"quality, {variant['precision']}: {quality['metric']} {quality['value']:.4f} on {quality['dataset']} "
                f"(random weights), logits off by at most {variant['max_relative_logit_error']:.1e}"
            )
