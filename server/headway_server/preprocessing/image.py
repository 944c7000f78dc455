"""Encoded images to `pixel_values`, as the bundle's manifest says.

Sizes are checked on the header, before anything is decoded: a few bytes can announce gigabytes of pixels. What passes
takes about 16 bytes a pixel while it is decoded (a WebP; others less), so the pixels that are decoded at a time, by all
threads together, are held to the limit of one image.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from headway_server.bundles import ImagePreprocessing
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing.announced_size import announced_size
from headway_server.preprocessing.file_parts import check_parts
from headway_server.preprocessing.gate import Gate
from headway_server.preprocessing.image_format import READ, READ_AS_TEXT, refusal
from headway_server.preprocessing.jpeg_scans import check_scans
from headway_server.preprocessing.pool import image_pool

# Imported here because Image.open would import every plugin there is at the first WebP image.
_PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, BmpImagePlugin, GifImagePlugin)
_EXIF_ORIENTATION = 0x0112
_UPRIGHT: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BAND_HEIGHT = 256
"""Rows that are converted at a time: of a whole picture there would be copies in two more modes, and other threads
would wait for each, since some of Pillow's conversions keep the GIL."""
_LEVEL_SCALES = {"L;2": 85, "L;4": 17}
"""What a level of a grey PNG of so many bits is multiplied by, by Pillow's name for its rows."""
_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_MOST_IN_POOL = 2
"""Images of a call that are in the pool at a time, so that one picture does not wait for a call of 64."""
_SMALL_PIXELS = 128 * 128
"""An image that announces no more is decoded by whoever runs its batch (0.1 to 0.2 ms), since handing it to the pool
and hearing of it again takes as long."""
_SMALL_BYTES = 16 * 1024
"""Of its file, at most: what else a file holds takes time, too."""
_SMALL_RATIO = 4
"""Of its sides, at most: a narrow one may grow by a resize of its shorter side."""
_DECODING = Gate()
"""The process's pixels that are being decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Sizes past which an image is refused."""

    max_bytes: int
    """Of the encoded image."""
    max_pixels: int
    """Width times height, as the header says and after resizing."""
    max_side: int = 16_384
    """Width and height, as the header says: the weights of a resize alone grow with the longer side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """An image as a model sees it."""

    pixel_values: NDArray[np.float32]
    """(3, height, width) of the model"""
    width: int
    """Of the image as it was sent, in pixels, after its orientation was applied."""
    height: int
    """Likewise."""


class SmallImage:
    """An image of few pixels, to be prepared by the thread that runs it."""

    def __init__(self, preprocessor: ImagePreprocessor, data: bytes, field: str) -> None:
        self._preprocessor = preprocessor
        self._data = data
        self._field = field
        self.size = (0, 0)
        """Width and height as it was sent, where `pixel_values` has been called."""
        self.interval = (0.0, 0.0)
        """When that was, by `time.monotonic`."""

    def pixel_values(self) -> NDArray[np.float32]:
        """Prepares the image.

        Raises:
            InvalidInputError: It is larger than it announced, damaged, or none.
        """
        began = time.monotonic()
        prepared = self._preprocessor.prepare_small(self._data, self._field)
        self.size = prepared.width, prepared.height
        self.interval = began, time.monotonic()
        return prepared.pixel_values

    def __repr__(self) -> str:
        return f"SmallImage({self._field}, {len(self._data)} bytes)"


class ImagePreprocessor:
    """Decodes and prepares images for one model. Safe to use from several threads."""

    def __init__(self, settings: ImagePreprocessing, limits: ImageLimits) -> None:
        """Checks that `settings` can be followed.

        Raises:
            BundleError: A resize of the shorter side without a size that covers the crop.
        """
        if settings.resize == "shorter_side":
            crop = max(settings.height, settings.width)
            if settings.resize_size is None or settings.resize_size < crop:
                raise BundleError(
                    f"image_preprocessing.resize_size is {settings.resize_size}; shorter_side needs at least the "
                    f"crop's {crop}: export the model again"
                )
        self._settings = settings
        self._limits = limits

    @property
    def num_pixels(self) -> int:
        """Of an image as the model sees it."""
        return self._settings.height * self._settings.width

    def small_images(self, images: Sequence[bytes], *, fields: Sequence[str]) -> list[SmallImage] | None:
        """Returns images that are all small, as they say themselves, to be prepared later; None if one is not.

        Takes some microseconds, and checks nothing else.
        """
        for data in images:
            size = announced_size(data) if len(data) <= _SMALL_BYTES else None
            if size is None or not _is_small(*size):
                return None
        return [SmallImage(self, data, field) for data, field in zip(images, fields, strict=True)]

    async def prepare_batch(self, images: Sequence[bytes], *, fields: Sequence[str]) -> list[PreparedImage]:
        """Prepares images off the event loop; what has not begun when the caller goes is not done.

        Args:
            images: Encoded images.
            fields: What the request calls each of them, such as `images[3]`, for messages.

        Raises:
            InvalidInputError: An image is empty, too large, damaged, or none.
        """
        loop, pool = asyncio.get_running_loop(), image_pool()
        # The headers of all images come first: one bomb among 64 images costs no decoding.
        if len(images) > 1:
            await loop.run_in_executor(pool, self._check_headers, images, fields)
        prepared: dict[int, PreparedImage] = {}
        waiting = enumerate(zip(images, fields, strict=True))

        async def prepare_in_turn() -> None:
            for index, (data, field) in waiting:
                prepared[index] = await loop.run_in_executor(pool, self.prepare, data, field)

        tasks = [asyncio.create_task(prepare_in_turn()) for _ in range(min(len(images), _MOST_IN_POOL))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after an error or a cancellation: what still waits in the pool
                task.cancel()
        return [prepared[index] for index in range(len(images))]

    def prepare(self, data: bytes, field: str = "images[0]") -> PreparedImage:
        """Prepares one image on the caller's thread.

        Raises:
            InvalidInputError: It is empty, too large, damaged, or none.
        """
        header = _open_header(data, field, self._limits)
        with _DECODING.hold(header.width * header.height, self._limits.max_pixels):
            return self._prepare_opened(header, field)

    def prepare_small(self, data: bytes, field: str) -> PreparedImage:
        """Prepares one of `small_images` on the caller's thread, at once, beside whatever else is being decoded.

        Raises:
            InvalidInputError: It is larger than it announced, damaged, or none.
        """
        header = _open_header(data, field, self._limits)
        if not _is_small(*header.size):
            raise InvalidInputError(
                field,
                f"announces two sizes, one of them {header.width} x {header.height} pixels; save it anew as a JPEG or "
                "PNG and send that",
            )
        return self._prepare_opened(header, field)

    def _prepare_opened(self, header: ImageFile.ImageFile, field: str) -> PreparedImage:
        image = _decode(header, field)
        width, height = image.size
        pixels = self._resize(image, field)
        return PreparedImage(pixel_values=normalize(pixels, self._settings), width=width, height=height)

    def _check_headers(self, images: Sequence[bytes], fields: Sequence[str]) -> None:
        """Checks what images announce; the headers are not kept, since some come with buffers for the pixels."""
        for data, field in zip(images, fields, strict=True):
            _open_header(data, field, self._limits)

    def _resize(self, image: Image.Image, field: str) -> Image.Image:
        """Resizes and crops an RGB image to the model's size."""
        settings = self._settings
        resampling = _RESAMPLING[settings.interpolation]
        if settings.resize == "stretch":
            return image.resize((settings.width, settings.height), resampling)
        assert settings.resize_size is not None
        shorter = min(image.size)
        width, height = (round(side * settings.resize_size / shorter) for side in image.size)
        if width * height > self._limits.max_pixels:  # a strip of 1 x 1,000,000 grows by the square of the scale
            raise InvalidInputError(
                field,
                f"is {image.width} x {image.height} pixels and would become {width} x {height} for this model, the "
                f"limit is {self._limits.max_pixels} pixels; crop it",
            )
        left, top = (width - settings.width) // 2, (height - settings.height) // 2
        return image.resize((width, height), resampling).crop((left, top, left + settings.width, top + settings.height))

    def __repr__(self) -> str:
        return f"ImagePreprocessor({self._settings.resize} to {self._settings.width} x {self._settings.height})"


