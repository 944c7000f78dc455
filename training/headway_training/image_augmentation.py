"""Random changes of images after RandAugment (Cubuk et al. 2020): a few operations of one strength, drawn per image.

B images, H height, W width.

Deviations: the twelve operations are those that are quick on whole batches (no equalisation, no posterisation); the
strength is a share of each operation's range, not a number of 0 to 30; what comes in at an edge is grey.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

_GREY = 0.5
_MAX_ANGLE = math.radians(30)
_MAX_SHEAR = 0.3
_MAX_SHIFT = 0.3
_GEOMETRIC = 5
_NUM_OPERATIONS = 12
_LUMA = (0.299, 0.587, 0.114)


def rand_augment(images: Tensor, *, operations: int, strength: float, generator: torch.Generator) -> Tensor:
    """Applies some random operations to each image, one after another.

    Args:
        images: float (B, 3, H, W), 0 to 1.
        operations: How many.
        strength: Share of each operation's range, 0 to 1; its sign is random.
        generator: Where the random numbers come from.

    Returns:
        float (B, 3, H, W), 0 to 1.
    """
    for _ in range(operations):
        kinds = torch.randint(0, _NUM_OPERATIONS, (len(images),), generator=generator)
        signs = torch.randint(0, 2, (len(images),), generator=generator) * 2 - 1
        images = _apply(images, kinds, strength * signs.float())
    return images


def rand_augment_pixels(
    images: NDArray[np.uint8], *, operations: int, strength: float, generator: torch.Generator
) -> NDArray[np.uint8]:
    """`rand_augment` of pixels, uint8 (B, H, W, 3)."""
    scaled = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255  # (B, 3, H, W)
    changed = rand_augment(scaled, operations=operations, strength=strength, generator=generator)
    pixels: NDArray[np.uint8] = (changed * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return pixels


def _apply(images: Tensor, kinds: Tensor, amounts: Tensor) -> Tensor:
    """One operation on each image: `kinds` (B), with signed amounts (B)."""
    changed = images.clone()
    moved = kinds < _GEOMETRIC
    if moved.any():
        changed[moved] = _move(images[moved], kinds[moved], amounts[moved])
    for kind, operation in enumerate(_COLOUR_OPERATIONS, start=_GEOMETRIC):
        chosen = kinds == kind
        if chosen.any():
            changed[chosen] = operation(images[chosen], amounts[chosen][:, None, None, None])
    return changed.clamp(0, 1)


def _move(images: Tensor, kinds: Tensor, amounts: Tensor) -> Tensor:
    """Rotation, shear and shift along either axis, by an affine map each."""
    maps = torch.zeros(len(images), 2, 3)
    angles = torch.where(kinds == 0, amounts * _MAX_ANGLE, 0.0)
    maps[:, 0, 0] = maps[:, 1, 1] = angles.cos()
    maps[:, 0, 1] = -angles.sin() + torch.where(kinds == 1, amounts * _MAX_SHEAR, 0.0)
    maps[:, 1, 0] = angles.sin() + torch.where(kinds == 2, amounts * _MAX_SHEAR, 0.0)
    maps[:, 0, 2] = torch.where(kinds == 3, 2 * amounts * _MAX_SHIFT, 0.0)  # an image is 2 wide
    maps[:, 1, 2] = torch.where(kinds == 4, 2 * amounts * _MAX_SHIFT, 0.0)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)  # (B, H, W, 2)
    return F.grid_sample(images - _GREY, grid, mode="bilinear", align_corners=False) + _GREY


def _blend(images: Tensor, degenerate: Tensor, amounts: Tensor) -> Tensor:
    """Away from a degenerate image for positive amounts, towards it for negative ones."""
    return degenerate + (1 + 0.9 * amounts) * (images - degenerate)


def _grey(images: Tensor) -> Tensor:
    """(B, 3, H, W) -> (B, 1, H, W)."""
    return (images * images.new_tensor(_LUMA)[:, None, None]).sum(dim=1, keepdim=True)


def _identity(images: Tensor, amounts: Tensor) -> Tensor:  # noqa: ARG001 (operations are called alike)
    return images


def _brightness(images: Tensor, amounts: Tensor) -> Tensor:
    return _blend(images, torch.zeros_like(images), amounts)


def _contrast(images: Tensor, amounts: Tensor) -> Tensor:
    return _blend(images, _grey(images).mean(dim=(2, 3), keepdim=True), amounts)


def _colour(images: Tensor, amounts: Tensor) -> Tensor:
    return _blend(images, _grey(images), amounts)


def _sharpness(images: Tensor, amounts: Tensor) -> Tensor:
    return _blend(images, F.avg_pool2d(F.pad(images, (1,) * 4, mode="replicate"), 3, stride=1), amounts)


def _solarize(images: Tensor, amounts: Tensor) -> Tensor:
    return torch.where(images > 1 - amounts.abs() / 2, 1 - images, images)


def _auto_contrast(images: Tensor, amounts: Tensor) -> Tensor:  # noqa: ARG001 (operations are called alike)
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp(min=1e-6), images)


_COLOUR_OPERATIONS = (_identity, _brightness, _contrast, _colour, _sharpness, _solarize, _auto_contrast)
