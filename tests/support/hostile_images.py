"""Image files whose headers say other than their pixels, with checksums that are right.

A changed byte of a PNG is refused by its checksum before the decoder sees it, and a header that announces a large
picture costs most where the data keep the promise. So the headers here are changed field by field, on small pictures
and on ones of as many pixels as the server takes.
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from PIL import Image

MAX_PIXELS: Final = 20_000_000
"""The server's default."""
SIDES = (5000, 4000)
"""Of the large pictures."""


@cache
def samples() -> list[bytes]:
    """Writes pictures of every format: small ones of noise, and flat ones of 20 megapixels."""
    noise = Image.frombytes("RGB", (48, 40), random.Random(0).randbytes(48 * 40 * 3))
    large = Image.linear_gradient("L").resize(SIDES).convert("RGB")
    written = []
    for picture in (noise, large):
        paletted = picture.convert("P")
        files: list[tuple[Image.Image, dict[str, Any]]] = [
            (picture, {"format": "JPEG"}),
            (picture, {"format": "JPEG", "progressive": True}),
            (picture.convert("CMYK"), {"format": "JPEG"}),
            (picture, {"format": "PNG"}),
            (picture.convert("RGBA"), {"format": "PNG"}),
            (paletted, {"format": "PNG", "transparency": 3}),
            (picture.convert("L").convert("I;16"), {"format": "PNG"}),
            (picture.convert("RGBA"), {"format": "WEBP", "method": 0}),
            (picture, {"format": "WEBP", "lossless": True, "method": 0}),
            (picture, {"format": "BMP"}),
            (picture.convert("1"), {"format": "BMP"}),
            (paletted, {"format": "GIF"}),
            (paletted, {"format": "GIF", "save_all": True, "append_images": [noise.convert("P")]}),
        ]
        for image, options in files:
            image.save(file := io.BytesIO(), **options)
            if len(file.getvalue()) <= 16 * 2**20:
                written.append(file.getvalue())
    written += [_interlaced_png(*SIDES), _run_length_bmp(*SIDES), _animated_gif(64)]
    return written


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _interlaced_png(width: int, height: int) -> bytes:
    """The dearest kind: 16 bits of four channels, in seven passes."""
    header = struct.pack(">IIBBBBB", width, height, 16, 6, 0, 0, 1)
    rows = zlib.compress(bytes(width * height * 8 + 8 * height), 1)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def _run_length_bmp(width: int, height: int) -> bytes:
    """Runs of one pixel each, which a decoder in Python goes through one by one."""
    body = b"\x01\x00" * (width * height // 5)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body), 0, 0, 256, 0)
    start = 14 + 40 + 1024
    return struct.pack("<2sIHHI", b"BM", start + len(body), 0, 0, start) + info + bytes(1024) + body


def _animated_gif(num_frames: int) -> bytes:
    frames = [Image.new("P", (200, 200), index) for index in range(num_frames)]
    frames[0].save(file := io.BytesIO(), format="GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def damage(rng: random.Random) -> bytes:
    """Returns a picture with one to four changes of its header, and sometimes of what follows it."""
    data = bytearray(rng.choice(samples()))
    change = _CHANGES[bytes(data[:2])]
    for _ in range(rng.choice((1, 1, 2, 4))):
        change(data, rng)
    for _ in range(rng.choice((0, 0, 1, 3))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    if data[:4] == b"\x89PNG":
        _right_checksums(data)
    return bytes(data)


def _sides(rng: random.Random, most: int) -> tuple[int, int]:
    """Draws a width and a height, mostly of as many pixels as are allowed."""
    match rng.randrange(4):
        case 0:
            return rng.randrange(most + 1), rng.randrange(most + 1)
        case 1:
            return rng.choice((0, 1, most, 2**31 - 1, 2**31)), rng.choice((0, 1, 2, most))
    width = min(most, int(2 ** rng.uniform(0, 14)))
    return width, max(1, min(most, MAX_PIXELS // width))


def _put(data: bytearray, position: int, kind: str, *values: int) -> None:
    sizes = {"B": 8, "H": 16, "I": 32}
    bits = [sizes[letter] for letter in kind[1:]]
    packed = struct.pack(kind, *(value % 2**size for value, size in zip(values, bits, strict=True)))
    if position + len(packed) <= len(data):
        data[position : position + len(packed)] = packed


def _change_png(data: bytearray, rng: random.Random) -> None:
    match rng.randrange(4):
        case 0:
            _put(data, 16, ">II", *_sides(rng, 16_384))
        case 1:
            depth, colour = rng.choice((1, 2, 4, 8, 16, 3)), rng.choice((0, 2, 3, 4, 6, 1))
            _put(data, 24, ">BB", depth, colour)
        case 2:
            data[28] ^= 1  # interlaced
        case _:
            extra = rng.choice(
                (
                    _chunk(b"tRNS", rng.randbytes(rng.choice((1, 2, 6, 256)))),
                    _chunk(b"PLTE", rng.randbytes(rng.choice((1, 3, 768, 900)))),
                    _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**24))),
                    _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**24))),
                    _chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(2**20))) * 60,
                    _chunk(b"acTL", struct.pack(">II", rng.choice((0, 2, 2**31 - 1)), 0)),
                    _chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, *_sides(rng, 16_384), 0, 0, 1, 1, 0, 0)),
                    _chunk(b"eXIf", b"MM\0*" + rng.randbytes(64)),
                    _chunk(b"tEXt", b"a\0b") * 20_000,
                )
            )
            data[33:33] = extra