def _is_small(width: int, height: int) -> bool:
    return width * height <= _SMALL_PIXELS and max(width, height) <= _SMALL_RATIO * min(width, height)


def decode_image(data: bytes, *, field: str, limits: ImageLimits) -> Image.Image:
    """Decodes the first frame of an image, turned upright, as RGB.

    Raises:
        InvalidInputError: It is empty, too large, damaged, or none.
    """
    return _decode(_open_header(data, field, limits), field)


def _decode(image: Image.Image, field: str) -> Image.Image:
    """Decodes an image of which the header was read and checked."""
    image_format = "JPEG" if image.format == "MPO" else image.format  # a JPEG with further pictures behind it
    try:
        image.load()
        image = _upright(image)  # of each picture there is one at a time, as far as this function holds it
        return to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # on damaged files Pillow's decoders raise nearly everything
        raise InvalidInputError(
            field, f"is a damaged or truncated {image_format} image ({error}); send the whole file"
        ) from error


def _open_header(data: bytes, field: str, limits: ImageLimits) -> ImageFile.ImageFile:
    """Reads the header only; checks the bytes there are and the size it announces."""
    _check_bytes(data, field, limits.max_bytes)
    check_parts(data, field)
    try:
        image = Image.open(BytesIO(data), formats=READ)
        _scale_transparent_colour(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidInputError(
            field, f"announces more pixels than the limit of {limits.max_pixels}; send a smaller image"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # as in _decode: a damaged header is no more orderly
        raise InvalidInputError(field, refusal(data)) from error
    _check_size(image, field, limits)
    if image.format in ("JPEG", "MPO"):
        check_scans(data, field)
    return image


def _scale_transparent_colour(image: ImageFile.ImageFile) -> None:
    """Scales the colour that a PNG names as transparent to 8 bits, as Pillow scales the pixels but not this colour."""
    transparent = image.info.get("transparency")
    if image.format != "PNG" or transparent is None or not image.tile:
        return
    raw_mode = image.tile[0].args
    if raw_mode in _LEVEL_SCALES:
        image.info["transparency"] = transparent * _LEVEL_SCALES[raw_mode]
    elif raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in transparent)


def _check_bytes(data: bytes, field: str, max_bytes: int) -> None:
    if not data:
        raise InvalidInputError(field, f"is empty; send the bytes of a {READ_AS_TEXT} file")
    if len(data) > max_bytes:
        raise InvalidInputError(field, f"has {len(data)} bytes, the limit is {max_bytes}; send a smaller image")


def _check_size(image: Image.Image, field: str, limits: ImageLimits) -> None:
    num_pixels = image.width * image.height
    if num_pixels <= 0:
        raise InvalidInputError(
            field, f"announces {image.width} x {image.height} pixels; send an image of at least one pixel"
        )
    if num_pixels > limits.max_pixels:
        raise InvalidInputError(
            field,
            f"announces {image.width} x {image.height} = {num_pixels} pixels, the limit is {limits.max_pixels}; "
            "send a smaller image",
        )
    if max(image.size) > limits.max_side:
        raise InvalidInputError(
            field,
            f"announces {image.width} x {image.height} pixels, the limit of a side is {limits.max_side}; crop it or "
            "send a smaller image",
        )


def _upright(image: Image.Image) -> Image.Image:
    """Turns an image as its EXIF orientation says; EXIF data that cannot be read is as good as none."""
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # a broken annotation does not make the picture unreadable
        return image
    method = _UPRIGHT.get(orientation)
    return image if method is None else image.transpose(method)


def to_rgb(image: Image.Image) -> Image.Image:
    """Makes an image RGB: transparency over white, 16-bit grey by its upper byte (as Pillow reads 16-bit RGB)."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.height <= _BAND_HEIGHT:
        return _band_to_rgb(image)
    result = Image.new("RGB", image.size)
    for top in range(0, image.height, _BAND_HEIGHT):
        band = image.crop((0, top, image.width, min(top + _BAND_HEIGHT, image.height)))
        result.paste(_band_to_rgb(band), (0, top))
    return result


def _band_to_rgb(image: Image.Image) -> Image.Image:
    """Makes an image of a few rows RGB."""
    if image.mode.startswith("I"):
        return _deep_grey_to_rgb(image)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _deep_grey_to_rgb(image: Image.Image) -> Image.Image:
    """Makes an image of 16-bit grey RGB; a level that stands for transparency is white."""
    deep = np.asarray(image).astype(np.uint16)  # (height, width)
    grey = (deep >> 8).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        grey[deep == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def normalize(image: Image.Image, settings: ImagePreprocessing) -> NDArray[np.float32]:
    """Returns the channels of an RGB image, scaled to 0 to 1, less the mean, divided by the standard deviation.

    Returns:
        float32 (3, height, width).
    """
    pixels: NDArray[np.float32] = np.asarray(image, np.float32) / np.float32(255)  # (height, width, 3)
    pixels -= np.asarray(settings.mean, np.float32)
    pixels /= np.asarray(settings.std, np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))  # (3, height, width)
