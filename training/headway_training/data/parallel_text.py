"""Sentences with translations: one file of `source<TAB>target` lines, or two files whose lines belong together."""

from __future__ import annotations

from pathlib import Path

from headway_training.data.examples import ParallelTexts
from headway_training.data.files import read_lines
from headway_training.errors import DataError


def read_parallel_texts(name: str) -> ParallelTexts:
    """Reads parallel text.

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