def _right_checksums(data: bytearray) -> None:
    position = 8
    while position + 12 <= len(data):
        end = position + 8 + int.from_bytes(data[position : position + 4])
        if end + 4 > len(data):
            return
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[position + 4 : end]))
        position = end + 4


def _change_jpeg(data: bytearray, rng: random.Random) -> None:
    frames = [data.find(marker) for marker in (b"\xff\xc0", b"\xff\xc2") if marker in data]
    frame = min(frames, default=2)
    match rng.randrange(7):
        case 0:
            width, height = _sides(rng, 16_384)
            _put(data, frame + 5, ">HH", height, width)
        case 1:
            _put(data, frame + 11 + 3 * rng.randrange(3), ">B", rng.choice((0x11, 0x22, 0x44, 0x14, 0x41, 0)))
        case 2:
            _put(data, frame + 9, ">B", rng.choice((1, 2, 3, 4, 0, 255)))
        case 3:
            _put(data, frame, ">BB", 0xFF, rng.choice((0xC0, 0xC1, 0xC2, 0xC9, 0xCA, 0xC3)))
        case 4 if (scan := data.find(b"\xff\xda")) > 0:
            length = 2 + int.from_bytes(data[scan + 2 : scan + 4])
            data[scan:scan] = bytes(data[scan : scan + length]) * rng.choice((1, 50, 99))
        case 5:
            data[2:2] = b"\xff\xdd\0\4" + rng.randbytes(2)  # restarts
        case _:
            data[2:2] = rng.choice(
                (b"\xff\xfe\0\2" * 20_000, b"\xff\xe1\0\x10Exif\0\0MM\0*\0\0\0\x08", b"\xff" * 10_000)
            )


def _change_webp(data: bytearray, rng: random.Random) -> None:
    kind = bytes(data[12:16])
    width, height = _sides(rng, 16_383)
    if kind == b"VP8X" and rng.random() < 0.5:
        data[24:30] = (max(width, 1) - 1).to_bytes(4, "little")[:3] + (max(height, 1) - 1).to_bytes(4, "little")[:3]
        return
    if kind == b"VP8X" and rng.random() < 0.3:
        data[20] ^= rng.choice((2, 4, 8, 16, 32))  # animation, XMP, EXIF, alpha, ICC
        return
    lossy = data.find(b"\x9d\x01\x2a", 20)
    if lossy > 0:
        _put(data, lossy + 3, "<HH", width & 0x3FFF, height & 0x3FFF)
    elif (lossless := data.find(b"VP8L")) > 0:
        sides = (max(width, 1) - 1) % 2**14 | (max(height, 1) - 1) % 2**14 << 14 | 1 << 28
        _put(data, lossless + 9, "<I", sides)


def _change_bmp(data: bytearray, rng: random.Random) -> None:
    match rng.randrange(5):
        case 0:
            width, height = _sides(rng, 16_384)
            _put(data, 18, "<II", width, rng.choice((height, -height)))
        case 1:
            _put(data, 28, "<H", rng.choice((1, 4, 8, 16, 24, 32, 2)))
        case 2:
            _put(data, 30, "<I", rng.choice((0, 1, 2, 3, 4, 6)))
        case 3:
            _put(data, 14, "<I", rng.choice((12, 40, 52, 56, 64, 108, 124, 2**31)))
        case _:
            _put(data, 46, "<I", rng.choice((0, 1, 256, 2**20, 2**31)))


def _change_gif(data: bytearray, rng: random.Random) -> None:
    match rng.randrange(4):
        case 0:
            _put(data, 6, "<HH", *_sides(rng, 16_384))
        case 1 if (image := data.find(b",")) > 0:
            _put(data, image + 5, "<HH", *_sides(rng, 16_384))
        case 2:
            data[10] = rng.randrange(256)
        case _:
            data[13:13] = rng.choice((b"!\xfe\1a\0" * 10_000, b"!\xf9\4\5\0\0\0\0", b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0"))


_CHANGES: Final[dict[bytes, Callable[[bytearray, random.Random], None]]] = {
    b"\x89P": _change_png,
    b"\xff\xd8": _change_jpeg,
    b"RI": _change_webp,
    b"BM": _change_bmp,
    b"GI": _change_gif,
}
