"""Random operations of images: reproducible, within range, and what their names say."""

import numpy as np
import pytest
import torch

from headway_training import image_augmentation
from headway_training.image_augmentation import rand_augment, rand_augment_pixels

IMAGES = torch.rand(64, 3, 12, 10, generator=torch.Generator().manual_seed(0))


def augmented(operations: int, strength: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return rand_augment(IMAGES, operations=operations, strength=strength, generator=generator)


def test_images_stay_in_range_and_change_by_the_seed():
    changed = augmented(2, 0.9)
    assert changed.shape == IMAGES.shape
    assert float(changed.min()) >= 0
    assert float(changed.max()) <= 1
    assert torch.equal(changed, augmented(2, 0.9))
    assert not torch.equal(changed, augmented(2, 0.9, seed=1))
    assert torch.equal(augmented(0, 0.9), IMAGES)


@pytest.mark.parametrize("kind", range(image_augmentation._NUM_OPERATIONS - 1))
def test_an_operation_without_strength_changes_nothing(kind):
    kinds = torch.full((len(IMAGES),), kind)
    changed = image_augmentation._apply(IMAGES, kinds, torch.zeros(len(IMAGES)))
    assert torch.allclose(changed, IMAGES, atol=1e-5)


def test_a_shift_moves_pixels_and_leaves_grey_behind():
    amounts = torch.full((len(IMAGES),), 1.0)
    moved = image_augmentation._apply(IMAGES, torch.full((len(IMAGES),), 3), amounts)  # 0.3 of 10 pixels
    assert torch.allclose(moved[..., :7], IMAGES[..., 3:], atol=1e-4)
    assert torch.allclose(moved[..., 8:], torch.tensor(0.5), atol=1e-4)


def test_contrast_is_stretched_to_the_whole_range():
    dull = 0.4 + 0.1 * IMAGES
    kind = torch.full((len(IMAGES),), image_augmentation._NUM_OPERATIONS - 1)
    changed = image_augmentation._apply(dull, kind, torch.zeros(len(IMAGES)))
    assert torch.allclose(changed.amin(dim=(2, 3)), torch.tensor(0.0))
    assert torch.allclose(changed.amax(dim=(2, 3)), torch.tensor(1.0))


def test_every_kind_is_an_operation():
    assert image_augmentation._GEOMETRIC + len(image_augmentation._COLOUR_OPERATIONS) == 12
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    changed = rand_augment_pixels(pixels, operations=1, strength=0.5, generator=torch.Generator().manual_seed(3))
    assert changed.shape == pixels.shape
    assert changed.dtype == np.uint8
