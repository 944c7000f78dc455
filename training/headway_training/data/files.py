"""Opening files of data: plain, gzip or xz, with errors that name file and line."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

from headway_training.errors import DataError, MissingDataError


def read_bytes(path: Path) -> bytes:
    """Reads a whole file, unpacking `.gz` and `.xz`.

    Raises:
        MissingDataError: There is no such file.
        DataError: It cannot be read or unpacked.
    """
    if not path.is_file():
        what = "is a folder, where a file is expected" if path.is_dir() else "does not exist"
        raise MissingDataError(f"{path} {what}")
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            return gzip.decompress(content)
        return lzma.decompress(content) if path.suffix == ".xz" else content
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_text(path: Path) -> str:
    """Reads a whole text of UTF-8, without its byte order mark; every line end becomes a line feed.

    Raises:
        MissingDataError: There is no such file.
        DataError: It cannot be read, or is not UTF-8: names the line.
    """
    content = read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: the text is not UTF-8 ({error.reason}); save it as UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: Path) -> list[str]:
    """Reads the lines of a text, without their ends and without empty ones at the end of the file."""
    lines = read_text(path).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    return lines
