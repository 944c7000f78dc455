"""The picture of a report: bars, drawn as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = {"served": "#1f6feb", "bare": "#8c959f", "peer": "#d0a215"}
_PANEL_WIDTH, _MARGIN, _LABEL_WIDTH, _BAR_HEIGHT, _BAR_STEP, _TITLE_HEIGHT = 300, 16, 190, 12, 17, 30
_HEADER_HEIGHT = 44
_VALUE_WIDTH = 52
_FONT = 'font-family="system-ui, sans-serif"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where the bars are in a load of a report's row."""

    group: str = "case"
    """What panels below each other differ in."""
    number: str = "streams"
    """What panels beside each other differ in."""
    figure: str = "tokens_per_s"
    """What is drawn."""


_TOKENS = Keys()


def draw(report: Mapping[str, Any], *, title: str, panel_title: Callable[[str, int], str], keys: Keys = _TOKENS) -> str:
    """Draws one panel for each group and number of a report; bars of a panel share a scale.

    Args:
        report: With `rows`, `hardware`, `settings` and `started_at`.
        title: Of the whole picture.
        panel_title: The title of a panel, of its group and number.
        keys: Where the bars are.
    """
    rows = [row for row in report["rows"] if row.get("loads")]
    numbers = sorted({load[keys.number] for row in rows for load in row["loads"]})
    groups = list(dict.fromkeys(load[keys.group] for row in rows for load in row["loads"]))
    panel_height = _TITLE_HEIGHT + _BAR_STEP * len(rows) + _MARGIN
    width = _LABEL_WIDTH + _PANEL_WIDTH * len(numbers) + _MARGIN
    height = _HEADER_HEIGHT + panel_height * len(groups) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" {_FONT} font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_header(report, title),
    ]
    for row_number, group in enumerate(groups):
        top = _HEADER_HEIGHT + panel_height * row_number
        parts += _labels(rows, top)
        for column, number in enumerate(numbers):
            left = _LABEL_WIDTH + _PANEL_WIDTH * column
            parts.append(_text(left, top + _TITLE_HEIGHT - 8, panel_title(group, number), colour="#57606a"))
            parts += _panel([_value(row, keys, (group, number)) for row in rows], rows, left, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _header(report: Mapping[str, Any], title: str) -> Iterator[str]:
    hardware, settings = report["hardware"], report["settings"]
    yield _text(_MARGIN, 20, title, size=14)
    about = f"{hardware['processor']}, {settings['threads']} threads; medians of {settings['rounds']} rounds"
    yield _text(_MARGIN, 36, f"{about}; {report['started_at'][:10]}", colour="#57606a")


def _labels(rows: list[Mapping[str, Any]], top: float) -> Iterator[str]:
    for index, row in enumerate(rows):
        y = top + _TITLE_HEIGHT + _BAR_STEP * index + _BAR_HEIGHT - 2
        yield _text(_LABEL_WIDTH - 8, y, row["name"], anchor="end")


def _panel(values: list[float | None], rows: list[Mapping[str, Any]], left: float, top: float) -> Iterator[str]:
    scale = (_PANEL_WIDTH - _VALUE_WIDTH) / max(filter(None, values), default=1.0)
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        y = top + _TITLE_HEIGHT + _BAR_STEP * index
        length = (value or 0.0) * scale
        yield (f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{_BAR_HEIGHT}" fill="{_COLOURS[row["kind"]]}"/>')
        yield _text(left + length + 4, y + _BAR_HEIGHT - 2, "-" if value is None else f"{value:,.0f}")


def _value(row: Mapping[str, Any], keys: Keys, panel: tuple[str, int]) -> float | None:
    for load in row["loads"]:
        if (load[keys.group], load[keys.number]) == panel:
            value: float | None = load.get(keys.figure)
            return value
    return None


def _text(x: float, y: float, text: str, *, size: int = 11, colour: str = "#1f2328", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )
