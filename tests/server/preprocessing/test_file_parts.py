"""A file of endless parts is refused before it is opened; ordinary ones, and any bytes, are not."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImageLimits
from headway_server.preprocessing.file_parts import MAX_PARTS, check_parts
from headway_server.preprocessing.image import decode_image

LIMITS = ImageLimits(max_bytes=10_000_000, max_pixels=1_000_000)


def encoded(image_format: str, **options: object) -> bytes:
    buffer = BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (64, 48, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, image_format, **options)
    return buffer.getvalue()


def jpeg_with(filling: bytes) -> bytes:
    data = encoded("JPEG")
    start = data.index(b"\xff\xda")
    return data[:start] + filling + data[start:]


def png_with(num_chunks: int) -> bytes:
    data = encoded("PNG")
    chunk = struct.pack(">I", 0) + b"teSt" + struct.pack(">I", zlib.crc32(b"teSt"))
    end = data.index(b"IDAT") - 4
    return data[:end] + chunk * num_chunks + data[end:]


@pytest.mark.parametrize(
    "filling",
    [b"\xff\xfe\0\2", b"\xff", b"\xff\x01", b"\xff\x00", b"junk"],
    ids=["segments", "fill", "alone", "zero", "junk"],
)
def test_a_jpeg_of_too_many_parts_is_refused(filling):
    data = jpeg_with(filling * (MAX_PARTS + 1))
    with pytest.raises(InvalidInputError, match=r"images\[1\]: is made of more than 20000 parts; save it anew"):
        decode_image(data, field="images[1]", limits=LIMITS)


def test_a_png_of_too_many_chunks_is_refused():
    with pytest.raises(InvalidInputError, match="more than 20000 parts"):
        decode_image(png_with(MAX_PARTS), field="images[0]", limits=LIMITS)


@pytest.mark.parametrize("data", [jpeg_with(b"\xff\xfe\0\2" * 15_000), png_with(15_000)], ids=["JPEG", "PNG"])
def test_as_many_as_the_limit_are_decoded(data):
    assert decode_image(data, field="images[0]", limits=LIMITS).size == (48, 64)


def test_coded_data_and_what_is_cut_off_are_no_parts():
    data = encoded("JPEG", quality=100, restart_marker_blocks=1) + b"\xff" * 100_000
    check_parts(data, "images[0]")
    for length in range(0, len(data), 997):
        check_parts(data[:length], "images[0]")


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n"]))
def test_few_bytes_never_are_too_many_parts(data, beginning):
    check_parts(beginning + data, "images[0]")
