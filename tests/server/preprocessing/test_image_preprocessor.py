"""Encoded images to pixel values."""

import asyncio
import struct
import threading
import time
import zlib
from io import BytesIO

import numpy as np
import pytest
from decoding_images import decode_image
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from headway_server.bundles import ImagePreprocessing
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing import ImageLimits, ImagePreprocessor, ImageTransform
from headway_server.preprocessing.image import to_rgb

LIMITS = ImageLimits(max_bytes=1_000_000, max_pixels=1_000_000, max_side=50_000)
STRETCH = ImagePreprocessing(
    height=6, width=4, resize="stretch", interpolation="bilinear", mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.5)
)
CROP = STRETCH.model_copy(update={"resize": "shorter_side", "resize_size": 9, "interpolation": "bicubic"})
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
RED, WHITE = (255, 0, 0), (255, 255, 255)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(5).integers(0, 256, (height, width, 3), np.uint8))


def encoded(image: Image.Image, image_format: str = "PNG", **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def decoded(data: bytes) -> Image.Image:
    image = decode_image(data, limits=LIMITS)
    assert image.mode == "RGB"
    return image


def png_header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that announces any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


# What is prepared


def test_stretch_resizes_and_normalizes_channel_by_channel():
    image = noise(31, 17)
    prepared = ImagePreprocessor(STRETCH, LIMITS).prepare(encoded(image))
    resized = np.asarray(image.resize((4, 6), Image.Resampling.BILINEAR))
    for channel in range(3):
        expected = (resized[..., channel] / 255 - STRETCH.mean[channel]) / STRETCH.std[channel]
        np.testing.assert_allclose(prepared.pixel_values[channel], expected, atol=1e-5)
    assert (prepared.pixel_values.shape, prepared.pixel_values.dtype) == ((3, 6, 4), np.float32)
    assert (prepared.width, prepared.height) == (31, 17)


@pytest.mark.parametrize(("size", "resized_size"), [((31, 17), (16, 9)), ((17, 31), (9, 16)), ((20, 20), (9, 9))])
def test_shorter_side_keeps_proportions_and_crops_the_centre(size, resized_size):
    image = noise(*size)
    prepared = ImagePreprocessor(CROP, LIMITS).prepare(encoded(image))
    resized = image.resize(resized_size, Image.Resampling.BICUBIC)
    left, top = (resized_size[0] - 4) // 2, (resized_size[1] - 6) // 2
    pixels = np.asarray(resized)[top : top + 6, left : left + 4].transpose(2, 0, 1)
    mean, std = np.array(CROP.mean).reshape(3, 1, 1), np.array(CROP.std).reshape(3, 1, 1)
    np.testing.assert_allclose(prepared.pixel_values, (pixels / 255 - mean) / std, atol=1e-5)


async def test_a_batch_is_prepared_in_order():
    preprocessor = ImagePreprocessor(STRETCH, LIMITS)
    images = [encoded(noise(width, 9)) for width in range(5, 25)]
    prepared = await preprocessor.prepare_batch(images, fields=[f"images[{i}]" for i in range(20)])
    assert [image.width for image in prepared] == list(range(5, 25))
    for data, image in zip(images, prepared, strict=True):
        np.testing.assert_array_equal(image.pixel_values, preprocessor.prepare(data).pixel_values)


async def test_a_small_image_is_prepared_on_the_event_loop_as_in_a_thread(monkeypatch):
    preprocessor, threads = ImagePreprocessor(STRETCH, LIMITS), []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda image: (threads.append(threading.current_thread().name), load(image))[1]
    )
    for size, is_small in (((32, 24), True), ((32, 8), False), ((200, 100), False)):
        data = encoded(Image.new("RGB", size, (10, 200, 90)))
        expected = preprocessor.prepare(data)
        threads.clear()
        [prepared] = await preprocessor.prepare_batch([data], fields=["images[0]"])
        np.testing.assert_array_equal(prepared.pixel_values, expected.pixel_values)
        assert (prepared.width, prepared.height, prepared.transform) == (*size, expected.transform)
        assert (threads[0] == threading.current_thread().name) == is_small


def test_a_crop_larger_than_the_resized_image_is_a_bad_bundle():
    for size in (None, 5):
        with pytest.raises(BundleError, match="needs at least the crop's 6"):
            ImagePreprocessor(CROP.model_copy(update={"resize_size": size}), LIMITS)


