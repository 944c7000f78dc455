"""Encoded images to `pixel_values`, as the bundle's manifest says.

Sizes are checked on the header, before anything is decoded: a few kilobytes can announce gigabytes of pixels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from headway_server.bundles import ImagePreprocessing
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing.pool import image_pool

# Imported here because Image.open would import every plugin there is at the first WebP image.
_PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, BmpImagePlugin, GifImagePlugin)
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
_READABLE = "JPEG, PNG, WebP, BMP or GIF"
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
_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Sizes past which an image is refused."""

    max_bytes: int
    """Of the encoded image."""
    max_pixels: int
    """Width times height, as the header says and after resizing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """An image as a model sees it."""

    pixel_values: NDArray[np.float32]
    """(3, height, width) of the model"""
    width: int
    """Of the image as it was sent, in pixels, after its orientation was applied."""
    height: int
    """Likewise."""


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

    async def prepare_batch(self, images: Sequence[bytes], *, fields: Sequence[str]) -> list[PreparedImage]:
        """Prepares images off the event loop; what has not begun when the caller goes is not done.

        Args:
            images: Encoded images.
            fields: What the request calls each of them, such as `images[3]`, for messages.

        Raises:
            InvalidInputError: An image is empty, too large, damaged, or none.
        """
        loop = asyncio.get_running_loop()
        # The cheap checks of all images come first: one bomb among 64 images costs no decoding.
        for data, field in zip(images, fields, strict=True):
            check_bytes(data, field=field, max_bytes=self._limits.max_bytes)
        pool = image_pool()
        tasks = [
            loop.run_in_executor(pool, self.prepare, data, field) for data, field in zip(images, fields, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # after an error or a cancellation: what still waits in the pool
                task.cancel()

    def prepare(self, data: bytes, field: str = "images[0]") -> PreparedImage:
        """Prepares one image on the caller's thread.

        Raises:
            InvalidInputError: It is empty, too large, damaged, or none.
        """
        image = decode_image(data, field=field, limits=self._limits)
        width, height = image.size
        pixels = self._resize(image, field)
        return PreparedImage(pixel_values=normalize(pixels, self._settings), width=width, height=height)

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


def check_bytes(data: bytes, *, field: str, max_bytes: int) -> None:
    """Checks the size of an encoded image.

    Raises:
        InvalidInputError: It is empty or past the limit.
    """
    if not data:
        raise InvalidInputError(field, f"is empty; send the bytes of a {_READABLE} file")
    if len(data) > max_bytes:
        raise InvalidInputError(field, f"has {len(data)} bytes, the limit is {max_bytes}; send a smaller image")


def decode_image(data: bytes, *, field: str, limits: ImageLimits) -> Image.Image:
    """Decodes the first frame of an image, turned upright, as RGB.

    Raises:
        InvalidInputError: It is empty, too large, damaged, or none.
    """
    check_bytes(data, field=field, max_bytes=limits.max_bytes)
    image = _open_header(data, field, limits.max_pixels)
    try:
        image.load()
        return to_rgb(_upright(image))
    except MemoryError:
        raise
    except Exception as error:  # on damaged files Pillow's decoders raise nearly everything
        raise InvalidInputError(
            field, f"is a damaged or truncated {image.format} image ({error}); send the whole file"
        ) from error


def _open_header(data: bytes, field: str, max_pixels: int) -> Image.Image:
    """Reads the header only and checks the size it announces."""
    try:
        image = Image.open(BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidInputError(
            field, f"announces more pixels than the limit of {max_pixels}; send a smaller image"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # as in decode_image: a damaged header is no more orderly
        raise InvalidInputError(field, f"is not an image this server can read; send a {_READABLE} file") from error
    if image.width * image.height > max_pixels:
        raise InvalidInputError(
            field,
            f"announces {image.width} x {image.height} = {image.width * image.height} pixels, the limit is "
            f"{max_pixels}; send a smaller image",
        )
    return image


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
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.uint16) >> 8  # (height, width)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def normalize(image: Image.Image, settings: ImagePreprocessing) -> NDArray[np.float32]:
    """Returns the channels of an RGB image, scaled to 0 to 1, less the mean, divided by the standard deviation.

    Returns:
        float32 (3, height, width).
    """
    pixels: NDArray[np.float32] = np.asarray(image, np.float32) / np.float32(255)  # (height, width, 3)
    pixels -= np.asarray(settings.mean, np.float32)
    pixels /= np.asarray(settings.std, np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))  # (3, height, width)
