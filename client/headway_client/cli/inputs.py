"""Inputs of a command: arguments, then the lines of a file or of stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Required, TypedDict

import typer

STDIN = Path("-")


class PairedTexts(TypedDict, total=False):
    """Texts, and what each is paired with."""

    texts: Required[list[str]]
    text_pairs: list[str]


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


def split_pairs(lines: Sequence[str], pairs: bool) -> PairedTexts:
    """Makes arguments of a call of its inputs, each of which is a text, or a text, a tab and what it is paired with.

    Raises:
        ValueError: Pairs are expected, and a line has no tab.
    """
    if not pairs:
        return {"texts": list(lines)}
    split = [line.split("\t", 1) for line in lines]
    for line, parts in zip(lines, split, strict=True):
        if len(parts) != 2:
            raise ValueError(f"--pairs needs two texts with a tab between them, and {line[:60]!r} has none")
    return {"texts": [text for text, _ in split], "text_pairs": [pair for _, pair in split]}


def batches(inputs: Iterable[str], size: int) -> Iterator[list[str]]:
    """Cuts the inputs into lists of `size`, the last one as long as what is left."""
    remaining = iter(inputs)
    while batch := list(islice(remaining, size)):
        yield batch