def marked(width: int, height: int, x: int, y: int) -> bytes:
    """A black image with a white square of 8 x 8 pixels at (x, y)."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[y : y + 8, x : x + 8] = 255
    return encoded(Image.fromarray(pixels))


@pytest.mark.parametrize("size", [(200, 120), (120, 200), (150, 150), (37, 90)])
@pytest.mark.parametrize("resize", ["stretch", "shorter_side"])
def test_a_point_of_the_image_is_found_in_what_the_model_reads_and_back(size, resize):
    preprocessor = ImagePreprocessor(
        STRETCH.model_copy(
            update={"resize": resize, "resize_size": 70, "width": 60, "height": 64, "mean": (0,) * 3, "std": (1,) * 3}
        ),
        LIMITS,
    )
    corner = np.array([size[0] // 2 - 9, size[1] // 2 + 5])
    prepared = preprocessor.prepare(marked(*size, *corner))
    rows, columns = np.nonzero(prepared.pixel_values[0] > 0.5)
    found = np.array([[columns.min(), rows.min()], [columns.max() + 1, rows.max() + 1]])
    expected = np.array([corner, corner + 8])
    np.testing.assert_allclose(prepared.transform.to_model(expected), found, atol=0.75)
    np.testing.assert_allclose(prepared.transform.to_image(found), expected, atol=2.5)
    np.testing.assert_allclose(prepared.transform.to_image(prepared.transform.to_model(expected)), expected, atol=1e-9)


def test_the_corners_of_the_models_view_are_those_of_the_crop():
    transform = ImagePreprocessor(CROP, LIMITS).prepare(encoded(noise(31, 17))).transform
    assert transform == ImageTransform(scale=(16 / 31, 9 / 17), offset=(-6, -1))
    np.testing.assert_allclose(
        transform.to_image([[0, 0], [4, 6]]), [[6 * 31 / 16, 17 / 9], [10 * 31 / 16, 7 * 17 / 9]]
    )
    whole = ImagePreprocessor(STRETCH, LIMITS).prepare(encoded(noise(31, 17))).transform
    np.testing.assert_allclose(whole.to_model([[0, 0], [31, 17]]), [[0, 0], [4, 6]], atol=1e-9)


def test_points_are_those_of_the_upright_image():
    exif = Image.Exif()
    exif[0x0112] = 6
    prepared = ImagePreprocessor(STRETCH, LIMITS).prepare(encoded(noise(31, 17), exif=exif))
    np.testing.assert_allclose(prepared.transform.to_model([17, 31]), [4, 6])


# What is read


@pytest.mark.parametrize("image_format", FORMATS)
def test_every_format_is_read(image_format):
    pixels = np.asarray(decoded(encoded(Image.new("RGB", (12, 10), RED), image_format)))
    assert pixels.shape == (10, 12, 3)
    assert np.abs(pixels.astype(int) - RED).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_in_exif_is_applied(orientation):
    upright = noise(7, 5)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's transposes that lead from upright to stored
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(np.asarray(decoded(encoded(stored, exif=exif))), np.asarray(upright))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow tells what it skips, as in a server
def test_exif_that_cannot_be_read_does_not_make_an_image_unreadable():
    data = encoded(Image.new("RGB", (9, 9), RED), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff broken")
    assert decoded(data).size == (9, 9)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_lies_over_white(mode):
    image = Image.new("RGBA", (2, 1), (*RED, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    data = encoded(image.quantize(4) if mode == "PA" else image.convert(mode))
    pixels = np.asarray(decoded(data))
    assert tuple(pixels[0, 1]) == WHITE
    assert tuple(pixels[0, 0]) == ((76, 76, 76) if mode == "LA" else RED)


def test_half_transparent_red_over_white_is_pink():
    assert decoded(encoded(Image.new("RGBA", (1, 1), (*RED, 128)))).getpixel((0, 0)) == (255, 127, 127)


def test_a_transparent_colour_lies_over_white():
    data = encoded(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3))
    assert decoded(data).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize(("mode", "colour", "expected"), [("L", 90, 90), ("1", 1, 255), ("P", 0, 0)])
def test_grey_and_palette_images_become_rgb(mode, colour, expected):
    assert decoded(encoded(Image.new(mode, (1, 1), colour))).getpixel((0, 0)) == (expected,) * 3


def test_16_bit_grey_keeps_its_range():
    image = Image.fromarray(np.array([[0, 255, 0x8000, 0xFFFF]], np.uint16))
    assert np.asarray(decoded(encoded(image)))[0, :, 0].tolist() == [0, 0, 128, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "L", "1", "CMYK", "I;16", "RGB with a transparent colour"])
def test_a_tall_image_becomes_rgb_as_its_pieces_do(mode):
    image = tall_image(mode)
    whole = np.asarray(to_rgb(image))
    for top in range(0, image.height, 100):  # of at most 256 rows, an image is converted at once
        piece = image.crop((0, top, image.width, min(top + 100, image.height)))
        np.testing.assert_array_equal(whole[top : top + 100], np.asarray(to_rgb(piece)))


def tall_image(mode: str) -> Image.Image:
    pixels = np.random.default_rng(7).integers(0, 256, (600, 5, 4), np.uint8)
    if mode == "I;16":
        return Image.open(BytesIO(encoded(Image.fromarray(pixels[..., :2].copy().view(np.uint16)[..., 0]))))
    image = Image.fromarray(pixels)
    if mode in ("P", "PA"):
        return Image.open(BytesIO(encoded((image if mode == "PA" else image.convert("RGB")).quantize(16))))
    if mode.startswith("RGB with"):
        colour = tuple(pixels[300, 2, :3].tolist())
        return Image.open(BytesIO(encoded(image.convert("RGB"), transparency=colour)))
    return image.convert("RGB").convert(mode) if mode == "CMYK" else image.convert(mode)


def test_cmyk_becomes_rgb():
    pixel = decoded(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).getpixel((4, 4))
    assert np.abs(np.array(pixel) - RED).max() <= 3


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_read(image_format):
    later = [Image.new("RGB", (5, 5), "blue")]
    data = encoded(Image.new("RGB", (5, 5), RED), image_format, save_all=True, append_images=later, duration=10)
    assert np.abs(np.array(decoded(data).getpixel((2, 2))) - RED).max() <= 3


# What is refused


@pytest.mark.parametrize("image_format", FORMATS)
def test_a_truncated_image_is_refused(image_format):
    data = encoded(noise(60, 60), image_format)
    with pytest.raises(InvalidInputError, match=r"images\[0\]: .*damaged.* send the .*whole"):
        decoded(data[: len(data) * 2 // 3])


@pytest.mark.parametrize("data", [b"\0", b"hello", b"\x01\x02\x03" * 50, b"RIFF\0\0\0\0WAVE"])
def test_what_is_not_an_image_is_refused(data):
    with pytest.raises(
        InvalidInputError,
        match=r"not an image this server can read, or its header is damaged; send .* JPEG, PNG, WebP, BMP or GIF",
    ):
        decoded(data)


def test_an_empty_image_is_refused():
    with pytest.raises(InvalidInputError, match="is empty"):
        decoded(b"")


def test_too_many_bytes_are_refused():
    with pytest.raises(InvalidInputError, match="has 11 bytes, the limit is 10"):
        decode_image(b"x" * 11, limits=ImageLimits(max_bytes=10, max_pixels=10))


@pytest.mark.parametrize(("width", "height"), [(1001, 1000), (12_000, 9_000), (40_000, 40_000), (2**31 - 1, 2**31 - 1)])
def test_a_decompression_bomb_is_refused_by_its_header(width, height, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(InvalidInputError, match=r"announces .*limit of 1000000|announces .*the limit is 1000000"):
        decoded(png_header(width, height))


def test_a_side_past_the_limit_is_refused_by_the_header(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    for width, height in ((50_001, 2), (2, 50_001)):
        with pytest.raises(InvalidInputError, match=f"announces {width} x {height} pixels, the limit of a side is 500"):
            decoded(png_header(width, height))


async def test_the_headers_of_all_images_are_checked_before_any_is_decoded(monkeypatch):
    images = [encoded(noise(9, 9))] * 20 + [png_header(2000, 2000)]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(InvalidInputError, match=r"images\[20\]: announces 2000 x 2000"):
        await ImagePreprocessor(STRETCH, LIMITS).prepare_batch(images, fields=[f"images[{i}]" for i in range(21)])


async def test_no_more_pixels_are_decoded_at_a_time_than_one_image_may_have(monkeypatch):
    running, most, load, lock = 0, 0, ImageFile.ImageFile.load, threading.Lock()

    def slow_load(image: Image.Image) -> object:
        nonlocal running, most
        with lock:
            running += image.width * image.height
            most = max(most, running)
        time.sleep(0.005)
        try:
            return load(image)
        finally:
            with lock:
                running -= image.width * image.height

    images = [encoded(Image.new("L", (size, 1000))) for size in (600, 700, 1000, 300, 500, 600)]
    monkeypatch.setattr(ImageFile.ImageFile, "load", slow_load)
    pools = [ImagePreprocessor(STRETCH, LIMITS) for _ in range(2)]  # of two models
    fields = [f"images[{i}]" for i in range(len(images))]
    await asyncio.gather(*(preprocessor.prepare_batch(images, fields=fields) for preprocessor in pools))
    assert 0 < most <= LIMITS.max_pixels


def test_a_strip_that_resizing_would_blow_up_is_refused():
    data = encoded(Image.new("RGB", (50_000, 1)))
    with pytest.raises(InvalidInputError, match=r"is 50000 x 1 pixels and would become 450000 x 9"):
        ImagePreprocessor(CROP, LIMITS).prepare(data)


async def test_the_bad_image_of_a_batch_is_named():
    images = [encoded(noise(9, 9)), b"nothing", encoded(noise(9, 9))]
    with pytest.raises(InvalidInputError) as caught:
        await ImagePreprocessor(STRETCH, LIMITS).prepare_batch(images, fields=["images[0]", "images[1]", "images[2]"])
    assert caught.value.field == "images[1]"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow tells what it skips, as in a server
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    image_format=st.sampled_from(FORMATS),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=20),
    kept=st.floats(0.1, 1),
)
def test_mutated_images_are_read_or_refused_and_nothing_else(image_format, changes, kept):
    data = bytearray(SOURCES[image_format])
    for place, value in changes:
        data[int(place * len(data))] = value
    try:
        image = decode_image(bytes(data[: int(len(data) * kept)]), limits=LIMITS)
    except InvalidInputError:
        return
    assert image.mode == "RGB"
    assert image.width * image.height <= LIMITS.max_pixels


SOURCES = {image_format: encoded(noise(24, 20), image_format) for image_format in FORMATS}
