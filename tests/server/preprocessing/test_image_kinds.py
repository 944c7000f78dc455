"""Every kind of picture becomes what a viewer shows, and what is no such picture is refused with what to do."""

import asyncio
import struct
import threading
import zlib
from io import BytesIO

import numpy as np
import pytest
from decoding_images import decode_image
from PIL import Image
from waiting import until

from headway_server.bundles import ImagePreprocessing
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImageLimits, ImagePreprocessor

LIMITS = ImageLimits(max_bytes=1_000_000, max_pixels=1_000_000)
SETTINGS = ImagePreprocessing(
    height=4, width=4, resize="stretch", interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
)
ORIENTATION = 0x0112
STORED_BY = {
    1: [],
    2: [Image.Transpose.FLIP_LEFT_RIGHT],
    3: [Image.Transpose.ROTATE_180],
    4: [Image.Transpose.FLIP_TOP_BOTTOM],
    5: [Image.Transpose.TRANSPOSE],
    6: [Image.Transpose.ROTATE_90],
    7: [Image.Transpose.TRANSVERSE],
    8: [Image.Transpose.ROTATE_270],
}
"""What was done to an upright picture that is stored with an orientation (Exif 2.32, section 4.6.4)."""


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, channels), np.uint8)


def encoded(image: Image.Image, image_format: str = "PNG", **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def pixels_of(data: bytes) -> np.ndarray:
    image = decode_image(data, limits=LIMITS)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def png(width: int, height: int, *, bits: int, colour: int, rows: bytes, chunks: dict[bytes, bytes] | None = None):
    """A PNG written by hand, for kinds that Pillow reads and does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    extra = b"".join(chunk(kind, data) for kind, data in (chunks or {}).items())
    parts = [chunk(b"IHDR", header), extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# Orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("image_format", "options"),
    [("JPEG", {"quality": 100, "subsampling": 0}), ("PNG", {}), ("WEBP", {"lossless": True})],
)
def test_all_orientations_are_turned_upright_in_every_format_that_has_them(orientation, image_format, options):
    upright = Image.fromarray(noise(8, 24)).resize((48, 16), Image.Resampling.BICUBIC)
    stored = upright
    for method in STORED_BY[orientation]:
        stored = stored.transpose(method)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encoded(stored, image_format, exif=exif, **options)
    found = pixels_of(data)
    assert found.shape == (16, 48, 3)
    plain = Image.open(BytesIO(data))
    assert plain.getexif()[ORIENTATION] == orientation, "the test's own picture has no orientation"
    assert np.abs(found - np.asarray(upright)).mean() <= (2 if image_format == "JPEG" else 0)
    prepared = ImagePreprocessor(SETTINGS, LIMITS).prepare(data)
    assert (prepared.width, prepared.height) == (48, 16)


@pytest.mark.parametrize("orientation", [0, 9, 300])
def test_an_orientation_that_does_not_exist_is_none(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    picture = noise(5, 7)
    np.testing.assert_array_equal(pixels_of(encoded(Image.fromarray(picture), exif=exif)), picture)


# Depths, alpha and colour spaces


def test_16_bit_grey_is_scaled_and_not_clipped():
    deep = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    found = pixels_of(encoded(Image.fromarray(deep)))
    assert np.abs(found[..., 0] - deep / 257).max() <= 1
    assert len(np.unique(found)) == 256


def test_16_bit_grey_with_a_transparent_level_lies_over_white():
    rows = b"".join(b"\0" + struct.pack(">HH", 0x1234, 0x1235) for _ in range(2))
    data = png(2, 2, bits=16, colour=0, rows=rows, chunks={b"tRNS": struct.pack(">H", 0x1234)})
    assert pixels_of(data)[..., 0].tolist() == [[255, 0x12], [255, 0x12]]


@pytest.mark.parametrize(("colour", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_16_bit_colour_and_alpha_are_scaled(colour, channels):
    values = [0x4000, 0x8000, 0xC000, 0xFFFF] if channels != 2 else [0x4000, 0xFFFF]
    rows = b"\0" + struct.pack(f">{channels}H", *values[:channels])
    expected = [0x40] * 3 if channels == 2 else [0x40, 0x80, 0xC0]
    assert np.abs(pixels_of(png(1, 1, bits=16, colour=colour, rows=rows))[0, 0] - expected).max() <= 1


@pytest.mark.parametrize(("bits", "row"), [(1, 0b01000000), (2, 0b00110000), (4, 0x0F)])
def test_grey_of_few_bits_fills_the_whole_range(bits, row):
    assert pixels_of(png(2, 1, bits=bits, colour=0, rows=bytes([0, row])))[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize(("bits", "row"), [(1, 0b01000000), (2, 0b00010000), (4, 0x01)])
def test_a_transparent_level_of_few_bits_lies_over_white(bits, row):
    data = png(2, 1, bits=bits, colour=0, rows=bytes([0, row]), chunks={b"tRNS": struct.pack(">H", 1)})
    assert pixels_of(data)[0, :, 0].tolist() == [0, 255]


def test_a_transparent_colour_of_16_bits_lies_over_white():
    rows = b"\0" + struct.pack(">6H", 0x12FF, 0x3400, 0x5601, 0x13FF, 0x3400, 0x5601)
    data = png(2, 1, bits=16, colour=2, rows=rows, chunks={b"tRNS": struct.pack(">3H", 0x12FF, 0x3400, 0x5601)})
    assert pixels_of(data)[0].tolist() == [[255, 255, 255], [0x13, 0x34, 0x56]]


def test_a_palettes_alpha_is_blended_colour_by_colour():
    rows = bytes([0, 0, 1, 2])
    chunks = {b"PLTE": bytes([255, 0, 0, 0, 255, 0, 0, 0, 255]), b"tRNS": bytes([255, 128, 0])}
    found = pixels_of(png(3, 1, bits=8, colour=3, rows=rows, chunks=chunks))
    assert np.abs(found[0] - [[255, 0, 0], [127, 255, 127], [255, 255, 255]]).max() <= 1


@pytest.mark.parametrize("image_format", ["PNG", "WEBP"])
def test_alpha_blends_with_white(image_format):
    picture = np.array([[[200, 100, 0, 255], [200, 100, 0, 128], [200, 100, 0, 0]]], np.uint8)
    options = {"lossless": True, "exact": True} if image_format == "WEBP" else {}
    found = pixels_of(encoded(Image.fromarray(picture), image_format, **options))
    assert np.abs(found[0] - [[200, 100, 0], [227, 177, 127], [255, 255, 255]]).max() <= 1


def test_cmyk_is_inverted_as_adobe_writes_it():
    """Pillow writes the inverted values that Adobe's programs do, and says so in an APP14 segment."""
    inks = {(0, 0, 0, 0): (255, 255, 255), (0, 0, 0, 255): (0, 0, 0), (255, 0, 0, 0): (0, 255, 255)}
    for ink, colour in inks.items():
        data = encoded(Image.new("CMYK", (16, 16), ink), "JPEG", quality=95)
        assert b"Adobe" in data
        assert np.abs(pixels_of(data) - colour).max() <= 3


def test_a_jpeg_with_further_pictures_behind_it_is_read():
    """As telephones write them (CIPA DC-007)."""
    first, second = Image.new("RGB", (16, 16), (200, 30, 30)), Image.new("RGB", (16, 16), "blue")
    data = encoded(first, "MPO", save_all=True, append_images=[second])
    assert np.abs(pixels_of(data) - (200, 30, 30)).max() <= 3
    with pytest.raises(InvalidInputError, match="damaged or truncated JPEG image"):
        pixels_of(encoded(Image.fromarray(noise(64, 64)), "MPO", save_all=True, append_images=[second])[:2000])


# Animations


@pytest.mark.parametrize("transparent", [False, True])
def test_a_gif_whose_first_frame_is_smaller_than_its_canvas(transparent):
    red = Image.new("RGB", (4, 4), "red").quantize(2)
    data = bytearray(encoded(red, "GIF", transparency=1) if transparent else encoded(red, "GIF"))
    data[6:10] = struct.pack("<HH", 8, 6)  # the canvas; the frame stays 4 x 4 at its upper left
    found = pixels_of(bytes(data))
    assert found.shape == (6, 8, 3)
    assert (found[:4, :4] == (255, 0, 0)).all()
    if transparent:
        assert (found[4:] == 255).all()


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG"])
def test_later_frames_of_an_animation_are_not_decoded(image_format):
    first = Image.fromarray(noise(32, 32))
    later = [Image.fromarray(255 - noise(32, 32))]
    options = {"lossless": True} if image_format == "WEBP" else {}
    data = encoded(first, image_format, save_all=True, append_images=later, duration=10, **options)
    expected = np.asarray(first.quantize().convert("RGB") if image_format == "GIF" else first).astype(int)
    assert np.abs(pixels_of(data) - expected).mean() <= (16 if image_format == "GIF" else 0)


# What is refused


NOT_READ = {
    "HEIC": struct.pack(">I", 24) + b"ftypheic\0\0\0\0mif1heic" + b"\0" * 40,
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "TIFF": encoded(Image.new("RGB", (4, 4)), "TIFF"),
    "JPEG 2000": encoded(Image.new("RGB", (4, 4)), "JPEG2000"),
    "icon": encoded(Image.new("RGB", (16, 16)), "ICO"),
    "PDF": b"%PDF-1.7\n",
}
"""Some of these Pillow could read, by parts of it that nobody here asked for."""


@pytest.mark.parametrize("name", NOT_READ)
def test_formats_that_are_not_offered_are_refused_with_those_that_are(name):
    with pytest.raises(
        InvalidInputError, match=r"not an image this server can read.* JPEG, PNG, WebP, BMP or GIF"
    ) as e:
        pixels_of(NOT_READ[name])
    assert e.value.field == "images[0]"


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
def test_a_header_that_breaks_off_is_called_damaged(image_format):
    data = encoded(Image.new("RGB", (40, 40)), image_format)
    with pytest.raises(InvalidInputError, match=r"damaged.* whole"):
        pixels_of(data[:14])


ZERO_SIZED = {
    "PNG": png(0, 3, bits=8, colour=2, rows=b""),
    "GIF": b"GIF89a" + struct.pack("<HH", 0, 0) + b"\0\0\0,\0\0\0\0\0\0\0\0\0\x02\x00;",
    "BMP": b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 0, 3, 1, 24, 0, 0, 0, 0, 0, 0),
    "JPEG": b"\xff\xd8\xff\xc0\x00\x11\x08\x00\x00\x00\x00\x03\x01\x11\x00\x02\x11\x00\x03\x11\x00\xff\xd9",
}


