"""Decoding of images to `pixel_values` by the bundle's manifest, and transforms of points between image and model.

A file of a few bytes can declare gigabytes of pixels, or keep a decoder busy for hours. So sizes in the header are
checked before decoding, and Pillow's reads of a file and the scans of a JPEG are counted. All threads together decode
at most the pixels of one largest image at a time (a WebP takes about 16 bytes a pixel, others less).
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from operator import le
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from headway_server.bundles import ImagePreprocessing, demanded
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing.pool import image_pool
from headway_server.preprocessing.smoothing import smooth_square

# Imported here because Image.open would import every plugin at the first WebP image.
_PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, BmpImagePlugin, GifImagePlugin)
_FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
_FORMATS_AS_TEXT: Final = "JPEG, PNG, WebP, BMP or GIF"

MAX_READS: Final = 100_000
"""Limit of Pillow's reads of a file. It reads each part of a JPEG or PNG with several reads, in Python. Empty parts
take 4 bytes and some microseconds each, so a file of 14 MiB kept a thread busy for five seconds. Encoders write some
dozens of parts; a PNG of 16 MiB in chunks of 8 KiB takes 6,000 reads."""
MAX_SCANS: Final = 100
"""Limit of the scans of a JPEG, each a pass of the decoder over all pixels. An empty scan takes 40 bytes, and 20 ms for
20 megapixels (Cameron, "Two Issues with the JPEG Standard", libjpeg-turbo, 2015). A progressive JPEG has about ten
scans, one optimized for size some dozens."""
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
"""A JPEG marker after coded data. 00: the byte before is data; D0 to D7: a restart of a scan; FF: padding."""
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_MARKERS_WITHOUT_LENGTH = (0x01, 0xD8)

_ORIENTATION: Final = 0x0112
"""EXIF tag of an image's orientation."""
_TURNED: Final = range(5, 9)
"""Its values with width and height exchanged."""
_MOST_ELONGATED: Final = 200
"""Limit of an image's longer side, in shorter ones, where it is resized to a number of pixels."""
_BOUNDED: Final = ("nearest_side", "multiple", "patches")
"""Ways of resizing that leave images of any size, up to a number of pixels."""
_BAND_HEIGHT = 256
"""Rows converted at a time. A whole image would be copied in two more modes, and block other threads, since some of
Pillow's conversions hold the GIL."""
_LEVEL_SCALES = {"L;2": 85, "L;4": 17}
"""Factor to 8 bits of the levels of a grey PNG, by Pillow's name of its raw mode."""
_MAX_PIXEL_VALUE: Final = 1000.0
"""Far beyond any normalized colour, and far below an overflow in a network."""
_SMALL_FILE_BYTES: Final = 4096
_SMALL_SIDES: Final = range(16, 129)
"""Limits of images prepared on the event loop, for models of as few pixels: a thread costs more than decoding
(docs/decisions/small-images.md). A hostile one takes some milliseconds at most. A thinner image may become millions of
pixels when its shorter side is resized."""
_MAX_IN_POOL = 2
"""Limit of a call's images in the pool, so that a single image does not wait for a call of 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Sizes past which an image is refused."""

    max_bytes: int
    """Bytes of the encoded image."""
    max_pixels: int
    """Width times height, in the header and after resizing."""
    max_side: int = 16_384
    """Width and height in the header: the weights of a resize grow with the longer side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTransform:
    """The transform from an image's pixels to the model's.

    Points are (x, y) in pixels from the upper left corner of the upright image, or of the model's input: pixel 0 is
    from 0 to 1. The transform is a scale and an offset; a crop makes the offset negative, padding makes it positive.
    """

    scale: tuple[float, float]
    """Model pixels per image pixel, in x and y."""
    offset: tuple[float, float]
    """Position of the image's upper left corner, in model pixels."""

    def to_model(self, points: ArrayLike) -> NDArray[np.float64]:
        """Maps points (..., 2) of the image to points of the model's input."""
        return np.asarray(points, np.float64) * self.scale + self.offset

    def to_image(self, points: ArrayLike) -> NDArray[np.float64]:
        """Maps points (..., 2) of the model's input to points of the image."""
        return (np.asarray(points, np.float64) - self.offset) / self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """An image as a model's input."""

    pixel_values: NDArray[np.float32]
    """(3, height, width) of the model"""
    width: int
    """Width of the original image in pixels, after its EXIF orientation."""
    height: int
    """Likewise."""
    transform: ImageTransform
    """Transform from the image's pixels to the model's."""


