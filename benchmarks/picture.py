"""The picture of a report: bars, drawn as SVG."""

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = {"served": "#1f6feb", "bare": "#8c959f", "peer": "#d0a215"}
_PANEL_WIDTH, _BAR_WIDTH, _MARGIN, _LABEL_WIDTH = 300, 248, 16, 190
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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_MARGIN, 20, title, size=14),
        _text(_MARGIN, 36, f"{about}; {report['started_at'][:10]}", colour="#57606a"),
    ]
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


def _text(x: float, y: float, text: str, *, size: int = 11, colour: str = "#1f2328", anchor: str = "start") -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
