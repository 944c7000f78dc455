"""Reads the size a JPEG or PNG announces, without opening it: a few comparisons, so the event loop may ask.

What it says is a hint: whoever decodes the image opens it, and checks what its decoder reads there.
"""

from __future__ import annotations

import struct

_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"
_JPEG = b"\xff\xd8"
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of the segment that has the size: of the 16 of its kind, three mean something else (ITU T.81, table B.1)."""
_SEGMENTS = frozenset(range(0xC0, 0xFF)) - frozenset(range(0xD0, 0xDA)) - _FRAMES
"""Markers that a length follows; behind the one that coded data follows, there is no size any more."""
_MOST_SEGMENTS = 32
"""Segments before that one that are passed."""


def announced_size(data: bytes) -> tuple[int, int] | None:
    """Returns the sides that a JPEG or PNG announces, in no certain order; None where none stand near the beginning."""
    if data.startswith(_PNG):
        return _sides(data, len(_PNG), ">II")
    if data.startswith(_JPEG):
        return _jpeg_sides(data)
    return None


def _jpeg_sides(data: bytes) -> tuple[int, int] | None:
    position = len(_JPEG)
    for _ in range(_MOST_SEGMENTS):
        if len(data) < position + 4 or data[position] != 0xFF:
            return None
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4])
        if marker in _FRAMES:
            return _sides(data, position + 5, ">HH")  # behind the marker, the length and the bits of a sample
        if marker not in _SEGMENTS or length < 2:
            return None
        position += 2 + length
    return None


def _sides(data: bytes, offset: int, format_: str) -> tuple[int, int] | None:
    """The two numbers that stand at `offset`."""
    if len(data) < offset + struct.calcsize(format_):
        return None
    one, other = struct.unpack_from(format_, data, offset)
    return one, other
