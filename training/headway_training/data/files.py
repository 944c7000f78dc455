"""Reads files, plain, gzip or xz, whole or block by block; errors name the file, and the line where there is one."""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from headway_training.errors import DataError, MissingDataError

_BLOCK_BYTES = 1 << 20
_PACKINGS = (".gz", ".xz")


def read_bytes(path: Path) -> bytes:
    """Reads a whole file, unpacking `.gz` and `.xz`.

    Raises:
        MissingDataError: There is no such file.
        DataError: It cannot be read or unpacked.
    """
    return b"".join(_read_byte_blocks(path))


def read_blocks(path: Path) -> Iterator[str]:
    """Reads a text of UTF-8 block by block, without its byte order mark; every line end becomes a line feed.

    Raises:
        MissingDataError: There is no such file.
        DataError: It cannot be read, or is not UTF-8: names the line.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    line = 1
    for block in _read_byte_blocks(path):
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise DataError(f"{path}, line {line}: the text is not UTF-8 ({error.reason}); save it as UTF-8") from error
        line += block.count(b"\n")


def _read_byte_blocks(path: Path) -> Iterator[bytes]:
    """The blocks of a file, unpacked; the last one is empty."""
    if not path.is_file():
        what = "is a folder, where a file is expected" if path.is_dir() else "does not exist"
        raise MissingDataError(f"{path} {what}")
    try:
        with _open(path) as content:
            while block := content.read(_BLOCK_BYTES):
                yield block
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    yield b""


def _open(path: Path) -> IO[bytes]:
    packing = path.suffix.lower()
    if packing == ".gz":
        return cast("IO[bytes]", gzip.open(path))
    return lzma.open(path) if packing == ".xz" else path.open("rb")


def ending_of(path: Path) -> str:
    """The last ending of a name, such as `.csv`, in lower case and without `.gz` or `.xz` behind it."""
    return (path.with_suffix("") if path.suffix.lower() in _PACKINGS else path).suffix.lower()


def read_text(path: Path) -> str:
    """Reads a whole text, as `read_blocks` does."""
    return "".join(read_blocks(path))


def read_lines(path: Path) -> list[str]:
    """Reads the lines of a text, without their ends and without empty ones at the end of the file."""
    lines = read_text(path).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def cut_before_spaces(blocks: Iterable[str], size: int) -> Iterator[str]:
    """Cuts a text into parts of about `size` characters, before white space that follows something else.

    Byte-level tokenizers read the parts as they read the whole. If there is no such place in the second half of a part,
    it is cut at `size` characters.
    """
    buffer = ""
    for block in blocks:
        buffer += block
        start = 0
        while len(buffer) - start > size:
            end = start + size
            places = range(end, start + size // 2, -1)
            end = next((i for i in places if buffer[i].isspace() and not buffer[i - 1].isspace()), end)
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer
