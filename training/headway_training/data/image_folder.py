"""Images with labels: a folder with a folder for each class.

    train/cat/1.png  train/cat/2.jpg  train/dog/a.png

H height, W width, N images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from headway_training.checkpoint import ImagePreprocessing
from headway_training.data.examples import LabeledImages
from headway_training.errors import DataError, MissingDataError
from headway_training.images import resize_and_crop

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def read_image_folder(
    path: Path, preprocessing: ImagePreprocessing, labels: Sequence[str] | None = None
) -> tuple[LabeledImages, tuple[str, ...]]:
    """Reads every image, resized and cropped.

    Args:
        path: The folder; names of its folders are the labels.
        preprocessing: To which size, and how.
        labels: Known labels in the order of their indices; None: those of the folder, by the alphabet.

    Returns:
        The images, (N, H, W, 3), and the labels.

    Raises:
        MissingDataError: There is no such folder.
        DataError: An image cannot be read, a class is empty or not known, or there are fewer than two.
    """
    if not path.is_dir():
        raise MissingDataError(f"{path} is not a folder; expected a folder with a folder of images for each class")
    found = tuple(sorted(folder.name for folder in path.iterdir() if folder.is_dir()))
    names = found if labels is None else tuple(labels)
    if len(names) < 2:
        raise DataError(f"{path} has {len(names)} folders; a classifier needs a folder for each of at least 2 classes")
    for name in found:
        if name not in names:
            raise DataError(f"{path / name}: the label {name!r} is not among the training data's: {', '.join(names)}")
    images, indices = [], []
    for name in found:
        files = sorted(file for file in (path / name).iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise DataError(f"{path / name} holds no images; expected files ending in {', '.join(sorted(SUFFIXES))}")
        images += [_read_image(file, preprocessing) for file in files]
        indices += [names.index(name)] * len(files)
    return LabeledImages(images=np.stack(images), labels=np.asarray(indices, dtype=np.int64)), names


def _read_image(path: Path, preprocessing: ImagePreprocessing) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """(H, W, 3) pixels of one file."""
    try:
        with Image.open(path) as image:
            return resize_and_crop(image, preprocessing)
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error
