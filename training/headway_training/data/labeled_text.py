"""Texts with labels, from CSV.

With a header, columns named `text` and `label` are read, in any order, and others are left alone:

    text,label
    "A fine film, all in all.",positive

Without one, the first column is the label and the others, joined by a space, are the text (the layout of AG News):

    "3","Wall St. Bears Claw Back","Short-sellers are seeing green again."

Where a recipe lets a text have several labels, they stand in the label column with a separator between them, and a text
to which none applies has none there:

    text,label
    "Rates rise, shares fall.",business|politics
    "It is Tuesday.",

Where a recipe reads pairs of texts, the second one is in a column `text_pair`; without a header, in the third column.

A file whose name ends in `.tsv` (or `.tsv.gz`) is separated by tabs.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway_training.checkpoint import TextPairUse
from headway_training.data.examples import LabeledTexts, MultiLabeledTexts
from headway_training.data.files import read_text
from headway_training.errors import DataError

_LAYOUT = "expected a header with the columns text and label, or no header and the label in the first column"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file."""

    line: int
    text: str
    label: str
    """As it stands there: a label, or several with their separators."""
    text_pair: str = ""
    """Empty where there is none."""


def read_labeled_texts(
    path: Path, labels: Sequence[str] | None = None, *, text_pairs: TextPairUse = "never"
) -> tuple[LabeledTexts, tuple[str, ...]]:
    """Reads a CSV file whose rows have one label each.

    Args:
        path: The file; `.gz` and `.xz` are unpacked.
        labels: Known labels in the order of their indices; None: those of the file, sorted (numbers by their value).
        text_pairs: Whether a text may or must be paired with another.

    Returns:
        The examples and the labels.

    Raises:
        MissingDataError: There is no such file.
        DataError: A row is malformed, a label is not known, or there are fewer than two classes.
    """
    rows = _read_all(path, text_pairs, needs_label=True)
    names = _names({row.label for row in rows}, labels, path)
    index = {name: i for i, name in enumerate(names)}
    examples = LabeledTexts(
        texts=[row.text for row in rows],
        labels=[_find(index, row.label, row.line, path) for row in rows],
        text_pairs=None if text_pairs == "never" else [row.text_pair for row in rows],
    )
    return examples, names


def read_multi_labeled_texts(
    path: Path, labels: Sequence[str] | None = None, *, separator: str, text_pairs: TextPairUse = "never"
) -> tuple[MultiLabeledTexts, tuple[str, ...]]:
    """Reads a CSV file whose rows have any number of labels; arguments, results and errors are as above.

    Args:
        path: The file.
        labels: Known labels in the order of their indices; None: those of the file.
        separator: What stands between the labels of a row.
        text_pairs: Whether a text may or must be paired with another.
    """
    rows = _read_all(path, text_pairs, needs_label=False)
    found = [split_labels(row.label, separator) for row in rows]
    names = _names({label for several in found for label in several}, labels, path)
    index = {name: i for i, name in enumerate(names)}
    examples = MultiLabeledTexts(
        texts=[row.text for row in rows],
        labels=[
            tuple(sorted({_find(index, label, row.line, path) for label in several}))
            for row, several in zip(rows, found, strict=True)
        ],
        text_pairs=None if text_pairs == "never" else [row.text_pair for row in rows],
    )
    return examples, names


def _read_all(path: Path, text_pairs: TextPairUse, *, needs_label: bool) -> list[Row]:
    rows = list(read_rows(path, text_pairs=text_pairs, needs_label=needs_label))
    if not rows:
        raise DataError(f"{path} holds no rows; {_LAYOUT}")
    return rows


def _names(found: set[str], known: Sequence[str] | None, path: Path) -> tuple[str, ...]:
    names = tuple(sort_labels(found) if known is None else known)
    if len(names) < 2:
        only = f"every row has the label {names[0]!r}" if names else "no row has a label"
        raise DataError(f"{path}: {only}; a classifier needs at least 2 classes")
    return names


def _find(index: dict[str, int], label: str, line: int, path: Path) -> int:
    if label not in index:
        known = ", ".join(list(index)[:20])
        raise DataError(f"{path}, line {line}: the label {label!r} is not among the training data's: {known}")
    return index[label]


def sort_labels(labels: set[str]) -> list[str]:
    """Sorts labels: numbers by their value, words by the alphabet."""
    if all(label.lstrip("-").isdecimal() for label in labels):
        return sorted(labels, key=int)
    return sorted(labels)


def split_labels(text: str, separator: str) -> list[str]:
    """The labels of a label column; none where it is empty."""
    return [label.strip() for label in text.split(separator) if label.strip()]


def read_rows(path: Path, *, text_pairs: TextPairUse = "never", needs_label: bool = True) -> Iterator[Row]:
    """Reads every row.

    Args:
        path: The file.
        text_pairs: Whether a text may or must be paired with another.
        needs_label: Whether a row without a label is an error.

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
    has_header = "text" in columns and "label" in columns
    cells = _with_header(rows, columns, path) if has_header else _without_header([first, *rows], text_pairs, path)
    for row in cells:
        yield _checked(row, text_pairs, needs_label, path)


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
    text, label = columns.index("text"), columns.index("label")
    pair = columns.index("text_pair") if "text_pair" in columns else None
    for line, row in rows:
        if len(row) != len(columns):
            raise DataError(
                f"{path}, line {line}: {len(row)} columns; expected {len(columns)} ({', '.join(columns)}). "
                "A text that contains the separator stands in double quotes"
            )
        yield Row(line, row[text], row[label], "" if pair is None else row[pair])


def _without_header(rows: list[tuple[int, list[str]]], text_pairs: TextPairUse, path: Path) -> Iterator[Row]:
    counts = Counter(row[0].strip() for _, row in rows)
    if len(rows) > 2 and counts[rows[0][1][0].strip()] == 1 and max(counts.values()) > 1:
        raise DataError(
            f"{path}, line 1: {rows[0][1]} looks like a header, as no other row has the label {rows[0][1][0]!r}; "
            f"{_LAYOUT}"
        )
    for line, row in rows:
        if len(row) < 2:
            raise DataError(f"{path}, line {line}: 1 column; {_LAYOUT}")
        if text_pairs == "never":
            yield Row(line, " ".join(cell.strip() for cell in row[1:]), row[0])
        elif len(row) <= 3:
            yield Row(line, row[1], row[0], row[2] if len(row) == 3 else "")
        else:
            raise DataError(f"{path}, line {line}: {len(row)} columns; expected label, text and text_pair")


def _checked(row: Row, text_pairs: TextPairUse, needs_label: bool, path: Path) -> Row:
    needed = {"text": row.text, "label": row.label if needs_label else "none", "text_pair": row.text_pair}
    if text_pairs != "required":
        del needed["text_pair"]
    for name, value in needed.items():
        if not value.strip():
            raise DataError(f"{path}, line {row.line}: the {name} is empty; remove the row or fill it in")
    return Row(row.line, row.text.strip(), row.label.strip(), row.text_pair.strip())
