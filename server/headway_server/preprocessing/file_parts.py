"""Counts the parts of a JPEG or PNG file that its reader goes through one by one, in Python.

An empty part takes 4 bytes of a JPEG and 12 of a PNG, and about a microsecond: a file of 14 MiB kept a thread, and the
interpreter's lock, for five seconds. Encoders write some dozens; a PNG of 16 MiB in chunks of 8 KiB has 2,048.
"""

from __future__ import annotations

from typing import Final

from headway_server.errors import InvalidInputError

MAX_PARTS: Final = 20_000
"""Most segments, and bytes between them, of a JPEG before its pixels; most chunks of a PNG."""

_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_START_OF_SCAN = 0xDA
_ALONE = frozenset([0x00, 0x01, *range(0xD0, 0xDA)])
"""JPEG markers without a length (ITU T.81, table B.1), and 00, which is none."""
_FILL = 0xFF


def check_parts(data: bytes, field: str) -> None:
    """Checks the parts of a JPEG or PNG; other files pass.

    Raises:
        InvalidInputError: There are more than `MAX_PARTS`.
    """
    if (data.startswith(_JPEG) and _jpeg_has_more(data)) or (data.startswith(_PNG) and _png_has_more(data)):
        raise InvalidInputError(
            field, f"is made of more than {MAX_PARTS} parts; save it anew as a JPEG or PNG and send that"
        )


def _jpeg_has_more(data: bytes) -> bool:
    position, num_parts = len(_JPEG), 0
    while num_parts <= MAX_PARTS:
        found = data.find(b"\xff", position)
        if found < 0 or found + 4 > len(data):
            return len(data) - position + num_parts > MAX_PARTS
        num_parts += 1 + found - position
        marker = data[found + 1]
        if marker == _START_OF_SCAN:
            return num_parts > MAX_PARTS
        if marker == _FILL:
            position = found + 1
        elif marker in _ALONE:
            position = found + 2
        else:
            position = found + 2 + max(int.from_bytes(data[found + 2 : found + 4]), 2)
    return True


def _png_has_more(data: bytes) -> bool:
    position = len(_PNG)
    for _ in range(MAX_PARTS):
        if position + 12 > len(data):
            return False
        position += 12 + int.from_bytes(data[position : position + 4])
    return position + 12 <= len(data)
