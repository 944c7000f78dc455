"""The learning curve of a training as a small SVG: training loss and validation metric over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

MAX_POINTS = 200
"""Validations that are drawn; of more, as many are taken evenly."""
_WIDTH, _HEIGHT = 340, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 28, 34
_STYLE = "font:11px sans-serif;fill:#444"


@dataclass(frozen=True, slots=True)
class _Curve:
    """One panel."""

    title: str
    colour: str
    steps: Sequence[float]
    values: Sequence[float]


def draw_learning_curve(history: Sequence[Mapping[str, float]], metric: str, *, higher_is_better: bool) -> str | None:
    """Draws what was recorded at each validation.

    Args:
        history: Records with `step`, `train_loss` and the metric.
        metric: The metric the weights were selected by.
        higher_is_better: Whether its best value, which is marked, is the highest.

    Returns:
        An SVG of less than 20 KB; None for fewer than two records.
    """
    records = _thinned([record for record in history if {"step", "train_loss", metric} <= record.keys()])
    if len(records) < 2:
        return None
    steps = [record["step"] for record in records]
    loss = _Curve("training loss", "#b5523b", steps, [record["train_loss"] for record in records])
    measured = _Curve(f"validation {metric}", "#2f6690", steps, [record[metric] for record in records])
    best = (max if higher_is_better else min)(range(len(records)), key=measured.values.__getitem__)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}" width="{2 * _WIDTH}" '
        f'height="{_HEIGHT}" role="img"><title>Learning curve</title>',
        f'<rect width="{2 * _WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        *_panel(loss, 0, None),
        *_panel(measured, _WIDTH, best),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _thinned(records: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """At most `MAX_POINTS` of the records, the first and the last among them."""
    if len(records) <= MAX_POINTS:
        return records
    last = len(records) - 1
    return [records[round(index * last / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]


def _panel(curve: _Curve, offset: float, marked: int | None) -> list[str]:
    """Axes, ends of their ranges, the line, and one marked point."""
    left, right, top, bottom = offset + _LEFT, offset + _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
    xs = _scaled(curve.steps, left, right)
    ys = _scaled(curve.values, bottom, top)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    parts = [
        _text(left, top - 10, curve.title, "start"),
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#aaa"/>',
        _text(left - 5, bottom, f"{min(curve.values):.4g}", "end"),
        _text(left - 5, top + 8, f"{max(curve.values):.4g}", "end"),
        _text(left, bottom + 16, f"{curve.steps[0]:,.0f}", "start"),
        _text(right, bottom + 16, f"{curve.steps[-1]:,.0f} steps", "end"),
        f'<polyline points="{points}" fill="none" stroke="{curve.colour}" stroke-width="1.5"/>',
    ]
    if marked is not None:
        x, y = xs[marked], ys[marked]
        anchor = "end" if x > (left + right) / 2 else "start"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.colour}"/>')
        parts.append(_text(x, min(y + 16, bottom - 4), f"best {curve.values[marked]:.4g}", anchor))
    return parts


def _scaled(values: Sequence[float], start: float, end: float) -> list[float]:
    """Values on the way from `start`, where the lowest lies, to `end`, where the highest does."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return [start + (value - low) / span * (end - start) for value in values]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{_STYLE}">{escape(text)}</text>'