@pytest.mark.parametrize("image_format", ZERO_SIZED)
def test_an_image_without_pixels_is_refused(image_format):
    with pytest.raises(InvalidInputError, match=r"images\[0\]: "):
        pixels_of(ZERO_SIZED[image_format])


@pytest.mark.parametrize("place", range(0, 100, 10))
def test_a_png_with_a_flipped_byte_of_pixels_is_refused(place):
    data = bytearray(encoded(Image.fromarray(noise(40, 40))))
    start = data.index(b"IDAT") + 4
    data[start + place * (len(data) - start - 20) // 100] ^= 0x55
    with pytest.raises(InvalidInputError, match="is a damaged or truncated PNG image"):
        pixels_of(bytes(data))


# Fairness


async def test_a_picture_does_not_wait_for_all_of_a_large_call(monkeypatch):
    preprocessor = ImagePreprocessor(SETTINGS, LIMITS)
    begun: list[str] = []
    prepare, lock = preprocessor.prepare, threading.Lock()

    def noting(data: bytes, field: str):
        with lock:
            begun.append(field)
        return prepare(data, field)

    monkeypatch.setattr(preprocessor, "prepare", noting)
    picture = encoded(Image.fromarray(noise(200, 200)))
    large = asyncio.create_task(preprocessor.prepare_batch([picture] * 64, fields=[f"large[{i}]" for i in range(64)]))
    await until(lambda: bool(begun))
    await preprocessor.prepare_batch([picture], fields=["small"])
    assert begun.index("small") < 32, begun
    assert len(await large) == 64
