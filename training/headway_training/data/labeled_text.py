"""Texts with labels, from CSV.

With a header, columns named `text` and `label` are read, in any order, and others are left alone:

    text,label
    "A fine film, all in all.",positive

Without one, the first column is the label and the others, joined by a space, are the text (the layout of AG News):

    "3","Wall St. Bears Claw Back","Short-sellers are seeing green again."

A file whose name ends in `.tsv` (or `.tsv.gz`) is separated by tabs.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from headway_training.data.examples import LabeledTexts
from headway_training.data.files import read_text
from headway_training.errors import DataError

Row = tuple[int, str, str]
"""Line number, text, label."""

_LAYOUT = "expected a header with the columns text and label, or no header and the label in the first column"


def read_labeled_texts(path: Path, labels: Sequence[str] | None = None) -> tuple[LabeledTexts, tuple[str, ...]]:
    """Reads a CSV file.

    Args:
        path: The file; `.gz` and `.xz` are unpacked.
        labels: Known labels in the order of their indices; None: those of the file, sorted (numbers by their value).

    Returns:
        The examples and the labels.

    Raises:
        MissingDataError: There is no such file.
        DataError: A row is malformed, a label is not known, or there are fewer than two classes.
    """
    rows = list(read_rows(path))
    if not rows:
        raise DataError(f"{path} holds no rows; {_LAYOUT}")
    names = tuple(sort_labels({label for _, _, label in rows}) if labels is None else labels)
    if len(names) < 2:
        raise DataError(f"{path}: every row has the label {names[0]!r}; a classifier needs at least 2 classes")
    index = {name: i for i, name in enumerate(names)}
    for line, _, label in rows:
        if label not in index:
            known = ", ".join(names[:20])
            raise DataError(f"{path}, line {line}: the label {label!r} is not among the training data's: {known}")
    return LabeledTexts(texts=[text for _, text, _ in rows], labels=[index[label] for _, _, label in rows]), names


def sort_labels(labels: set[str]) -> list[str]:
    """Sorts labels: numbers by their value, words by the alphabet."""
    if all(label.lstrip("-").isdecimal() for label in labels):
        return sorted(labels, key=int)
    return sorted(labels)


def read_rows(path: Path) -> Iterator[Row]:
    """Reads line number, text and label of every row.

    Raises:
        MissingDataError: There is no such file.
        DataError: A row is malformed; names the line and what is expected.
    """
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    rows = _numbered(reader, path)
    first = next(rows, None)
    if first is None:
        return
    columns = [cell.strip().lower() for cell in first[1]]
    if "text" in columns and "label" in columns:
        yield from _with_header(rows, columns, path)
    else:
        yield from _without_header([first, *rows], path)


def _numbered(reader: Iterator[list[str]], path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows with the number of the line they begin on; empty lines are left out."""
    line = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}, line {line}: {error}; expected CSV, where a text with a comma, a quote or a line break "
                "stands in double quotes and a quote inside is doubled"
            ) from error
        if row is None:
            return
        if any(cell.strip() for cell in row):
            yield line, row
        line = reader.line_num + 1  # type: ignore[attr-defined]  # csv.reader's type is private


def _with_header(rows: Iterator[tuple[int, list[str]]], columns: list[str], path: Path) -> Iterator[Row]:
    text_column, label_column = columns.index("text"), columns.index("label")
    for line, row in rows:
        if len(row) != len(columns):
            raise DataError(
                f"{path}, line {line}: {len(row)} columns; expected {len(columns)} ({', '.join(columns)}). "
                "A text that contains the separator stands in double quotes"
            )
        yield _checked(line, row[text_column], row[label_column], path)


def _without_header(rows: list[tuple[int, list[str]]], path: Path) -> Iterator[Row]:
    counts = Counter(row[0].strip() for _, row in rows)
    if len(rows) > 2 and counts[rows[0][1][0].strip()] == 1 and max(counts.values()) > 1:
        raise DataError(
            f"{path}, line 1: {rows[0][1]} looks like a header, as no other row has the label {rows[0][1][0]!r}; "
            f"{_LAYOUT}"
        )
    for line, row in rows:
        if len(row) < 2:
            raise DataError(f"{path}, line {line}: 1 column; {_LAYOUT}")
        yield _checked(line, " ".join(cell.strip() for cell in row[1:]), row[0], path)


def _checked(line: int, text: str, label: str, path: Path) -> Row:
    if not text.strip():
        raise DataError(f"{path}, line {line}: the text is empty; remove the row or fill it in")
    if not label.strip():
        raise DataError(f"{path}, line {line}: the label is empty; remove the row or fill it in")
    return line, text.strip(), label.strip()
