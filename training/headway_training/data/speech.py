"""Recordings of speech with what is said in them.

N samples of a recording.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway_training.data.audio import read_audio
from headway_training.data.examples import Rows, hold_out
from headway_training.data.files import read_lines
from headway_training.data.pictures import read_table
from headway_training.errors import DataError, MissingDataError

RATE = 8000
"""Samples a second of the project's recordings."""
MOST_TEST_SECONDS = 3600
"""Of the test part, which the checkpoint carries."""
_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SIGNS = str.maketrans({"*": " star ", "#": " pound ", "\N{RIGHT SINGLE QUOTATION MARK}": "'"})
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings(Rows):
    """Recordings with what is said in them."""

    samples: list[NDArray[np.int16]]
    """Mono, (N,) each."""
    transcripts: list[str]
    """As the model writes them: words with spaces between them."""
    sources: list[str]
    """Where each comes from, such as `fsdd`."""
    rate: int = RATE
    """Samples a second of all of them."""

    @property
    def seconds(self) -> float:
        """How long they are together."""
        return sum(map(len, self.samples)) / self.rate


def spoken_words(text: str) -> str | None:
    """The words of a text as they are spoken: lower case, without punctuation, numbers below 100 as words.

    `*` is star and `#` is pound, as on a telephone. None: it has no words, or something else that would be spoken.
    """
    text = text.lower().translate(_SIGNS)
    words = _WORD.findall(text)
    if not words or re.search(r"\w", _WORD.sub("", text)) or any(len(word) > 2 for word in words if word.isdigit()):
        return None
    return " ".join(_number(int(word)) if word.isdigit() else word for word in words)


def _number(value: int) -> str:
    if value < len(_ONES):
        return _ONES[value]
    ten, one = divmod(value, 10)
    return _TENS[ten - 2] + (f" {_ONES[one]}" if one else "")


def read_digits(path: Path) -> Recordings:
    """Reads an archive of the Free Spoken Digit Dataset, whose files are named `DIGIT_SPEAKER_INDEX.flac`.

    Raises:
        DataError: It cannot be read, or a file has another name.
    """
    samples, transcripts = [], []
    for name, content in _archived(path):
        digit = name.split("_")[0]
        if digit not in map(str, range(10)):
            raise DataError(f"{path}: {name} is not named DIGIT_SPEAKER_INDEX.flac")
        samples.append(read_audio(content, RATE, f"{path}: {name}"))
        transcripts.append(_ONES[int(digit)])
    return Recordings(samples=samples, transcripts=transcripts, sources=["fsdd"] * len(samples))


def read_transcribed(
    archive: Path, table: Path, source: Callable[[dict[str, str]], str], *, most_seconds: float = float("inf")
) -> Recordings:
    """Reads an archive of FLAC files and the table of their transcripts, with the columns `name` and `transcript`.

    Args:
        archive: The recordings, each named as in the table with `.flac` behind it.
        table: One row a recording.
        source: The source of a row.
        most_seconds: Longer recordings are left out, as are those whose transcript `spoken_words` cannot read.

    Raises:
        MissingDataError: A file is not there.
        DataError: A column is missing, or a recording.
    """
    rows = {f"{row['name']}.flac": row for row in read_table(table, ("name", "transcript"))}
    samples, transcripts, sources = [], [], []
    for name, content in _archived(archive):
        row = rows.pop(name, None)
        words = None if row is None else spoken_words(row["transcript"])
        if row is None or words is None:
            continue
        heard = read_audio(content, RATE, f"{archive}: {name}")
        if len(heard) <= most_seconds * RATE:
            samples.append(heard)
            transcripts.append(words)
            sources.append(source(row))
    if rows:
        raise DataError(f"{archive}: there is no {next(iter(rows))}, which {table.name} names")
    return Recordings(samples=samples, transcripts=transcripts, sources=sources)


def read_recordings(path: Path, rate: int) -> Recordings:
    """Reads a user's table of recordings: lines of a file's path, relative to the table, a tab and what is said.

    Transcripts are taken as they are.

    Raises:
        MissingDataError: There is no such file.
        DataError: A line has another form, an audio cannot be read, or there is none.
    """
    samples, transcripts = [], []
    for number, line in enumerate(read_lines(path), 1):
        name, tab, text = line.partition("\t")
        if not tab or not text.strip():
            raise DataError(f"{path}, line {number}: expected the path of an audio, a tab and what is said in it")
        file = path.parent / name
        if not file.is_file():
            raise MissingDataError(f"{path}, line {number}: there is no {file}")
        samples.append(read_audio(file, rate))
        transcripts.append(" ".join(text.split()))
    if not samples:
        raise DataError(f"{path} holds no recording")
    return Recordings(samples=samples, transcripts=transcripts, sources=["own"] * len(samples), rate=rate)


def join(parts: Sequence[Recordings]) -> Recordings:
    """Several sets of recordings as one."""
    return Recordings(
        samples=[one for part in parts for one in part.samples],
        transcripts=[one for part in parts for one in part.transcripts],
        sources=[one for part in parts for one in part.sources],
        rate=parts[0].rate,
    )


def hold_out_transcripts(recordings: Recordings, fraction: float) -> tuple[Recordings, Recordings, Recordings]:
    """Splits recordings into those to train on and twice `fraction` of them to validate and to test on.

    No transcript is in two parts.
    """
    distinct = sorted(set(recordings.transcripts))
    _, held = hold_out(len(distinct), min(1.0, 2 * fraction))
    valid, test = ({distinct[i] for i in held[start::2]} for start in (0, 1))
    parts = [np.array([text in part for text in recordings.transcripts]) for part in (valid, test)]
    rows = (~(parts[0] | parts[1]), *parts)
    train, validated, tested = (recordings.take(np.flatnonzero(row)) for row in rows)
    return train, validated, tested


def _archived(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file of an archive."""
    if not path.is_file():
        raise MissingDataError(f"{path} does not exist")
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None:
                    yield member.name, content.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be read as an archive: {error}") from error
