"""Images to pixels, as `ImagePreprocessing` describes it, and what training changes at random.

B batch, H height, W width, N images.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from headway_training.checkpoint import ImagePreprocessing

_LEVEL_SCALES = {"L;2": 85, "L;4": 17}
"""What a level of a grey PNG of so many bits is multiplied by, by Pillow's name for its rows."""
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def preprocess(image: Image.Image, preprocessing: ImagePreprocessing) -> NDArray[np.float32]:
    """Turns an image into `pixel_values`: float32 (3, H, W)."""
    pixel_values: NDArray[np.float32] = normalize(resize_and_crop(image, preprocessing)[None], preprocessing)[0]
    return pixel_values


def resize_and_crop(image: Image.Image, preprocessing: ImagePreprocessing) -> NDArray[np.uint8]:
    """Turns an image upright (EXIF), makes it RGB, resizes it and crops its centre: uint8 (H, W, 3).

    A server does the same (`headway_server.preprocessing`), and a test holds the two together.
    """
    _scale_transparent_colour(image)
    upright = _to_rgb(ImageOps.exif_transpose(image))
    height, width = preprocessing.height, preprocessing.width
    size = (width, height) if preprocessing.resize == "stretch" else _shorter_side(upright, preprocessing)
    resized = upright.resize(size, _FILTERS[preprocessing.interpolation]) if upright.size != size else upright
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return np.asarray(resized.crop((left, top, left + width, top + height)), dtype=np.uint8)


def _scale_transparent_colour(image: Image.Image) -> None:
    """Scales the colour that a PNG names as transparent to 8 bits, as Pillow scales the pixels but not this colour."""
    transparent = image.info.get("transparency")
    if image.format != "PNG" or transparent is None or not (tile := getattr(image, "tile", None)):
        return  # not a file, or one whose pixels were read already
    raw_mode = tile[0].args
    if raw_mode in _LEVEL_SCALES:
        image.info["transparency"] = transparent * _LEVEL_SCALES[raw_mode]
    elif raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in transparent)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Makes an image RGB: transparency over white, 16-bit grey by its upper byte."""
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.uint16)  # (H, W)
        grey = (deep >> 8).astype(np.uint8)
        if (transparent := image.info.get("transparency")) is not None:
            grey[deep == transparent] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _shorter_side(image: Image.Image, preprocessing: ImagePreprocessing) -> tuple[int, int]:
    """Width and height, in proportion, whose shorter one is `resize_size`."""
    assert preprocessing.resize_size is not None
    width, height = (round(side * preprocessing.resize_size / min(image.size)) for side in image.size)
    return width, height


def normalize(images: NDArray[np.uint8], preprocessing: ImagePreprocessing) -> NDArray[np.float32]:
    """Scales pixels (N, H, W, 3) to 0 to 1, subtracts the mean and divides by the deviation: float32 (N, 3, H, W)."""
    mean = np.asarray(preprocessing.mean, dtype=np.float32)
    std = np.asarray(preprocessing.std, dtype=np.float32)
    values = (images.astype(np.float32) / np.float32(255) - mean) / std  # (N, H, W, 3)
    pixel_values: NDArray[np.float32] = np.ascontiguousarray(values.transpose(0, 3, 1, 2))
    return pixel_values


def augment(pixel_values: Tensor, *, flip: bool, crop_padding: int, generator: torch.Generator) -> Tensor:
    """Mirrors and shifts images at random, each for itself.

    Args:
        pixel_values: float (B, 3, H, W), normalised.
        flip: Whether every second image, on average, is mirrored.
        crop_padding: Pixels an image is shifted by at most; what comes in is zero, the mean colour.
        generator: Where the random numbers come from.

    Returns:
        float (B, 3, H, W).
    """
    count, _, height, width = pixel_values.shape
    if flip:
        mirrored = torch.rand(count, generator=generator) < 0.5
        pixel_values = torch.where(mirrored[:, None, None, None], pixel_values.flip(-1), pixel_values)
    if crop_padding:
        padded = torch.nn.functional.pad(pixel_values, (crop_padding,) * 4)
        offsets = torch.randint(0, 2 * crop_padding + 1, (2, count), generator=generator)
        rows = offsets[0, :, None] + torch.arange(height)  # (B, H)
        columns = offsets[1, :, None] + torch.arange(width)  # (B, W)
        images = torch.arange(count)[:, None, None]
        pixel_values = padded[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)  # (B, 3, H, W)
    return pixel_values.contiguous()
