"""One running text, from a file."""

from __future__ import annotations

from pathlib import Path

from headway_training.data.examples import PlainText
from headway_training.data.files import read_text
from headway_training.errors import DataError

MIN_CHARACTERS = 100


def read_plain_text(path: Path) -> PlainText:
    """Reads a text.

    Raises:
        MissingDataError: There is no such file.
        DataError: It is not UTF-8, or too short to learn from.
    """
    text = read_text(path)
    if len(text) < MIN_CHARACTERS:
        raise DataError(f"{path} has {len(text)} characters; expected at least {MIN_CHARACTERS}")
    return PlainText(text=text)


def cut_text(text: str, valid_fraction: float, test_fraction: float) -> tuple[PlainText, PlainText, PlainText]:
    """Cuts a text into training, validation and test part, in this order; the test part is the end."""
    test_start = len(text) - round(len(text) * test_fraction)
    valid_start = test_start - round(len(text) * valid_fraction)
    return (
        PlainText(text=text[:valid_start]),
        PlainText(text=text[valid_start:test_start]),
        PlainText(text=text[test_start:]),
    )
