"""What commands print: plain lines for people, JSON lines for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import typer

from headway_client.results import Answer, LabelScore


def print_json(value: dict[str, Any]) -> None:
    """Prints one object on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_answer_json(inputs: Sequence[str], answer: Answer[Any]) -> None:
    """Prints one object for every input: the input, its result, the model and the call's timings."""
    for text, result in zip(inputs, answer, strict=True):
        print_json(
            {"input": text, **as_dict(result), "model": as_dict(answer.model), "timings": as_dict(answer.timings)}
        )


def as_dict(value: object) -> dict[str, Any]:
    """The fields of a result."""
    assert is_dataclass(value)
    assert not isinstance(value, type)
    return asdict(value)


def format_labels(labels: Sequence[LabelScore], top_k: int | None) -> str:
    """Labels with their probabilities on one line: as many as were asked for, or three."""
    shown = labels[:3] if top_k is None else labels
    return ", ".join(f"{label.label} {label.probability:.3f}" for label in shown)


def shorten(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 72 else line[:71] + "…"


def heading(text: str) -> str:
    """Heads the output of one input among several."""
    return f"==> {shorten(text)} <=="


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in aligned columns, the last column ragged."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
