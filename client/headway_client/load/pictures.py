"""Small PNG images, made without an imaging library."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

Pixel = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""


def encode_png(width: int, height: int, pixel: Callable[[int, int], Pixel]) -> bytes:
    """Encodes an RGB image whose colour at column x and row y is `pixel(x, y)`."""
    rows = b"".join(
        b"\0" + b"".join(bytes(pixel(x, y)) for x in range(width))  # filter type 0 heads every row
        for y in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB, no interlacing
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def sample_pictures() -> list[bytes]:
    """Eight 32x32 pictures: a disc of a colour on a shaded ground, each of its own colours and place."""
    return [encode_png(32, 32, _disc(index)) for index in range(8)]


def _disc(index: int) -> Callable[[int, int], Pixel]:
    centre_x, centre_y, radius = 8 + 2 * index, 22 - index, 6 + index % 4

    def pixel(x: int, y: int) -> Pixel:
        if (x - centre_x) ** 2 + (y - centre_y) ** 2 <= radius**2:
            return (200 - 20 * index, 40 + 25 * index, 60 + 10 * index)
        return (90 + 3 * y, 140 + 2 * x, 250 - 4 * y)

    return pixel


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
