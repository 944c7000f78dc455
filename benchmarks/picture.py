"""The picture of a report: bars, drawn as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = {"served": "#1f6feb", "bare": "#8c959f", "peer": "#d0a215"}
_PANEL_WIDTH, _MARGIN, _LABEL_WIDTH, _VALUE_WIDTH = 300, 16, 190, 52
_BAR_HEIGHT, _BAR_STEP, _TITLE_HEIGHT, _HEADER_HEIGHT = 12, 17, 30, 44


def draw(report: Mapping[str, Any], *, title: str, left_out: tuple[str, ...] = ()) -> str:
    """Draws a panel for each case and number of callers of a report; bars of a panel share a scale.

    Args:
        report: What the benchmark prints as JSON.
        title: Of the whole picture.
        left_out: Names of rows that are not drawn.
    """
    rows = [row for row in report["rows"] if row["loads"] and row["name"] not in left_out]
    cases = list(dict.fromkeys(load["case"] for row in rows for load in row["loads"]))
    callers = sorted({load["callers"] for row in rows for load in row["loads"]})
    panel_height = _TITLE_HEIGHT + _BAR_STEP * len(rows) + _MARGIN
    width = _LABEL_WIDTH + _PANEL_WIDTH * len(callers) + _MARGIN
    height = _HEADER_HEIGHT + panel_height * len(cases) + _MARGIN
    hardware, settings = report["hardware"], report["settings"]
    about = f"{hardware['processor']}, {settings['threads']} threads; medians of {settings['rounds']} rounds"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_MARGIN, 20, title, size=14),
        _text(_MARGIN, 36, f"{about}; {report['started_at'][:10]}", colour="#57606a"),
    ]
    for number, case in enumerate(cases):
        top = _HEADER_HEIGHT + panel_height * number
        for index, row in enumerate(rows):
            y = top + _TITLE_HEIGHT + _BAR_STEP * index + _BAR_HEIGHT - 2
            parts.append(_text(_LABEL_WIDTH - 8, y, row["name"], anchor="end"))
        for column, count in enumerate(callers):
            left = _LABEL_WIDTH + _PANEL_WIDTH * column
            name = f"{case}, {count} caller{'s' if count > 1 else ''}"
            parts.append(_text(left, top + _TITLE_HEIGHT - 8, name, colour="#57606a"))
            parts += _panel(rows, (case, count), left, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rows: list[Mapping[str, Any]], panel: tuple[str, int], left: float, top: float) -> Iterator[str]:
    values = [
        next((load[load["rate"]] for load in row["loads"] if (load["case"], load["callers"]) == panel), None)
        for row in rows
    ]
    scale = (_PANEL_WIDTH - _VALUE_WIDTH) / max(filter(None, values), default=1.0)
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        y = top + _TITLE_HEIGHT + _BAR_STEP * index
        length = (value or 0.0) * scale
        yield f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{_BAR_HEIGHT}" fill="{_COLOURS[row["kind"]]}"/>'
        yield _text(left + length + 4, y + _BAR_HEIGHT - 2, "-" if value is None else f"{value:,.0f}")


def _text(x: float, y: float, text: str, *, size: int = 11, colour: str = "#1f2328", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )
