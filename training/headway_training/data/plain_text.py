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
    """Cuts a text into training, validation and test part: it begins with the validation and ends with the test part.

    So the training part reaches up to the test part, as all that is at hand would in use, and both held-out parts go on
    beside text that the model has read: the same play, the same article.
    """
    valid_end = round(len(text) * valid_fraction)
    test_start = len(text) - round(len(text) * test_fraction)
    train, valid, test = text[valid_end:test_start], text[:valid_end], text[test_start:]
    return PlainText(text=train), PlainText(text=valid), PlainText(text=test)
