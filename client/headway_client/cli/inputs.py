"""Inputs of a command: arguments, then the lines of a file or of stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import typer

STDIN = Path("-")


def read_inputs(arguments: Sequence[str] | None, file: Path | None) -> Iterator[str]:
    """Yields the inputs one by one; empty lines of a file are left out.

    Raises:
        typer.BadParameter: There is no input, and nothing is piped in.
        OSError: The file cannot be read.
    """
    if not arguments and file is None:
        if sys.stdin.isatty():
            raise typer.BadParameter("there is no input; give it as an argument, with --file FILE, or pipe it in")
        file = STDIN
    return _inputs(arguments or (), file)


def _inputs(arguments: Sequence[str], file: Path | None) -> Iterator[str]:
    yield from arguments
    if file == STDIN:
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
    """Cuts the inputs into lists of `size`, the last one as long as what is left."""
    remaining = iter(inputs)
    while batch := list(islice(remaining, size)):
        yield batch
