"""Images: preprocessing by hand-made examples, and augmentation that keeps what must be kept."""

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from headway_training.checkpoint import ImagePreprocessing
from headway_training.data.images import augment, normalize, resize_and_crop

MEAN, STD = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)


def preprocessing(**fields: object) -> ImagePreprocessing:
    return ImagePreprocessing.model_validate({"height": 4, "width": 4, "mean": MEAN, "std": STD, **fields})


def gradient(height: int, width: int) -> Image.Image:
    """Red grows from left to right, green from top to bottom."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


def test_an_image_of_the_right_size_is_left_as_it_is():
    image = gradient(4, 4)
    np.testing.assert_array_equal(resize_and_crop(image, preprocessing()), np.asarray(image))


def test_normalisation_is_by_channel():
    pixels = np.full((1, 4, 4, 3), 255, np.uint8)
    values = normalize(pixels, preprocessing())
    assert values.shape == (1, 3, 4, 4)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values[0, :, 0, 0], [1.0, 3.0, 1.0])


def test_stretching_ignores_proportions_and_antialiases():
    image = gradient(64, 16)
    expected = np.asarray(image.resize((4, 4), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(resize_and_crop(image, preprocessing()), expected)


@pytest.mark.parametrize(("height", "width"), [(20, 40), (40, 20), (33, 47)])
def test_the_shorter_side_keeps_proportions_and_the_centre_is_cropped(height, width):
    settings = preprocessing(resize="shorter_side", resize_size=8, interpolation="bilinear")
    pixels = resize_and_crop(gradient(height, width), settings)
    assert pixels.shape == (4, 4, 3)
    centre = pixels.astype(float).mean(axis=(0, 1))
    np.testing.assert_allclose(centre[:2], [127, 127], atol=16)  # to half a pixel, both sides lose the same


def test_grey_and_transparent_images_become_rgb():
    for mode in ("L", "RGBA", "P"):
        assert resize_and_crop(gradient(8, 8).convert(mode), preprocessing()).shape == (4, 4, 3)


def test_a_crop_larger_than_the_image_is_refused():
    with pytest.raises(ValidationError, match="resize_size is 3; resize 'shorter_side' needs at least 4"):
        preprocessing(resize="shorter_side", resize_size=3)


def test_augmentation_mirrors_and_shifts_each_image_for_itself():
    images = torch.arange(16.0).reshape(1, 1, 4, 4).expand(64, 3, 4, 4).contiguous()
    changed = augment(images, flip=True, crop_padding=1, generator=torch.Generator().manual_seed(0))
    assert changed.shape == images.shape
    variants = {tuple(image[0].flatten().tolist()) for image in changed}
    assert 12 <= len(variants) <= 18  # 9 shifts, each mirrored or not
    padded = torch.nn.functional.pad(images[:1], (1, 1, 1, 1))[0, 0]
    allowed = {
        tuple(padded[top : top + 4, left : left + 4].flatten().tolist()) for top in range(3) for left in range(3)
    } | {
        tuple(torch.nn.functional.pad(images[:1].flip(-1), (1, 1, 1, 1))[0, 0][t : t + 4, c : c + 4].flatten().tolist())
        for t in range(3)
        for c in range(3)
    }
    assert variants <= allowed


def test_augmentation_that_is_off_changes_nothing():
    images = torch.rand(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(augment(images, flip=False, crop_padding=0, generator=torch.Generator()), images)