class ImagePreprocessor:
    """Decodes and prepares images for one model. Safe to use from several threads."""

    def __init__(self, settings: ImagePreprocessing, limits: ImageLimits) -> None:
        """Checks the settings.

        Raises:
            BundleError: A resize of the shorter side without a size that covers the crop, or more pixels than an image
                may have.
        """
        no_crop = settings.keeps_proportions or settings.fills_square or settings.resize == "inside"
        crop = 0 if no_crop else max(settings.height, settings.width)
        if (settings.resize_size or (crop if settings.resize == "stretch" else 0)) < crop:
            raise BundleError(
                f"image_preprocessing.resize_size is {settings.resize_size}; {settings.resize} needs at least the "
                f"crop's {crop}: export the model again"
            )
        largest = max(settings.resize_size or 0, settings.height, settings.width)
        height, width = settings.largest
        if largest > limits.max_side or height * width > limits.max_pixels:
            raise BundleError(
                f"image_preprocessing has {width} x {height} pixels and a side of {largest}; the "
                f"limits are {limits.max_pixels} and {limits.max_side}: raise --max-image-megapixels, or export the "
                "model again"
            )
        self._settings = settings
        self._limits = limits
        self._is_small = max(settings.height, settings.width, settings.resize_size or 0) < _SMALL_SIDES.stop

    @property
    def num_pixels(self) -> int:
        """Pixels of the model's largest input."""
        height, width = self._settings.largest
        return height * width

    @property
    def num_image_bytes(self) -> int:
        """Bytes of the model's largest input, float32 (3, height, width)."""
        return 3 * 4 * self.num_pixels

    async def prepare_batch(self, images: Sequence[bytes], *, fields: Sequence[str]) -> list[PreparedImage]:
        """Prepares images, large ones off the event loop; a cancellation drops images not yet started.

        Args:
            images: Encoded images.
            fields: Name of each in the request, such as `images[3]`, for error messages.

        Raises:
            InvalidInputError: An image is empty, too large, damaged, or none.
        """
        if len(images) == 1 and self._is_small and len(images[0]) <= _SMALL_FILE_BYTES:
            header = _open_header(images[0], fields[0], self._limits)
            if header.width in _SMALL_SIDES and header.height in _SMALL_SIDES:
                return [self._prepare(header, fields[0])]
        loop, pool = asyncio.get_running_loop(), image_pool()
        if len(images) == 1:
            return [await loop.run_in_executor(pool, self.prepare, images[0], fields[0])]
        # All headers are checked first: one bomb among 64 images costs no decoding.
        await check_headers(images, fields, self._limits)
        prepared: dict[int, PreparedImage] = {}
        waiting = enumerate(zip(images, fields, strict=True))

        async def prepare_in_turn() -> None:
            for index, (data, field) in waiting:
                prepared[index] = await loop.run_in_executor(pool, self.prepare, data, field)

        tasks = [asyncio.create_task(prepare_in_turn()) for _ in range(_MAX_IN_POOL)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after an error or a cancellation: images still waiting in the pool
                task.cancel()
        return [prepared[index] for index in range(len(images))]

    async def take_pixels(self, pixel_values: NDArray[np.float32]) -> list[PreparedImage]:
        """Checks images prepared by the caller, (N, 3, height, width), off the event loop.

        Raises:
            InvalidInputError: They have another shape, or values outside of any image's range.
        """
        _, channels, height, width = pixel_values.shape
        if channels != 3 or not self._reads_size(height, width):
            raise InvalidInputError(
                "pixel_values",
                f"has images of shape {list(pixel_values.shape[1:])}; this model reads {self._sizes_as_text()}",
            )
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(image_pool(), _has_values_of_pixels, pixel_values):
            raise InvalidInputError(
                "pixel_values",
                f"has values that are not numbers from {-_MAX_PIXEL_VALUE:g} to {_MAX_PIXEL_VALUE:g}; send colours "
                "scaled to 0 to 1, less the model's mean, divided by its standard deviation",
            )
        transform = ImageTransform(scale=(1.0, 1.0), offset=(0.0, 0.0))
        return [
            PreparedImage(pixel_values=values, width=width, height=height, transform=transform)
            for values in pixel_values
        ]

    def _reads_size(self, height: int, width: int) -> bool:
        """Returns True if the model reads images of a size."""
        settings = self._settings
        if not settings.keeps_proportions:
            return (height, width) == (settings.height, settings.width)
        is_rounded = not height % settings.multiple and not width % settings.multiple
        if settings.resize in _BOUNDED:
            return is_rounded and 0 < height * width <= demanded(settings.max_pixels)
        sides = sorted((height, width))
        return sides[0] > 0 and all(map(le, sides, settings.largest)) and is_rounded

    def _sizes_as_text(self) -> str:
        if self._settings.resize in _BOUNDED:
            return (
                f"[3, height, width], both sides multiples of {self._settings.multiple}, with at most "
                f"{self._settings.max_pixels} pixels"
            )
        if self._settings.resize != "fit":
            return str([3, self._settings.height, self._settings.width])
        shorter, longer = self._settings.largest
        return (
            f"[3, height, width], the shorter side up to {shorter}, the longer one up to {longer}, both multiples of "
            f"{self._settings.multiple}"
        )

    def prepare(self, data: bytes, field: str = "images[0]") -> PreparedImage:
        """Prepares one image on the caller's thread.

        Raises:
            InvalidInputError: It is empty, too large, damaged, or none.
        """
        header = _open_header(data, field, self._limits)
        with _DECODING.reserve(header.width * header.height, self._limits.max_pixels):
            return self._prepare(header, field)

    def upright_size(self, data: bytes, field: str) -> tuple[int, int]:
        """Returns width and height of an image by its header, on the caller's thread; errors: `prepare`."""
        header = _open_header(data, field, self._limits)
        try:
            is_turned = header.getexif().get(_ORIENTATION) in _TURNED
        except Exception:  # as in `_turn_upright`
            is_turned = False
        return (header.height, header.width) if is_turned else header.size

    def decode(self, data: bytes, field: str) -> Image.Image:
        """Decodes one image on the caller's thread: upright, RGB, in its original size.

        Errors are those of `prepare`.
        """
        header = _open_header(data, field, self._limits)
        with _DECODING.reserve(header.width * header.height, self._limits.max_pixels):
            return _decode(header, field)

    def decode_mask(self, data: bytes, field: str) -> Image.Image:
        """Decodes a mask on the caller's thread: upright, grey, in its original size.

        One with transparent pixels is white where they are, whatever its colours; another one is as bright as it is.
        Errors are those of `prepare`.
        """
        header = _open_header(data, field, self._limits)
        with _DECODING.reserve(header.width * header.height, self._limits.max_pixels):
            return _decode(header, field, _to_mask)

    def _prepare(self, header: ImageFile.ImageFile, field: str) -> PreparedImage:
        """Decodes and prepares an image with a checked header."""
        return self.prepare_decoded(_decode(header, field), field)

    def prepare_decoded(self, image: Image.Image, field: str) -> PreparedImage:
        """Prepares a decoded image.

        Raises:
            InvalidInputError: It would become too large.
        """
        if self._settings.resize == "smoothed":
            scale = self._settings.height / max(image.size)
            return PreparedImage(
                pixel_values=np.ascontiguousarray(
                    _channels(smooth_square(np.asarray(image), self._settings.height), self._settings)
                ),
                width=image.width,
                height=image.height,
                transform=ImageTransform(scale=(scale, scale), offset=(0, 0)),
            )
        resized, transform = self.resize(image, field)
        return PreparedImage(
            pixel_values=normalize(resized, self._settings),
            width=image.width,
            height=image.height,
            transform=transform,
        )

    def resize(self, image: Image.Image, field: str) -> tuple[Image.Image, ImageTransform]:
        """Resizes and crops an RGB image to the model's size, or to one of its sizes; without the padding.

        Not of `smoothed`, whose colours are no whole numbers.

        Raises:
            InvalidInputError: It would become too large.
        """
        settings = self._settings
        if settings.resize == "inside":
            return self._centred(image, field)
        size = (settings.width, settings.height) if settings.resize_size is None else (settings.resize_size,) * 2
        if settings.resize == "shorter_side":
            assert settings.resize_size is not None
            shorter = min(image.size)
            whole = round if settings.rounding == "nearest" else int
            size = (
                whole(image.width * settings.resize_size / shorter),
                whole(image.height * settings.resize_size / shorter),
            )
            self._check_grown(image, size, field)
        elif settings.resize == "fit":
            size = settings.fitted(*image.size)
        elif settings.resize == "longer_side":
            size = settings.within(*image.size)
        elif settings.has_cells:
            if max(image.size) > _MOST_ELONGATED * min(image.size):
                raise InvalidInputError(
                    field,
                    f"is {image.width} x {image.height} pixels; a side is at most {_MOST_ELONGATED} times the other; "
                    "crop it",
                )
            size = settings.in_cells(*image.size)
        elif settings.resize in _BOUNDED:
            size = self._bounded_size(image, field)
        resized = image.resize(size, Image.Resampling[settings.interpolation.upper()])
        scale = size[0] / image.width, size[1] / image.height
        if settings.keeps_proportions or settings.resize == "longer_side":
            return resized, ImageTransform(scale=scale, offset=(0, 0))
        centred = round if settings.crop_rounding == "even" else math.floor
        left, top = centred((size[0] - settings.width) / 2), centred((size[1] - settings.height) / 2)
        if size != (settings.width, settings.height):
            resized = resized.crop((left, top, left + settings.width, top + settings.height))
        return resized, ImageTransform(scale=scale, offset=(-left, -top))

    def _bounded_size(self, image: Image.Image, field: str) -> tuple[int, int]:
        """Returns width and height of an image whose model reads any up to a number of pixels; errors: `resize`."""
        settings, most = self._settings, demanded(self._settings.max_pixels)
        ways = {"nearest_side": settings.nearest, "multiple": settings.whole, "patches": settings.in_patches}
        size = ways[settings.resize](*image.size)
        if not 0 < size[0] * size[1] <= most:
            raise InvalidInputError(
                field,
                f"is {image.width} x {image.height} pixels and would become {size[0]} x {size[1]} for this model, "
                f"which reads 1 to {most} pixels and sides that are multiples of {settings.multiple}; crop it or send "
                "it in another size",
            )
        return size

    def _centred(self, image: Image.Image, field: str) -> tuple[Image.Image, ImageTransform]:
        """Resizes an image in two steps and centres it on black; errors are those of `resize`."""
        settings, (width, height) = self._settings, image.size
        first, size = settings.inside(width, height)
        self._check_grown(image, first, field)
        if min(size) < 1:
            raise InvalidInputError(field, f"is {width} x {height} pixels, of which nothing would be left; crop it")
        for step in dict.fromkeys((first, size)):
            image = image.resize(step, Image.Resampling[settings.interpolation.upper()])
        left, top = (settings.width - size[0]) // 2, (settings.height - size[1]) // 2
        padded = image.crop((-left, -top, settings.width - left, settings.height - top))
        return padded, ImageTransform(scale=(size[0] / width, size[1] / height), offset=(left, top))

    def _check_grown(self, image: Image.Image, size: tuple[int, int], field: str) -> None:
        """Refuses an image that would grow too large: a strip of 1 x 1,000,000 grows by the square of the scale."""
        if size[0] * size[1] > self._limits.max_pixels:
            raise InvalidInputError(
                field,
                f"is {image.width} x {image.height} pixels and would become {size[0]} x {size[1]} for this model, "
                f"the limit is {self._limits.max_pixels} pixels; crop it",
            )

    def __repr__(self) -> str:
        return f"ImagePreprocessor({self._settings.resize} to {self._settings.width} x {self._settings.height})"


async def check_headers(images: Sequence[bytes], fields: Sequence[str], limits: ImageLimits) -> None:
    """Checks the headers of images, off the event loop.

    Args:
        images: Encoded images.
        fields: Name of each in the request, for error messages.
        limits: Sizes past which an image is refused.

    Raises:
        InvalidInputError: An image is empty, too large, or none.
    """

    def check() -> None:
        for data, field in zip(images, fields, strict=True):
            _open_header(data, field, limits)  # not retained, since some have buffers for the pixels

    await asyncio.get_running_loop().run_in_executor(image_pool(), check)


def _has_values_of_pixels(pixel_values: NDArray[np.float32]) -> bool:
    return bool((np.abs(pixel_values) <= _MAX_PIXEL_VALUE).all())  # False for NaN


class _Gate:
    """Admits threads in order of arrival, within a limit of the pixels they decode together."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held by the thread that is next
        self._changed = threading.Condition()
        self._num_pixels = 0

    @contextmanager
    def reserve(self, num_pixels: int, limit: int) -> Iterator[None]:
        """Reserves `num_pixels`, after waiting for room. An image above the limit runs alone."""
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._num_pixels == 0 or self._num_pixels + num_pixels <= limit)
            self._num_pixels += num_pixels
        try:
            yield
        finally:
            with self._changed:
                self._num_pixels -= num_pixels
                self._changed.notify_all()


_DECODING = _Gate()
"""One for all models of the process."""


class _CountedFile(BytesIO):
    """A file with a limit of reads."""

    def __init__(self, data: bytes, field: str) -> None:
        super().__init__(data)
        self._field = field
        self._num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads from the file.

        Raises:
            InvalidInputError: It was read more than `MAX_READS` times.
        """
        self._num_reads += 1
        if self._num_reads > MAX_READS:
            raise InvalidInputError(
                self._field, f"takes more than {MAX_READS} reads; save it again as a JPEG or PNG and send that"
            )
        return super().read(size)


def _decode(
    image: ImageFile.ImageFile, field: str, convert: Callable[[Image.Image], Image.Image] | None = None
) -> Image.Image:
    """Decodes an image with a checked header, upright, to RGB if no other conversion is given."""
    image_format = "JPEG" if image.format == "MPO" else image.format  # a JPEG with further pictures behind it
    try:
        image.load()
        _turn_upright(image)
        return (convert or to_rgb)(image)
    except (MemoryError, InvalidInputError):
        raise
    except Exception as error:  # on damaged files Pillow's decoders raise nearly everything
        raise InvalidInputError(
            field, f"is a damaged or truncated {image_format} image ({error}); send the whole file"
        ) from error


def _open_header(data: bytes, field: str, limits: ImageLimits) -> ImageFile.ImageFile:
    """Reads only the header; checks the file's size, and the declared size and scans."""
    if not data:
        raise InvalidInputError(field, f"is empty; send the bytes of a {_FORMATS_AS_TEXT} file")
    if len(data) > limits.max_bytes:
        raise InvalidInputError(field, f"has {len(data)} bytes, the limit is {limits.max_bytes}; send a smaller image")
    try:
        image = Image.open(_CountedFile(data, field), formats=_FORMATS)
        _scale_transparent_colour(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidInputError(
            field, f"announces more pixels than the limit of {limits.max_pixels}; send a smaller image"
        ) from error
    except (MemoryError, InvalidInputError):
        raise
    except Exception as error:  # as in _decode: a damaged header raises nearly anything
        raise InvalidInputError(
            field,
            f"is not an image this server can read, or its header is damaged; send the bytes of a whole "
            f"{_FORMATS_AS_TEXT} file",
        ) from error
    _check_size(image, field, limits)
    if image.format in ("JPEG", "MPO"):
        check_scans(data, field)
    return image


def check_scans(data: bytes, field: str) -> None:
    """Checks the scans of a JPEG.

    Raises:
        InvalidInputError: There are more than `MAX_SCANS`.
    """
    if data.count(b"\xff\xda") <= MAX_SCANS:  # a fast bound for nearly all files
        return
    # The two bytes may occur in a colour profile or a preview too, so the exact count goes from marker to marker.
    position, num_scans = 2, 0
    while (found := _MARKER.search(data, position)) is not None and found[1][0] != _END_OF_IMAGE:
        position = found.end()
        if found[1][0] in _MARKERS_WITHOUT_LENGTH:
            continue
        num_scans += found[1][0] == _START_OF_SCAN
        if num_scans > MAX_SCANS:
            raise InvalidInputError(
                field,
                f"has more than {MAX_SCANS} scans, each a pass over all its pixels; save it again as a JPEG "
                "or PNG and send that",
            )
        position += max(int.from_bytes(data[position : position + 2]), 2)


def _scale_transparent_colour(image: ImageFile.ImageFile) -> None:
    """Scales a PNG's transparent colour to 8 bits: Pillow scales only the pixels."""
    transparent = image.info.get("transparency")
    if image.format != "PNG" or transparent is None or not image.tile:
        return
    raw_mode = image.tile[0].args
    if raw_mode in _LEVEL_SCALES:
        image.info["transparency"] = transparent * _LEVEL_SCALES[raw_mode]
    elif raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in transparent)


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


def _turn_upright(image: Image.Image) -> None:
    """Applies the EXIF orientation; unreadable EXIF data is ignored."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # broken metadata does not make an image unreadable
        return


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts to RGB: transparency over white, 16-bit grey by its upper byte (as Pillow reads 16-bit RGB)."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.height <= _BAND_HEIGHT:
        return _band_to_rgb(image)
    result = Image.new("RGB", image.size)
    for top in range(0, image.height, _BAND_HEIGHT):
        band = image.crop((0, top, image.width, min(top + _BAND_HEIGHT, image.height)))
        result.paste(_band_to_rgb(band), (0, top))
    return result


def _to_mask(image: Image.Image) -> Image.Image:
    """Converts to grey, or if some pixels are transparent to their transparency."""
    if image.has_transparency_data and not image.mode.startswith("I"):
        transparency = ImageOps.invert((image if "A" in image.getbands() else image.convert("RGBA")).getchannel("A"))
        if transparency.point(lambda level: 255 * (level >= 128)).getbbox():  # pixels more transparent than not
            return transparency
    return to_rgb(image).convert("L")


def _band_to_rgb(image: Image.Image) -> Image.Image:
    """Converts a band of rows to RGB."""
    if image.mode.startswith("I"):
        return _deep_grey_to_rgb(image)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _deep_grey_to_rgb(image: Image.Image) -> Image.Image:
    """Converts 16-bit grey to RGB; the transparent level becomes white."""
    deep = np.asarray(image).astype(np.uint16)  # (height, width)
    grey = (deep >> 8).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        grey[deep == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def normalize(image: Image.Image, settings: ImagePreprocessing) -> NDArray[np.float32]:
    """Returns the channels of an RGB image, scaled to 0 to 1, less the mean, divided by the standard deviation.

    Returns:
        float32 (3, height, width); of `longer_side`, zeros are added on the right and below.
    """
    channels = _channels(np.asarray(image, np.float32), settings)
    if settings.resize != "longer_side":
        return np.ascontiguousarray(channels)
    padded = np.zeros((3, settings.height, settings.width), np.float32)
    padded[:, : image.height, : image.width] = channels
    return padded


def _channels(colours: NDArray[np.float32], settings: ImagePreprocessing) -> NDArray[np.float32]:
    """Normalizes colours of 0 to 255, (height, width, 3) -> (3, height, width)."""
    pixels = colours / np.float32(255)
    pixels -= np.asarray(settings.mean, np.float32)
    pixels /= np.asarray(settings.std, np.float32)
    return pixels.transpose(2, 0, 1)
