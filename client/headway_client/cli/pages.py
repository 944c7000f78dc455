"""Files of pages: words and their boxes."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headway_client.options import Page

_STDIN = Path("-")
_PAGE_LEVEL, _WORD_LEVEL = "1", "5"
"""Rows of Tesseract's TSV that describe a page and a word."""


def read_pages(file: Path) -> dict[str, Page]:
    """Reads the pages of a file, by a name for each.

    A file is an object of JSON for each page, in a list or on a line each, or what `tesseract ... tsv` writes.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no pages.
    """
    content = sys.stdin.read() if file == _STDIN else file.read_text(encoding="utf-8")
    pages = list(_of_tesseract(content.splitlines()) if content.startswith("level\t") else _of_json(content, file))
    if not pages:  # of an empty list, or of a scan without words
        raise ValueError(f"{file}: holds no page; give an object of JSON with words and boxes")
    return {f"page {number} of {file}": page for number, page in enumerate(pages, 1)}


def _of_json(content: str, file: Path) -> Iterator[Page]:
    try:
        values: Any = json.loads(content)
    except ValueError:
        try:
            values = [json.loads(line) for line in content.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"{file}: is neither JSON, nor an object of it on each line ({error})") from None
    for number, value in enumerate(values if isinstance(values, list) else [values], 1):
        keys = set(value) if isinstance(value, dict) else set()
        wrong = f"{file}: page {number}: must be an object with words and boxes, or these with width and height"
        if keys not in ({"words", "boxes"}, {"words", "boxes", "width", "height"}):
            raise ValueError(wrong)
        try:
            boxes = [float(side) for box in value["boxes"] for side in (box if isinstance(box, list) else [box])]
        except (TypeError, ValueError):
            raise ValueError(f"{wrong}; boxes are four numbers for each word") from None
        if not _are_texts(value["words"]):
            raise ValueError(f"{wrong}; words are a list of strings")
        if not all(isinstance(value.get(name, 0), int | float) for name in ("width", "height")):
            raise ValueError(f"{wrong}; width and height are numbers")
        yield Page(**{**value, "boxes": boxes})


def _are_texts(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(isinstance(one, str) for one in values)


def _of_tesseract(lines: Iterable[str]) -> Iterator[Page]:
    words, boxes, size = list[str](), list[float](), (0.0, 0.0)
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        left, top, width, height = (float(row[name]) for name in ("left", "top", "width", "height"))
        if row["level"] == _PAGE_LEVEL:
            if words:
                yield Page(words, boxes, *size)
            words, boxes, size = [], [], (width, height)
        elif row["level"] == _WORD_LEVEL and (word := (row["text"] or "").strip()):
            words.append(word)
            boxes += [left, top, left + width, top + height]
    if words:
        yield Page(words, boxes, *size)
