"""Checksums of the files that a run reads and that nobody else has checksums of, so that a resumed run reads the same.

They are the user's own files, each whole: what a name stands for, images of a folder, a table of recordings and the
recordings that it names; and of a public data set the files that are made on the user's machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from headway_training.durable import replacing
from headway_training.errors import DataError, ResumeError

LIST_FILE: Final = "data.sha256"
"""The checksum of each file, in the form that `sha256sum --check` reads, in the folder of a run."""
_NAMES_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Checksums:
    """SHA-256 of files, by their paths as the user names them."""

    files: Mapping[str, str]

    @classmethod
    def of(cls, files: Iterable[Path]) -> Self:
        """Reads files, each once, a block at a time.

        Raises:
            DataError: One cannot be read.
        """
        return cls({str(file): _digest(file) for file in sorted(set(files))})

    @property
    def whole(self) -> str:
        """SHA-256 of names and checksums of all files."""
        return hashlib.sha256(self._lines().encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Writes the list of a run, if there are files."""
        if not self.files:
            return
        with replacing(folder / LIST_FILE) as file:
            file.write_text(self._lines(), encoding="utf-8")

    def check(self, folder: Path, stored: str) -> None:
        """Checks that a run in a folder was begun with these files.

        Args:
            folder: Of the run.
            stored: What `whole` was then.

        Raises:
            ResumeError: It was not; names what has changed.
        """
        if self.whole == stored:
            return
        before, after = _read_list(folder), self.files
        kinds = (
            ("has changed", [name for name in after if name in before and before[name] != after[name]]),
            ("is gone", [name for name in before if name not in after]),
            ("is new", [name for name in after if name not in before]),
        )
        told = "; ".join(f"{_shortened(names)} {what}" for what, names in kinds if names and before)
        raise ResumeError(
            f"{folder} was begun with other data: {told or 'its list of files is not there, so they cannot be named'}. "
            "Resume it with the data as it was, or start a new run"
        )

    def _lines(self) -> str:
        return "".join(f"{digest}  {name}\n" for name, digest in self.files.items())


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _read_list(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / LIST_FILE).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines) if name}


def _shortened(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
