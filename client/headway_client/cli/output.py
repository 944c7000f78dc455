"""Input and output of commands: arguments, files and stdin; lines for people, JSON lines for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import typer

from headway_client.results import Answer, TokenLogProbability

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")

_STDIN = Path("-")


def read_inputs(arguments: Sequence[str] | None, file: Path | None) -> Iterator[str]:
    """Yields the inputs: the arguments, then the non-empty lines of the file.

    Raises:
        typer.BadParameter: There is no input, and nothing is piped in.
        OSError: The file cannot be read.
    """
    if not arguments and file is None:
        if sys.stdin.isatty():
            raise typer.BadParameter("there is no input; give it as an argument, with --file FILE, or pipe it in")
        file = _STDIN
    return _inputs(arguments or (), file)


def _inputs(arguments: Sequence[str], file: Path | None) -> Iterator[str]:
    yield from arguments
    if file == _STDIN:
        yield from _lines(sys.stdin)
    elif file is not None:
        with file.open(encoding="utf-8") as lines:
            yield from _lines(lines)


def _lines(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        text = line.rstrip("\r\n")
        if text.strip():
            yield text


def batches(inputs: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yields the inputs in lists of `size`; the last one may be shorter."""
    remaining = iter(inputs)
    while batch := list(islice(remaining, size)):
        yield batch


def with_inputs(inputs: Sequence[InputT], answer: Answer[ResultT]) -> Iterator[tuple[InputT, ResultT]]:
    """Yields each result with its input; an input may have several results."""
    for index, result in enumerate(answer):
        yield inputs[index * len(inputs) // len(answer)], result


def check_outputs(*files: Path | None) -> None:
    """Checks that a command's output files can be written, before it does anything.

    Raises:
        ValueError: A file's folder is missing, or it is a folder itself.
    """
    for file in filter(None, files):
        if not file.parent.is_dir() or file.is_dir():
            raise ValueError(f"{file}: cannot be written; name a file in an existing folder")


def print_json(value: dict[str, Any]) -> None:
    """Prints one object on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_answer_json(inputs: Sequence[object], answer: Answer[Any]) -> None:
    """Prints one object for each result: its input, the result, the model and the call's timings."""
    shared = {"model": as_dict(answer.model), "timings": as_dict(answer.timings)}
    for value, result in with_inputs(inputs, answer):
        print_json({"input": value, **as_dict(result), **shared})


def print_tokens(tokens: Sequence[TokenLogProbability]) -> None:
    """Prints a line for each token: its log-probability, the token, and the most likely tokens at its position."""
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


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_heading(text: str, sample: int | None = None) -> None:
    """Prints the heading of one input among several, or of one of its samples."""
    typer.echo(f"==> {shorten(text)} <==" if sample is None else f"==> {shorten(text)} [{sample}] <==")


def as_dict(value: object) -> dict[str, Any]:
    """Returns the fields of a result."""
    assert is_dataclass(value)
    assert not isinstance(value, type)
    return asdict(value)


def shorten(text: str) -> str:
    """Returns the beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 72 else line[:71] + "…"
