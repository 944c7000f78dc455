"""HTML page of one report, or of two side by side; self-contained, without network access."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from headway_load.report import Report, compare, format_report, histogram

Point = tuple[float, float]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 620, 280, 60, 40, 10
_LOG_FROM_RATIO = 30.0
"""Ratio of largest to smallest value from which a vertical axis is logarithmic."""
_PERCENTILES = [
    *range(100),
    *(99 + tenth / 10 for tenth in range(1, 10)),
    *(99.9 + hundredth / 100 for hundredth in range(1, 10)),
    *(99.99 + thousandth / 1000 for thousandth in range(1, 10)),
]
_TOKEN_COLUMNS = (("first_token", "p95"), ("token_gap", "p99"))
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #8a929b; --rule: #d9dde1; --ground: #fff;
  --c0: #2563a8; --c1: #c2571a; --c2: #2f7d4f; --c3: #8e3b8a; --c4: #a8872a; --c5: #3a8a96;
  --good: #2f7d4f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --faint: #8b949e; --rule: #343a41; --ground: #15181c;
  --c0: #6fa8e0; --c1: #e8925a; --c2: #6fbf8e; --c3: #c984c5; --c4: #d4b65c; --c5: #70bcc7;
  --good: #6fbf8e; --bad: #f0837b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 1320px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.note, figcaption { color: var(--faint); margin: .2rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { text-align: right; padding: .2rem .8rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.good { color: var(--good); } .bad { color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1.5rem; }
figure { margin: 0; } figure h3 { font-size: 1rem; margin: 0 0 .3rem; } svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--faint); } .axis { stroke: var(--rule); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .key { margin-right: 1rem; }
.key i { display: inline-block; width: 1em; height: .25em; vertical-align: middle; margin-right: .35em; }
pre { overflow-x: auto; font-size: 13px; }
"""


