"""The size a file announces, read without a decoder: right where it is told, and silent about all else."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headway_server.bundles import ImagePreprocessing
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImageLimits, ImagePreprocessor
from headway_server.preprocessing.announced_size import announced_size

SETTINGS = ImagePreprocessing(
    height=8, width=8, resize="shorter_side", resize_size=9, interpolation="bilinear", mean=(0, 0, 0), std=(1, 1, 1)
)
PREPROCESSOR = ImagePreprocessor(SETTINGS, ImageLimits(max_bytes=1_000_000, max_pixels=1_000_000))


def encoded(width: int, height: int, image_format: str, **options: object) -> bytes:
    pixels = np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, image_format, **options)
    return buffer.getvalue()


def png_chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def png_header(width: int, height: int, depth: int = 8, colour: int = 2) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (30, 17), (300, 2), (513, 700)])
@pytest.mark.parametrize(
    ("image_format", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"icc_profile": b"\xff\xc0" * 40_000, "comment": b"\xff\xd8\xff\xc2" * 9}),
    ],
)
def test_a_png_and_a_jpeg_tell_their_size(width, height, image_format, options):
    size = announced_size(encoded(width, height, image_format, **options))
    assert size is not None
    assert sorted(size) == sorted((width, height))


@pytest.mark.parametrize("image_format", ["WEBP", "BMP", "GIF"])
def test_other_formats_are_not_asked(image_format):
    assert announced_size(encoded(9, 9, image_format)) is None


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
def test_what_is_cut_off_tells_nothing_or_the_size(image_format):
    data = encoded(30, 17, image_format)
    for length in range(len(data)):
        size = announced_size(data[:length])
        assert size is None or sorted(size) == [17, 30]


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"]))
def test_any_bytes_are_taken(data, beginning):
    announced_size(beginning + data)


@pytest.mark.parametrize(
    ("width", "height", "is_small"), [(128, 128, True), (129, 128, False), (16, 64, True), (16, 65, False)]
)
def test_small_images_are_those_of_few_pixels_that_are_no_strips(width, height, is_small):
    small = PREPROCESSOR.small_images([encoded(width, height, "JPEG")], fields=["images[0]"])
    assert (small is not None) == is_small


def test_one_large_image_makes_a_call_one_of_large_images():
    images = [encoded(16, 16, "JPEG"), encoded(600, 400, "JPEG")]
    assert PREPROCESSOR.small_images(images, fields=["images[0]", "images[1]"]) is None


def test_small_images_are_small_files():
    data = encoded(16, 16, "JPEG")
    assert PREPROCESSOR.small_images([data + bytes(16 * 1024 - len(data))], fields=["images[0]"]) is not None
    assert PREPROCESSOR.small_images([data + bytes(16 * 1024 + 1 - len(data))], fields=["images[0]"]) is None


def test_a_jpeg_with_bytes_that_fill_is_not_asked():
    data = encoded(16, 16, "JPEG")
    assert announced_size(data[:2] + b"\xff" + data[2:]) is None


def test_what_is_larger_than_it_announced_is_refused_before_it_is_decoded():
    pixels = zlib.compress(bytes(1000))
    data = png_chunks(png_header(16, 16), png_header(900, 800), (b"IDAT", pixels), (b"IEND", b""))
    [small] = PREPROCESSOR.small_images([data], fields=["images[0]"])
    with pytest.raises(
        InvalidInputError, match=r"images\[0\]: announces two sizes, one of them 900 x 800 pixels; save"
    ):
        small.pixel_values()


def test_a_transparent_colour_of_another_kind_than_the_pixels_is_refused():
    pixels = zlib.compress(bytes(16 * (1 + 6 * 16)))
    grey, colour = png_header(16, 16, depth=8, colour=0), png_header(16, 16, depth=16, colour=2)
    data = png_chunks(grey, (b"tRNS", b"\0\x05"), colour, (b"IDAT", pixels), (b"IEND", b""))
    with pytest.raises(InvalidInputError, match="begins like a PNG image but its header is damaged"):
        PREPROCESSOR.prepare(data)


def test_a_small_image_is_prepared_as_any_other():
    data = encoded(60, 40, "JPEG")
    [small] = PREPROCESSOR.small_images([data], fields=["images[0]"])
    np.testing.assert_array_equal(small.pixel_values(), PREPROCESSOR.prepare(data).pixel_values)
    assert small.size == (60, 40)
    assert small.interval[0] < small.interval[1]
