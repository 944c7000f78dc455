"""The picture of a report: bars or curves, drawn as SVG."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = {"served": "#1f6feb", "bare": "#8c959f", "peer": "#d0a215"}
_PANEL_WIDTH, _BAR_WIDTH, _MARGIN, _LABEL_WIDTH = 300, 248, 16, 190
_PANEL_HEIGHT = 160
_BAR_HEIGHT, _BAR_STEP, _TITLE_HEIGHT, _HEADER_HEIGHT = 12, 17, 30, 44


def draw(report: Mapping[str, Any], *, title: str, not_drawn: tuple[str, ...] = ()) -> str:
    """Draws a panel for each case and number of callers of a report; bars of a panel share a scale.

    Rows whose names are in `not_drawn` are left out.
    """
    rows = [row for row in report["rows"] if row["loads"] and row["name"] not in not_drawn]
    loads = [load for row in rows for load in row["loads"]]
    cases, callers = (list(dict.fromkeys(load[key] for load in loads)) for key in ("case", "callers"))
    panel_height = _TITLE_HEIGHT + _BAR_STEP * len(rows) + _MARGIN
    width = _LABEL_WIDTH + _PANEL_WIDTH * len(callers) + _MARGIN
    height = _HEADER_HEIGHT + panel_height * len(cases) + _MARGIN
    settings = report["settings"]
    about = f"{report['hardware']['processor']}, {settings['threads']} threads; medians of {settings['rounds']} rounds"
    parts = _head(width, height, title, f"{about}; {report['started_at'][:10]}")
    for number, case in enumerate(cases):
        top = _HEADER_HEIGHT + panel_height * number + _TITLE_HEIGHT
        for column, count in enumerate(callers):
            left = _LABEL_WIDTH + _PANEL_WIDTH * column
            values = {
                row["name"]: load[load["rate"]]
                for row in rows
                for load in row["loads"]
                if (load["case"], load["callers"]) == (case, count)
            }
            scale = _BAR_WIDTH / max(values.values(), default=1.0)
            parts.append(_text(left, top - 8, f"{case}, {count} caller{'s'[: count > 1]}", colour="#57606a"))
            for index, row in enumerate(rows):
                y, value = top + _BAR_STEP * index, values.get(row["name"], 0.0)
                bar = f'x="{left}" y="{y}" width="{value * scale:.1f}" height="{_BAR_HEIGHT}"'
                parts.append(f'<rect {bar} fill="{_COLOURS[row["kind"]]}"/>')
                parts.append(_text(left + value * scale + 4, y + _BAR_HEIGHT - 2, f"{value:,.0f}" if value else "-"))
                if column == 0:
                    parts.append(_text(_LABEL_WIDTH - 8, y + _BAR_HEIGHT - 2, row["name"], anchor="end"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_bars(panels: Mapping[str, Mapping[str, float]], *, title: str, about: str) -> str:
    """Draws panels side by side, each with a scale of its own; the first bar of a panel is headway's."""
    height = _HEADER_HEIGHT + _TITLE_HEIGHT + (_BAR_HEIGHT + _BAR_STEP) * max(map(len, panels.values())) + _MARGIN
    parts = _head(_MARGIN + _PANEL_WIDTH * len(panels), height, title, about)
    for column, (name, bars) in enumerate(panels.items()):
        left, top = _MARGIN + _PANEL_WIDTH * column, _HEADER_HEIGHT + _TITLE_HEIGHT
        scale = (_BAR_WIDTH - _MARGIN) / max(bars.values())
        parts.append(_text(left, top - 8, name, colour="#57606a"))
        for index, (bar, value) in enumerate(bars.items()):
            y = top + (_BAR_HEIGHT + _BAR_STEP) * index
            place = f'x="{left}" y="{y + 15}" width="{value * scale:.1f}" height="{_BAR_HEIGHT - 2}"'
            parts.append(_text(left, y + 11, bar))
            parts.append(f'<rect {place} fill="{_COLOURS["peer" if index else "served"]}"/>')
            parts.append(_text(left + value * scale + 4, y + 24, f"{value:,.3g}" if value < 10 else f"{value:,.0f}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _head(width: int, height: int, title: str, about: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_MARGIN, 20, title, size=14),
        _text(_MARGIN, 36, about, colour="#57606a"),
    ]


def _text(x: float, y: float, text: str, *, size: int = 11, colour: str = "#1f2328", anchor: str = "start") -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def draw_lines(curves: Mapping[str, Sequence[tuple[float, float]]], report: Mapping[str, Any], *, title: str) -> str:
    """Draws a panel for each curve: points of (count, value), counts on a logarithmic scale."""
    curves = {name: points for name, points in curves.items() if points}
    width, height = _MARGIN + (_PANEL_WIDTH + _MARGIN) * len(curves), _HEADER_HEIGHT + _PANEL_HEIGHT + 3 * _MARGIN
    about = f"{report['hardware']['processor']}; medians of {report['rounds']} rounds; {report['started_at'][:10]}"
    parts = _head(width, height, title, about)
    bottom = _HEADER_HEIGHT + _PANEL_HEIGHT
    for number, (name, points) in enumerate(curves.items()):
        left = _MARGIN + (_PANEL_WIDTH + _MARGIN) * number
        steps = max(1.0, math.log(points[-1][0] / points[0][0]))
        most = max(value for _, value in points) or 1.0
        places = [
            (left + 20 + (_PANEL_WIDTH - 60) * math.log(count / points[0][0]) / steps, bottom - 110 * value / most)
            for count, value in points
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(_text(left, _HEADER_HEIGHT + 12, name, colour="#57606a"))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS["served"]}" stroke-width="2"/>')
        for (x, y), (count, value) in zip(places, points, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS["served"]}"/>')
            parts.append(_text(x, y - 7, f"{value:,.0f}", anchor="middle"))
            parts.append(_text(x, bottom + 16, f"{count:g}", colour="#57606a", anchor="middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"
