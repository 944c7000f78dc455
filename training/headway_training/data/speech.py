"""Recordings of speech with what is said in them and who speaks.

N samples of a recording.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from headway_training.data.audio import audio_rate, read_audio
from headway_training.data.examples import Rows, hold_out
from headway_training.data.tables import Row, check_distinct, find_files, read_rows, read_table
from headway_training.errors import DataError, MissingDataError

RATE = 8000
"""Samples a second of the project's recordings."""
MOST_TEST_SECONDS = 3600
"""Of the test part, which the checkpoint carries."""
HEARD = ("file",)
TRANSCRIBED = (*HEARD, "transcript")
SPOKEN = (*TRANSCRIBED, "speaker")
"""Columns of the user's tables of recordings."""
LEAST_SECONDS = 0.02
"""Of a recording of the user's: a frame of a codec, of which nothing shorter is one."""
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
    """Recordings with what is said in them, all of one sampling rate."""

    samples: list[NDArray[np.int16]]
    """Mono, (N,) each."""
    texts: list[str]
    """What is said."""
    speakers: list[str]
    """Who says it; empty where nobody has noted it."""
    sources: list[str]
    """Where each comes from, such as `fsdd`."""
    sampling_rate: int = RATE
    """Samples a second of all of them."""

    @property
    def seconds(self) -> float:
        """How long they are together."""
        return sum(map(len, self.samples)) / self.sampling_rate


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


def read_digits(archive: Path) -> Recordings:
    """Reads an archive of the Free Spoken Digit Dataset: files `DIGIT_SPEAKER_INDEX.flac` or `.wav`.

    Raises:
        MissingDataError: There is no such file.
        DataError: It cannot be read, or a name is of another form.
    """
    samples, texts, speakers = [], [], []
    for name, content in _archived(archive):
        digit, _, rest = PurePosixPath(name).stem.partition("_")
        speaker = rest.rpartition("_")[0]
        if digit not in map(str, range(10)) or not speaker:
            raise DataError(f"{archive}: {name} is not named DIGIT_SPEAKER_INDEX")
        samples.append(read_audio(content, RATE, f"{archive}: {name}"))
        texts.append(_ONES[int(digit)])
        speakers.append(speaker)
    return Recordings(samples=samples, texts=texts, speakers=speakers, sources=["fsdd"] * len(samples))


def read_transcribed(
    archive: Path,
    table: Path,
    origin: Callable[[dict[str, str]], tuple[str, str]],
    *,
    write: Callable[[str], str | None] = spoken_words,
    most_seconds: float = float("inf"),
) -> Recordings:
    """Reads an archive of recordings and the table of their transcripts, with the columns `name` and `transcript`.

    Args:
        archive: The recordings, each named as in the table with `.flac` or `.wav` behind it.
        table: One row a recording.
        origin: Source and speaker of a row.
        write: Makes a text of a transcript; None leaves the recording out.
        most_seconds: Longer recordings are left out.

    Raises:
        MissingDataError: A file is not there.
        DataError: A column is missing, or a recording.
    """
    rows = {row["name"]: row for row in read_table(table, ("name", "transcript"))}
    samples, texts, speakers, sources = [], [], [], []
    for name, content in _archived(archive):
        row = rows.pop(str(PurePosixPath(name).with_suffix("")), None)
        text = None if row is None else write(row["transcript"])
        if row is None or text is None:
            continue
        heard = read_audio(content, RATE, f"{archive}: {name}")
        if len(heard) <= most_seconds * RATE:
            source, speaker = origin(row)
            samples.append(heard)
            texts.append(text)
            speakers.append(speaker)
            sources.append(source)
    if rows:
        raise DataError(f"{archive}: there is no {next(iter(rows))}, which {table.name} names")
    return Recordings(samples=samples, texts=texts, speakers=speakers, sources=sources)


def read_recordings(table: Path, rate: int | None = None, *, columns: Sequence[str] = TRANSCRIBED) -> Recordings:
    """Reads a user's table of recordings (`headway_training.data.tables`), whose files are named in the column `file`.

    Transcripts are taken as they are.

    Args:
        table: One row a recording.
        rate: Samples a second to bring them to; None: that of the first.
        columns: What it must name of each: `TRANSCRIBED`, or `SPOKEN` with who speaks, or `HEARD`, nothing more.

    Raises:
        MissingDataError: The table, or a recording, is not there.
        DataError: A column is missing, a cell is empty, an audio is named twice, cannot be read or is too short.
    """
    rows, files = _recording_rows(table, columns)
    rate = rate or audio_rate(files[0])
    return Recordings(
        samples=[_read_row(row, file, rate) for row, file in zip(rows, files, strict=True)],
        texts=[" ".join(row.cells.get("transcript", "").split()) for row in rows],
        speakers=[row.cells.get("speaker", "") for row in rows],
        sources=["own"] * len(rows),
        sampling_rate=rate,
    )


def find_recordings(table: Path) -> list[Path]:
    """The files that a user's table of recordings names; errors as `read_recordings`."""
    return _recording_rows(table, HEARD)[1]


def _recording_rows(table: Path, columns: Sequence[str]) -> tuple[list[Row], list[Path]]:
    rows = read_rows(table, columns)
    files = find_files(table, rows)
    check_distinct(rows, files)
    return rows, files


def _read_row(row: Row, file: Path, rate: int) -> NDArray[np.int16]:
    """Reads the recording of a row.

    Raises:
        DataError: It cannot be read, or is too short.
    """
    samples = read_audio(file, rate, f"{row.place}: {row.cells['file']!r}")
    if len(samples) < LEAST_SECONDS * rate:
        raise DataError(
            f"{row.place}: {row.cells['file']!r} is {1000 * len(samples) / rate:.1f} ms long, and the shortest that is "
            f"read has {1000 * LEAST_SECONDS:.0f} ms; remove the row"
        )
    return samples


def join_recordings(parts: Sequence[Recordings]) -> Recordings:
    """Several sets of recordings of one sampling rate as one."""
    (rate,) = {part.sampling_rate for part in parts}
    return Recordings(
        samples=[one for part in parts for one in part.samples],
        texts=[one for part in parts for one in part.texts],
        speakers=[one for part in parts for one in part.speakers],
        sources=[one for part in parts for one in part.sources],
        sampling_rate=rate,
    )


def hold_out_transcripts(recordings: Recordings, fraction: float) -> tuple[Recordings, Recordings, Recordings]:
    """Splits recordings into those to train on and twice `fraction` of them to validate and to test on.

    No transcript is in two parts.
    """
    distinct = sorted(set(recordings.texts))
    _, held = hold_out(len(distinct), min(1.0, 2 * fraction))
    valid, test = ({distinct[i] for i in held[start::2]} for start in (0, 1))
    parts = [np.array([text in part for text in recordings.texts]) for part in (valid, test)]
    rows = (~(parts[0] | parts[1]), *parts)
    train, validated, tested = (recordings.take(np.flatnonzero(row)) for row in rows)
    return train, validated, tested


def _archived(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every recording of an archive, in its order."""
    if not path.is_file():
        raise MissingDataError(f"{path} does not exist")
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None and member.name.endswith((".flac", ".wav")):
                    yield member.name, content.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be read as an archive: {error}") from error
