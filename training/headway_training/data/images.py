"""Images: from files to pixels, as `ImagePreprocessing` describes it, and what training changes at random.

Labelled images are a folder with a folder for each label:

    train/cat/1.png  train/cat/2.jpg  train/dog/a.png

B batch, H height, W width, N images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from headway_training.checkpoint import ImagePreprocessing
from headway_training.data.examples import LabeledImages
from headway_training.errors import DataError, MissingDataError

Made = TypeVar("Made")
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
_LEVEL_SCALES = {"L;2": 85, "L;4": 17}
"""Factors that bring the levels of grey PNGs of 2 and 4 bits to 8 bits, by Pillow's names for their rows."""
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def find_images(path: Path) -> list[tuple[Path, str]]:
    """The image files of a folder with a folder for each label, each with its label, by the alphabet.

    Raises:
        MissingDataError: There is no such folder.
        DataError: A label has no images, or there are fewer than two labels.
    """
    if not path.is_dir():
        raise MissingDataError(f"{path} is not a folder; expected a folder with a folder of images for each label")
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    if len(folders) < 2:
        raise DataError(f"{path} has {len(folders)} folders; a classifier needs a folder for each of at least 2 labels")
    found = []
    for folder in folders:
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise DataError(f"{folder} holds no images; expected files ending in {', '.join(sorted(SUFFIXES))}")
        found += [(file, folder.name) for file in files]
    return found


def read_image_folder(
    path: Path, preprocessing: ImagePreprocessing, labels: Sequence[str] | None = None
) -> tuple[LabeledImages, tuple[str, ...]]:
    """Reads every image of a folder, resized and cropped.

    Args:
        path: The folder; the names of its folders are the labels.
        preprocessing: To which size, and how.
        labels: Known labels in the order of their indices; None: those of the folder, by the alphabet.

    Returns:
        The images, (N, H, W, 3), and the labels.

    Raises:
        MissingDataError: There is no such folder.
        DataError: As `find_images`; or an image cannot be read, or a label is not known.
    """
    found = find_images(path)
    names = tuple(sorted({label for _, label in found}) if labels is None else labels)
    for _, label in found:
        if label not in names:
            raise DataError(f"{path / label}: the label {label!r} is not among those of the model: {', '.join(names)}")
    images = read_images([file for file, _ in found], preprocessing)
    return LabeledImages(images=images, labels=np.array([names.index(label) for _, label in found])), names


def find_unlabeled_images(path: Path) -> list[Path]:
    """The image files of a folder and of all folders in it, by the alphabet.

    Raises:
        MissingDataError: There is no such folder.
        DataError: It holds no images.
    """
    if not path.is_dir():
        raise MissingDataError(f"{path} is not a folder; expected a folder of images")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"{path} holds no images; expected files ending in {', '.join(sorted(SUFFIXES))}")
    return files


def read_images(files: Sequence[Path], preprocessing: ImagePreprocessing) -> NDArray[np.uint8]:
    """Reads images, resized and cropped, one after the other: (N, H, W, 3), and no more memory than that.

    Raises:
        DataError: One cannot be read.
    """
    images = np.empty((len(files), preprocessing.height, preprocessing.width, 3), np.uint8)
    for place, file in zip(images, files, strict=True):
        place[:] = read_image(file, lambda image: resize_and_crop(image, preprocessing))
    return images


def for_crops(preprocessing: ImagePreprocessing) -> ImagePreprocessing:
    """How images are stored that training cuts parts out of: twice as large, so that a quarter of one is sharp.

    All that `resize_and_crop` would leave is left, so that it makes the same of them as of the files.
    """
    side = 2 * (preprocessing.resize_size or preprocessing.height)
    resize_size = None if preprocessing.resize_size is None else side
    return preprocessing.model_copy(update={"height": side, "width": side, "resize_size": resize_size})


def read_image(path: Path, use: Callable[[Image.Image], Made]) -> Made:
    """Opens a file and makes something of its image.

    Raises:
        DataError: It cannot be read.
    """
    try:
        with Image.open(path) as image:
            return use(image)
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error


def resize_and_crop(image: Image.Image, preprocessing: ImagePreprocessing) -> NDArray[np.uint8]:
    """Turns an image upright (EXIF), makes it RGB, resizes it and crops its centre: uint8 (H, W, 3).

    A server does the same (`headway_server.preprocessing`), and a test holds the two together.
    """
    _scale_transparent_colour(image)
    upright = to_rgb(ImageOps.exif_transpose(image))
    height, width = preprocessing.height, preprocessing.width
    size = (width, height) if preprocessing.resize == "stretch" else _shorter_side(upright, preprocessing)
    resized = upright.resize(size, _FILTERS[preprocessing.interpolation]) if upright.size != size else upright
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return np.asarray(resized.crop((left, top, left + width, top + height)), dtype=np.uint8)


def _scale_transparent_colour(image: Image.Image) -> None:
    """Scales the colour that a PNG names as transparent to 8 bits: Pillow scales the pixels, and not this colour."""
    transparent = image.info.get("transparency")
    if image.format != "PNG" or transparent is None or not (tile := getattr(image, "tile", None)):
        return  # not a file, or its pixels are already read
    raw_mode = tile[0].args
    if raw_mode in _LEVEL_SCALES:
        image.info["transparency"] = transparent * _LEVEL_SCALES[raw_mode]
    elif raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in transparent)


def to_rgb(image: Image.Image) -> Image.Image:
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
        crop_padding: Pixels an image is shifted by at most; zero, the mean colour, comes in at the edge.
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
