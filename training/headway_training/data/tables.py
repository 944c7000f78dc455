r"""Tables: rows with named columns, in a data set or of the user's own.

A file whose name ends in `.csv` is CSV, one in `.jsonl` has a JSON object on each line, and every other one has tabs
between its columns, without quoting. `.gz` and `.xz` behind it are unpacked. The columns are named in the first line:

    file	caption
    photos/1.jpg	A dog runs on the beach.

Columns that are not asked for are left alone.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway_training.data.files import ending_of, read_lines, read_text
from headway_training.errors import DataError, MissingDataError


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    place: str
    """The file and the line that it begins on, for errors."""
    cells: dict[str, str]
    """By the names of the columns."""


def read_rows(path: Path, columns: Sequence[str], *, optional: Sequence[str] = (), bare: bool = False) -> list[Row]:
    """Reads a table of the user's own.

    Args:
        path: The table.
        columns: What it must have; no cell of these may be empty.
        optional: What it may have; then no cell of these may be empty either.
        bare: Whether a table that names none of its columns has those of `columns`, in their order.

    Returns:
        The rows, at least one, whose cells have no white space around them.

    Raises:
        MissingDataError: There is no such file.
        DataError: A column is missing, a row has another number of columns, a cell is empty, or there is no row.
    """
    rows = list(_read_objects(path) if ending_of(path) == ".jsonl" else _read_cells(path, columns, bare=bare))
    if not rows:
        raise DataError(f"{path} has no rows; expected the columns {', '.join(columns)}")
    for row in rows:
        for name in columns:
            if name not in row.cells:
                raise DataError(f"{row.place}: there is no {name}; expected {', '.join(columns)}")
        for name in (*columns, *(one for one in optional if one in row.cells)):
            if not row.cells[name]:
                raise DataError(f"{row.place}: the {name} is empty; fill it in, or remove the row")
    return rows


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Reads the table of a data set, whose cells may be empty and are taken as they are.

    Raises:
        MissingDataError: There is no such file.
        DataError: A column is missing, or a row has another number of columns.
    """
    numbered = [(number, line.split("\t")) for number, line in enumerate(read_lines(path), start=1)]
    return [row.cells for row in _name_cells(path, numbered, columns)]


def find_files(path: Path, rows: Sequence[Row]) -> list[Path]:
    """The file that each row names in its column `file`, from the table's folder.

    A file that rows name in several ways, such as `one.jpg` and `./one.jpg`, has the first of these paths in all.

    Raises:
        MissingDataError: One is not there: names the row.
    """
    first: dict[Path, Path] = {}
    files = []
    for row in rows:
        file = path.parent / row.cells["file"]
        if not _is_file(file):
            raise MissingDataError(
                f"{row.place}: there is no file {row.cells['file']!r} in {path.parent}; correct its path, which begins "
                "at the table's folder"
            )
        files.append(first.setdefault(file.resolve(), file))
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def check_distinct(rows: Sequence[Row], files: Sequence[Path]) -> None:
    """Checks that no two rows are of the same file.

    Args:
        rows: The rows.
        files: The file of each, as `find_files` gives it.

    Raises:
        DataError: Two are: names both.
    """
    first: dict[Path, Row] = {}
    for row, file in zip(rows, files, strict=True):
        if (earlier := first.setdefault(file, row)) is not row:
            line = earlier.place.rpartition(" ")[2]
            raise DataError(f"{row.place}: {row.cells['file']!r} stood on line {line} before; remove one")


def number_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, each with the number of the line it begins on; empty lines are left out.

    Raises:
        MissingDataError: There is no such file.
        DataError: A row is malformed: names the line.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}, line {line}: {error}; expected CSV, where a text with a comma, a quote or a line break "
                "stands in double quotes and a quote inside is doubled"
            ) from error
        if cells is None:
            return
        if any(cell.strip() for cell in cells):
            yield line, cells
        line = reader.line_num + 1


def _read_cells(path: Path, columns: Sequence[str], *, bare: bool) -> Iterator[Row]:
    """The rows of a table whose columns are separated."""
    numbered: Iterable[tuple[int, list[str]]]
    if ending_of(path) == ".csv":
        numbered = number_rows(path, ",")
    else:
        lines = enumerate(read_lines(path), start=1)
        numbered = ((number, line.split("\t")) for number, line in lines if line.strip())
    stripped = [(number, [cell.strip() for cell in cells]) for number, cells in numbered]
    if bare and stripped and not set(columns) & set(stripped[0][1]):
        stripped.insert(0, (0, list(columns)))
    return _name_cells(path, stripped, columns)


def _name_cells(path: Path, numbered: Sequence[tuple[int, list[str]]], columns: Sequence[str]) -> Iterator[Row]:
    """Gives the cells of rows the names that the first row has."""
    header = numbered[0][1] if numbered else []
    if missing := [column for column in columns if column not in header]:
        raise DataError(f"{path}: the header has no column {', '.join(missing)}; it is {', '.join(header) or 'empty'}")
    if twice := [column for column in dict.fromkeys(header) if column and header.count(column) > 1]:
        raise DataError(f"{path}: the header names {', '.join(twice)} more than once; rename all but one")
    for number, cells in numbered[1:]:
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {number}: {len(cells)} columns; expected {len(header)} ({', '.join(header)})"
            )
        yield Row(f"{path}, line {number}", dict(zip(header, cells, strict=True)))


def _read_objects(path: Path) -> Iterator[Row]:
    """The rows of a file of JSON lines."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: is not JSON ({error})") from error
        if not isinstance(content, dict):
            raise DataError(f"{place}: is no JSON object with a name for each column")
        yield Row(place, {name: value.strip() for name, value in content.items() if isinstance(value, str)})
