r"""Sentence pairs and labelled texts, from files of lines and from CSV.

Sentence pairs are lines of `source<TAB>target` in one file, or two files whose lines belong together.

Labelled texts are CSV; a file whose name ends in `.tsv` (or `.tsv.gz`) is separated by tabs. With a header, the columns
`text` and `label` are read, in any order, and others are left alone:

    text,label
    "A fine film, all in all.",positive

Without one, the first column is the label and the others, joined by a space, are the text (the layout of AG News):

    "3","Wall St. Bears Claw Back","Short-sellers are seeing green again."

If a text may have several labels, they stand in the label column with a separator between them; an empty column means
that none applies:

    text,label
    "Rates rise, shares fall.",business|politics
    "It is Tuesday.",

If texts come in pairs, the second one is in the column `text_pair`; without a header, in the third column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from headway_training.checkpoint import TextPairUse
from headway_training.data.examples import LabeledTexts, MultiLabeledTexts, ParallelTexts
from headway_training.data.files import ending_of, read_lines
from headway_training.data.tables import number_rows
from headway_training.errors import DataError

_MOST_DIFFERENT = 0.75
"""More labels than two, and than this share of all that rows have, are texts in the place of labels."""
_LAYOUT = "expected a header with the columns text and label, or no header and the label in the first column"


def read_parallel_texts(name: str) -> ParallelTexts:
    """Reads sentence pairs.

    Args:
        name: A file of `source<TAB>target` lines, or two files with a comma between them: `train.en,train.de`.

    Raises:
        MissingDataError: There is no such file.
        DataError: A line is malformed, or two files are of different length.
    """
    files = [Path(part) for part in name.split(",")] if "," in name and not Path(name).is_file() else [Path(name)]
    if len(files) > 2:
        raise DataError(f"{name}: expected one file of source<TAB>target lines or two files, and got {len(files)}")
    pairs = _read_two(files[0], files[1]) if len(files) == 2 else _read_one(files[0])
    if not pairs:
        raise DataError(f"{name} holds no sentences")
    return ParallelTexts(sources=[source for source, _ in pairs], targets=[target for _, target in pairs])


def _read_one(path: Path) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        cells = [cell.strip() for cell in line.split("\t")]
        if cells == [""]:
            continue
        if len(cells) != 2 or not all(cells):
            raise DataError(
                f"{path}, line {number}: expected source<TAB>target, both not empty, and found {len(cells)} columns"
            )
        pairs.append((cells[0], cells[1]))
    return pairs


def _read_two(source: Path, target: Path) -> list[tuple[str, str]]:
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise DataError(
            f"{source} has {len(sources)} lines and {target} has {len(targets)}; line i of one must translate line i "
            "of the other"
        )
    pairs = []
    for number, cells in enumerate(zip(sources, targets, strict=True), start=1):
        pair = (cells[0].strip(), cells[1].strip())
        if any(pair) and not all(pair):
            raise DataError(f"{target if pair[0] else source}, line {number}: the line is empty and its partner is not")
        if any(pair):
            pairs.append(pair)
    return pairs


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
        DataError: A row is malformed, a label is not known, or there are fewer than two labels.
    """
    rows = _read_rows(path, text_pairs, needs_label=True)
    names, found = _index_labels(rows, [[row.label] for row in rows], labels, path)
    examples = LabeledTexts(
        texts=[row.text for row in rows],
        labels=[label for (label,) in found],
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
    rows = _read_rows(path, text_pairs, needs_label=False)
    several = [[label.strip() for label in row.label.split(separator) if label.strip()] for row in rows]
    names, found = _index_labels(rows, several, labels, path)
    examples = MultiLabeledTexts(
        texts=[row.text for row in rows],
        labels=[tuple(sorted(set(one))) for one in found],
        text_pairs=None if text_pairs == "never" else [row.text_pair for row in rows],
    )
    return examples, names


class _Row(NamedTuple):
    """A row of a CSV file."""

    line: int
    text: str
    label: str
    """As it stands there: a label, or several with their separators."""
    text_pair: str = ""
    """Empty if there is none."""


def _index_labels(
    rows: Sequence[_Row], labels: Sequence[Sequence[str]], known: Sequence[str] | None, path: Path
) -> tuple[tuple[str, ...], list[list[int]]]:
    """The names of the labels, and the indices of the labels of each row."""
    found = {label for one in labels for label in one}
    numeric = all(label.lstrip("-").isdecimal() for label in found)
    names = tuple(sorted(found, key=int if numeric else None) if known is None else known)
    if len(names) < 2:
        only = f"every row has the label {names[0]!r}" if names else "no row has a label"
        raise DataError(f"{path}: {only}; a classifier needs at least 2 labels")
    if known is None and len(names) > max(2, _MOST_DIFFERENT * sum(map(len, labels))):
        raise DataError(
            f"{path}: has {len(names):,} different labels in {len(rows):,} rows, such as {rows[0].label[:60]!r}, so "
            f"they look like texts; {_LAYOUT}"
        )
    index = {name: i for i, name in enumerate(names)}
    for row, one in zip(rows, labels, strict=True):
        for label in one:
            if label not in index:
                shown = ", ".join(names[:20])
                raise DataError(
                    f"{path}, line {row.line}: the label {label!r} is not among those of the model: {shown}"
                )
    return names, [[index[label] for label in one] for one in labels]


def _read_rows(path: Path, text_pairs: TextPairUse, *, needs_label: bool) -> list[_Row]:
    """Reads every row of a CSV file.

    Raises:
        MissingDataError: There is no such file.
        DataError: There is no row, or one is malformed: names the line and what is expected.
    """
    delimiter = "\t" if ending_of(path) == ".tsv" else ","
    lines = list(number_rows(path, delimiter))
    if not lines:
        raise DataError(f"{path} holds no rows; {_LAYOUT}")
    columns = [cell.strip().lower() for cell in lines[0][1]]
    if missing := [name for name in ("text", "label") if name not in columns]:
        if len(missing) == 1:
            raise DataError(f"{path}, line 1: {lines[0][1]} has no column {missing[0]}; {_LAYOUT}")
        rows = list(_rows_by_position(lines, text_pairs, path))
    else:
        rows = list(_rows_by_header(lines[1:], columns, path))
    if not rows:
        raise DataError(f"{path} holds no rows; {_LAYOUT}")
    needed = ["text", *(["label"] if needs_label else []), *(["text_pair"] if text_pairs == "required" else [])]
    for row in rows:
        for name in needed:
            if not getattr(row, name).strip():
                raise DataError(f"{path}, line {row.line}: the {name} is empty; remove the row or fill it in")
    return [_Row(line, *(cell.strip() for cell in cells)) for line, *cells in rows]


def _rows_by_header(lines: Sequence[tuple[int, list[str]]], columns: list[str], path: Path) -> Iterator[_Row]:
    text, label = columns.index("text"), columns.index("label")
    pair = columns.index("text_pair") if "text_pair" in columns else None
    for line, cells in lines:
        if len(cells) != len(columns):
            raise DataError(
                f"{path}, line {line}: {len(cells)} columns; expected {len(columns)} ({', '.join(columns)}). "
                "A text that contains the separator stands in double quotes"
            )
        yield _Row(line, cells[text], cells[label], "" if pair is None else cells[pair])


def _rows_by_position(lines: Sequence[tuple[int, list[str]]], text_pairs: TextPairUse, path: Path) -> Iterator[_Row]:
    first = lines[0][1]
    counts = Counter(cells[0].strip() for _, cells in lines)
    if len(lines) > 2 and counts[first[0].strip()] == 1 and max(counts.values()) > 1:
        raise DataError(
            f"{path}, line 1: {first} looks like a header, as no other row has the label {first[0]!r}; {_LAYOUT}"
        )
    for line, cells in lines:
        if len(cells) < 2:
            raise DataError(f"{path}, line {line}: 1 column; {_LAYOUT}")
        if text_pairs == "never":
            yield _Row(line, " ".join(cell.strip() for cell in cells[1:]), cells[0])
        elif len(cells) <= 3:
            yield _Row(line, cells[1], cells[0], cells[2] if len(cells) == 3 else "")
        else:
            raise DataError(f"{path}, line {line}: {len(cells)} columns; expected label, text and text_pair")