class Line(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    is_dots: bool = False


def make_page(reports: Mapping[str, Report]) -> str:
    """Returns the HTML of one report, or the comparison of two, by name."""
    title = "Load test" if len(reports) == 1 else "Load tests: " + " and ".join(reports)
    parts = [f"<h1>{escape(title)}</h1>"]
    for name, report in reports.items():
        heading = f"{name}: " if len(reports) > 1 else ""
        parts.append(f'<p class="note">{escape(heading + _subtitle(report))}</p>')
    if len(reports) == 2:
        parts.append(_comparison_table(reports))
    for name, report in reports.items():
        if len(reports) > 1:
            parts.append(f"<h2>{escape(name)}</h2>")
        parts += [_objectives_table(report), _figures_table(report)]
    parts.append(f'<h2>Drawn</h2><div class="charts">{"".join(_charts(reports))}</div>')
    for name, report in reports.items():
        plan = json.dumps({"plan": report["plan"], "client": report["client"]}, indent=2, ensure_ascii=False)
        text = "\n".join(format_report(report))
        parts.append(
            f"<details><summary>{escape(name)}: figures as text, plan and client</summary>"
            f"<pre>{escape(text)}\n\n{escape(plan)}</pre></details>"
        )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _subtitle(report: Report) -> str:
    return (
        f"{report['server']}, {report['started_at']}. {report['summary']}. "
        f"Latency counts from {report['latency_counts_from']}."
    )


def _objectives_table(report: Report) -> str:
    if not report["objectives"]:
        return ""
    rows = [
        [each["objective"], f"{_number(each['value'])} {each['unit']}", "met" if each["met"] else "missed"]
        for each in report["objectives"]
    ]
    return f"<h2>Objectives</h2>{_table(['objective', 'measured', ''], rows)}"


def _figures_table(report: Report) -> str:
    columns = ["calls", "ok", "failed", "not sent", "calls/s", "goodput/s", "tokens/s"]
    keys = ["call_count", "ok_count", "error_count", "not_sent_count", "calls_per_s", "goodput_per_s", "tokens_per_s"]
    times = ["p50", "p95", "p99", "p99_9", "max"]
    rows = []
    all_calls = [report | {"name": "all calls"}] if len(report["workloads"]) > 1 else []
    for figures in [*report["workloads"], *all_calls]:
        row = [figures["name"], *(_number(figures[key]) for key in keys)]
        row += [_number((figures["latency_ms"] or {}).get(key)) for key in times]
        row += [_number((figures[f"{name}_ms"] or {}).get(key)) for name, key in _TOKEN_COLUMNS]
        rows.append(row)
    names = [f"{key.replace('_', '.')}, ms" for key in times]
    return "<h2>Figures</h2>" + _table(
        ["workload", *columns, *names, *(f"{name.replace('_', ' ')} {key}, ms" for name, key in _TOKEN_COLUMNS)], rows
    )


def _comparison_table(reports: Mapping[str, Report]) -> str:
    rows = [
        [f"{workload}: {figure}" if workload else figure, _number(before), _number(after), _percent(change)]
        for workload, figure, before, after, change in compare(*reports.values())
    ]
    return f"<h2>Compared</h2>{_table(['figure', *reports, 'change'], rows)}"


def _charts(reports: Mapping[str, Report]) -> Iterable[str]:
    yield from _distributions(reports)
    over_time = [("due_per_s", "due"), ("calls_per_s", "answered"), ("failed_per_s", "failed")]
    yield _chart("Calls per second", _over_time(reports, over_time), x_title="seconds", y_title="calls/s")
    yield _chart("Latency over time", _latency_over_time(reports), x_title="seconds", y_title="ms")
    for name, report in reports.items():
        if search := report["search"]:
            lines = [
                Line(verdict, points, is_dots=True)
                for verdict, met in (("met", True), ("missed", False))
                if (points := _probe_points(search, met=met))
            ]
            title = "Rates that were tried" if len(reports) == 1 else f"Rates that were tried: {name}"
            yield _chart(title, lines, x_title="calls/s", y_title="p99, ms")


def _probe_points(search: dict[str, Any], *, met: bool) -> list[Point]:
    probes = [probe for probe in search["probes"] if probe["met"] is met and probe["latency_ms"]]
    return [(probe["rate_per_s"], probe["latency_ms"]["p99"]) for probe in probes]


def _distributions(reports: Mapping[str, Report]) -> Iterable[str]:
    titles = {"latency": "Latency", "first_token": "Time to the first token", "token_gap": "Gap between tokens"}
    for key, title in titles.items():
        lines = []
        for name, report in reports.items():
            for figures in report["workloads"]:
                if (times := histogram(figures, key)) is not None:
                    least_share = 1 / len(times)
                    points = [
                        (-math.log10(1 - percentile / 100), times.percentile_ms(percentile))
                        for percentile in _PERCENTILES
                        if 1 - percentile / 100 >= least_share
                    ]
                    lines.append(Line(figures["name"] if len(reports) == 1 else f"{name}: {figures['name']}", points))
        ticks = [(-math.log10(1 - percentile / 100), f"p{percentile:g}") for percentile in (0, 50, 90, 99, 99.9, 99.99)]
        if lines:
            yield _chart(f"{title} by percentile", lines, x_title="percentile", y_title="ms", x_ticks=ticks)


def _over_time(reports: Mapping[str, Report], names: Sequence[tuple[str, str]]) -> list[Line]:
    return [
        Line(name if len(reports) == 1 else f"{report_name}: {name}", _points(report["series"], key))
        for report_name, report in reports.items()
        for key, name in names
        if any(report["series"][key])
    ]


def _latency_over_time(reports: Mapping[str, Report]) -> list[Line]:
    """Returns the percentiles of the only workload, or the 99th of each."""
    if all(len(report["workloads"]) == 1 for report in reports.values()):
        return _over_time(reports, [("p50_ms", "p50"), ("p99_ms", "p99"), ("max_ms", "max")])
    return [
        Line(": ".join([name] * (len(reports) > 1) + [workload["name"], "p99"]), _points(workload["series"], "p99_ms"))
        for name, report in reports.items()
        for workload in report["workloads"]
    ]


def _points(series: dict[str, Any], key: str) -> list[Point]:
    places = enumerate(series[key])
    return [((number + 0.5) * series["interval_s"], value) for number, value in places if value is not None]


def _chart(
    title: str, lines: Sequence[Line], *, x_title: str, y_title: str, x_ticks: Sequence[tuple[float, str]] = ()
) -> str:
    """Draws lines as SVG. Each point shows its value under the pointer."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x_end = max(x for x, _ in points) * (1.05 if any(line.is_dots for line in lines) else 1) or 1.0
    y_values = [y for _, y in points if y > 0] or [1.0]
    is_log = max(y_values) / min(y_values) > _LOG_FROM_RATIO and y_title != "calls/s"
    y_begin, y_end = (10 ** math.floor(math.log10(min(y_values))) if is_log else 0.0), max(y_values) * 1.05

    def x_at(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 10) * min(1.0, value / x_end)

    def y_at(value: float) -> float:
        share = value / y_end
        if is_log:
            share = math.log(max(value, y_begin) / y_begin) / math.log(y_end / y_begin)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share

    drawn = []
    for value, text in [tick for tick in x_ticks or _ticks(0.0, x_end) if tick[0] <= x_end]:
        drawn.append(f'<text x="{x_at(value):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{text}</text>')
    for value, text in _log_ticks(y_begin, y_end) if is_log else _ticks(0.0, y_end):
        y = y_at(value)
        drawn.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    drawn.append(f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 6}" text-anchor="end">{escape(x_title)}</text>')
    drawn.append(f'<text x="4" y="{_HEIGHT - 6}">{escape(y_title)}{", logarithmic" if is_log else ""}</text>')
    keys = []
    for number, line in enumerate(lines):
        colour = f"var(--c{number % 6})"
        drawn.append(_draw(line, colour, x_at, y_at))
        keys.append(f'<span class="key"><i style="background:{colour}"></i>{escape(line.name)}</span>')
    return (
        f"<figure><h3>{escape(title)}</h3>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(drawn)}</svg><figcaption>{''.join(keys)}</figcaption></figure>"
    )


def _draw(line: Line, colour: str, x_at: Callable[[float], float], y_at: Callable[[float], float]) -> str:
    places = [(x_at(x), y_at(y), y) for x, y in line.points]
    path = "" if line.is_dots else " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    radius = 5 if line.is_dots else 3
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" fill-opacity="{1 if line.is_dots else 0}">'
        f"<title>{escape(line.name)}: {value:.4g}</title></circle>"
        for x, y, value in places
    )
    return f'<polyline class="line" style="stroke:{colour}" points="{path}"/>{marks}'


def _ticks(begin: float, end: float) -> list[tuple[float, str]]:
    """Returns about five round numbers."""
    rough = (end - begin) / 5
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [(begin + number * step, f"{begin + number * step:g}") for number in range(int((end - begin) / step) + 1)]


def _log_ticks(begin: float, end: float) -> list[tuple[float, str]]:
    decades = range(round(math.log10(begin)), math.floor(math.log10(end)) + 1)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,)
    return [
        (10.0**decade * factor, f"{10.0**decade * factor:g}")
        for decade in decades
        for factor in factors
        if 10.0**decade * factor <= end
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heading = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{heading}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    style = {"met": ' class="good"', "missed": ' class="bad"'}.get(text, "")
    return f"<td{style}>{escape(text)}</td>"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f} %"
