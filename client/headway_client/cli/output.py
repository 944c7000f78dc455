"""What commands print: plain lines for people, JSON lines for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

import typer

from headway_client.results import Answer, LabelScore, TokenLogProbability

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")


def print_json(value: dict[str, Any]) -> None:
    """Prints one object on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_answer_json(inputs: Sequence[object], answer: Answer[Any]) -> None:
    """Prints one object for every result: its input, the result, the model and the call's timings."""
    for value, result in with_inputs(inputs, answer):
        print_json(
            {"input": value, **as_dict(result), "model": as_dict(answer.model), "timings": as_dict(answer.timings)}
        )


def with_inputs(inputs: Sequence[InputT], answer: Answer[ResultT]) -> Iterator[tuple[InputT, ResultT]]:
    """Yields every result with its input; an input may have several results."""
    for index, result in enumerate(answer):
        yield inputs[index * len(inputs) // len(answer)], result


def print_tokens(tokens: Sequence[TokenLogProbability]) -> None:
    """Prints a line for every token: its log-probability, the token, and the likeliest ones at its place."""
    if not tokens:
        return
    print_table(
        [
            (
                "-" if token.log_probability is None else f"{token.log_probability:.4f}",
                repr(token.text),
                ", ".join(f"{other.text!r} {other.log_probability:.4f}" for other in token.top_tokens),
            )
            for token in tokens
        ]
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


def heading(text: str, sample: int | None = None) -> str:
    """Heads the output of one input among several, or one sample of it."""
    return f"==> {shorten(text)} <==" if sample is None else f"==> {shorten(text)} [{sample}] <=="


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in aligned columns, the last column ragged."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
