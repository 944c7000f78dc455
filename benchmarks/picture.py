"""The picture of a report: bars of tokens a second, drawn as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = {"served": "#1f6feb", "bare": "#8c959f", "peer": "#d0a215"}
_PANEL_WIDTH, _MARGIN, _LABEL_WIDTH, _BAR_HEIGHT, _BAR_STEP, _TITLE_HEIGHT = 300, 16, 190, 12, 17, 30
_HEADER_HEIGHT = 44
_VALUE_WIDTH = 52
_FONT = 'font-family="system-ui, sans-serif"'


def draw(report: Mapping[str, Any]) -> str:
    """Draws one panel for each prompt set and number of streams; bars of a panel share a scale."""
    rows = [row for row in report["rows"] if row.get("loads")]
    streams = sorted({load["streams"] for row in rows for load in row["loads"]})
    sets = list(dict.fromkeys(load["prompt_set"] for row in rows for load in row["loads"]))
    panel_height = _TITLE_HEIGHT + _BAR_STEP * len(rows) + _MARGIN
    width = _LABEL_WIDTH + _PANEL_WIDTH * len(streams) + _MARGIN
    height = _HEADER_HEIGHT + panel_height * len(sets) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" {_FONT} font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_header(report),
    ]
    for row_number, prompt_set in enumerate(sets):
        top = _HEADER_HEIGHT + panel_height * row_number
        parts += _labels(rows, top)
        for column, number in enumerate(streams):
            parts += _panel(rows, prompt_set, number, _LABEL_WIDTH + _PANEL_WIDTH * column, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _header(report: Mapping[str, Any]) -> Iterator[str]:
    model, hardware, settings = report["model"], report["hardware"], report["settings"]
    yield _text(_MARGIN, 20, f"Tokens a second, {model['name']}, {settings['new_tokens']} new tokens", size=14)
    about = f"{hardware['processor']}, {settings['threads']} threads; medians of {settings['rounds']} rounds"
    yield _text(_MARGIN, 36, f"{about}; {report['started_at'][:10]}", colour="#57606a")


def _labels(rows: list[Mapping[str, Any]], top: float) -> Iterator[str]:
    for index, row in enumerate(rows):
        y = top + _TITLE_HEIGHT + _BAR_STEP * index + _BAR_HEIGHT - 2
        yield _text(_LABEL_WIDTH - 8, y, row["name"], anchor="end")


def _panel(rows: list[Mapping[str, Any]], prompt_set: str, streams: int, left: float, top: float) -> Iterator[str]:
    title = f"prompts of {prompt_set} tokens, {streams} stream{'s' if streams > 1 else ''}"
    yield _text(left, top + _TITLE_HEIGHT - 8, title, colour="#57606a")
    values = [_value(row, prompt_set, streams) for row in rows]
    scale = (_PANEL_WIDTH - _VALUE_WIDTH) / max(filter(None, values), default=1.0)
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        y = top + _TITLE_HEIGHT + _BAR_STEP * index
        length = (value or 0.0) * scale
        yield (f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{_BAR_HEIGHT}" fill="{_COLOURS[row["kind"]]}"/>')
        yield _text(left + length + 4, y + _BAR_HEIGHT - 2, "-" if value is None else f"{value:,.0f}")


def _value(row: Mapping[str, Any], prompt_set: str, streams: int) -> float | None:
    for load in row["loads"]:
        if (load["prompt_set"], load["streams"]) == (prompt_set, streams):
            tokens_per_s: float | None = load.get("tokens_per_s")
            return tokens_per_s
    return None


def _text(x: float, y: float, text: str, *, size: int = 11, colour: str = "#1f2328", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )
