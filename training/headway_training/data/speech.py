"""Recordings of speech with what is said in them and who speaks.

N recordings, S samples of one.
"""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from headway_training.data.examples import Rows
from headway_training.data.files import read_bytes, read_text
from headway_training.errors import DataError

FSDD_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_COLUMNS = ("file", "speaker", "transcript")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings(Rows):
    """Recordings of one sampling rate."""

    samples: list[NDArray[np.int16]]
    """Of each recording, (S,), mono."""
    texts: list[str]
    """What is said."""
    speakers: list[str]
    """Who says it."""
    sampling_rate: int
    """Samples a second."""

    @property
    def seconds(self) -> float:
        """Of all recordings together."""
        return sum(map(len, self.samples)) / self.sampling_rate


def join_recordings(parts: Sequence[Recordings]) -> Recordings:
    """Recordings of several sources, one after another.

    Raises:
        DataError: They have different sampling rates.
    """
    rates = {part.sampling_rate for part in parts}
    if len(rates) != 1:
        raise DataError(f"the recordings have {' and '.join(map(str, sorted(rates)))} samples a second; one is needed")
    return Recordings(
        samples=[one for part in parts for one in part.samples],
        texts=[one for part in parts for one in part.texts],
        speakers=[one for part in parts for one in part.speakers],
        sampling_rate=rates.pop(),
    )


def read_digits(archive: Path) -> Recordings:
    """Reads an archive of the Free Spoken Digit Dataset: files `DIGIT_SPEAKER_INDEX.flac` or `.wav`.

    Raises:
        DataError: It cannot be read, or a name is of another form.
    """
    samples: list[NDArray[np.int16]] = []
    texts: list[str] = []
    speakers: list[str] = []
    rates: set[int] = set()
    for name, content in _members(archive):
        digit, _, rest = Path(name).stem.partition("_")
        speaker = rest.rpartition("_")[0]
        if not digit.isdecimal() or int(digit) >= len(FSDD_DIGITS) or not speaker:
            raise DataError(f"{archive}: {name} is not named DIGIT_SPEAKER_INDEX")
        one, rate = _decode(content, f"{archive}: {name}")
        samples.append(one)
        texts.append(FSDD_DIGITS[int(digit)])
        speakers.append(speaker)
        rates.add(rate)
    return Recordings(samples=samples, texts=texts, speakers=speakers, sampling_rate=_one_rate(archive, rates))


def read_prompts(archive: Path, table: Path, speaker: str) -> Recordings:
    """Reads an archive of one speaker's recordings whose transcripts are in a table with `name` and `transcript`.

    Raises:
        DataError: Either cannot be read, or a recording has no transcript.
    """
    transcripts = {row["name"]: row["transcript"] for row in _rows(table, ("name", "transcript"))}
    samples: list[NDArray[np.int16]] = []
    texts: list[str] = []
    rates: set[int] = set()
    for name, content in _members(archive):
        stem = str(Path(name).with_suffix(""))
        if stem not in transcripts:
            raise DataError(f"{table}: {stem} of {archive.name} is not among its names")
        one, rate = _decode(content, f"{archive}: {name}")
        samples.append(one)
        texts.append(transcripts[stem])
        rates.add(rate)
    return Recordings(
        samples=samples, texts=texts, speakers=[speaker] * len(texts), sampling_rate=_one_rate(archive, rates)
    )


def read_recordings(table: Path) -> Recordings:
    """Reads the user's recordings: a tab-separated table with `file`, `speaker` and `transcript`.

    Files are WAV, FLAC or OGG of one sampling rate, below the table's folder.

    Raises:
        DataError: The table or a file cannot be read, is not mono, or has another rate than the others.
    """
    rows = list(_rows(table, _COLUMNS))
    decoded = [_decode(read_bytes(table.parent / row["file"]), str(table.parent / row["file"])) for row in rows]
    return Recordings(
        samples=[samples for samples, _ in decoded],
        texts=[row["transcript"] for row in rows],
        speakers=[row["speaker"] for row in rows],
        sampling_rate=_one_rate(table, {rate for _, rate in decoded}),
    )


def _rows(table: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(read_text(table)), delimiter="\t", quoting=csv.QUOTE_NONE)
    if missing := set(columns) - set(reader.fieldnames or ()):
        raise DataError(f"{table} has no column {min(missing)}; its header must name {', '.join(columns)}")
    for number, row in enumerate(reader, start=2):
        if any(not (row[column] or "").strip() for column in columns):
            raise DataError(f"{table}, line {number}: {' and '.join(columns)} must all be there")
        yield {column: row[column].strip() for column in columns}


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an archive's recordings, in its order."""
    try:
        with tarfile.open(archive) as files:
            for member in files:
                content = files.extractfile(member)
                if content is not None and member.name.endswith((".flac", ".wav")):
                    yield member.name.removeprefix("./"), content.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{archive} cannot be read: {error}. Remove it and get it again") from error


def _decode(content: bytes, where: str) -> tuple[NDArray[np.int16], int]:
    """Samples and their number a second."""
    try:
        samples, rate = soundfile.read(io.BytesIO(content), dtype="int16")
    except soundfile.SoundFileError as error:
        raise DataError(f"{where} cannot be decoded: {error}; give WAV, FLAC or OGG") from error
    if samples.ndim != 1 or not len(samples):
        raise DataError(f"{where} has the shape {samples.shape}; recordings are mono and have samples")
    return samples, int(rate)


def _one_rate(source: Path, rates: set[int]) -> int:
    if len(rates) != 1:
        found = " and ".join(map(str, sorted(rates))) or "no"
        raise DataError(f"{source} has recordings of {found} samples a second; all must have the same")
    return rates.pop()
