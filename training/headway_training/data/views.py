"""What training changes at random in pictures: which part of them is seen, where they lie, and their colours.

B batch, S side of a stored picture, I side of what a model sees, in pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

_GREY = torch.tensor([0.299, 0.587, 0.114])
"""Shares of red, green and blue in the brightness (ITU-R BT.601)."""


def random_crops(
    images: Tensor,
    size: int,
    *,
    least_area: float,
    most_area: float = 1.0,
    mirrored: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Cuts a part out of each photograph, of 3:4 to 4:3, and brings it to one size (Szegedy et al. 2015, section 6).

    Args:
        images: uint8 (B, 3, S, S).
        size: I.
        least_area: Share of a picture that the part has at least.
        most_area: The share that it has at most.
        mirrored: bool (B,): which are mirrored.
        generator: Where the random numbers come from.

    Returns:
        float (B, 3, I, I), 0 to 1.
    """
    count = len(images)
    area = _uniform((count,), least_area, most_area, generator)
    ratio = _uniform((count,), math.log(3 / 4), math.log(4 / 3), generator).exp()
    width, height = ((area * ratio).sqrt().clamp(max=1.0), (area / ratio).sqrt().clamp(max=1.0))
    shift = _uniform((2, count), -1.0, 1.0, generator)
    zeros = torch.zeros(count)
    sign = 1 - 2 * mirrored.float()
    matrices = torch.stack(
        (sign * width, zeros, shift[0] * (1 - width), zeros, height, shift[1] * (1 - height)), dim=-1
    ).reshape(-1, 2, 3)
    return _sample(images.float() / 255, matrices, size, padding="border")


def random_placements(
    images: Tensor, opaque: Tensor, backgrounds: Tensor, *, mirrored: Tensor, generator: torch.Generator
) -> Tensor:
    """Lays each drawing on a background, scaled, turned by up to 15 degrees, and shifted.

    Args:
        images: uint8 (B, 3, S, S).
        opaque: bool (B, S, S): what is drawn.
        backgrounds: float (B, 3, I, I), 0 to 1.
        mirrored: bool (B,): which are mirrored.
        generator: Where the random numbers come from.

    Returns:
        float (B, 3, I, I), 0 to 1.
    """
    count = len(images)
    zoom = _uniform((count,), math.log(0.85), math.log(1.5), generator).exp()  # above one: the drawing is smaller
    stretch = _uniform((count,), -0.12, 0.12, generator).exp()
    angle = _uniform((count,), -math.pi / 12, math.pi / 12, generator)
    shift = _uniform((2, count), -0.15, 0.15, generator) * zoom
    sign = 1 - 2 * mirrored.float()
    cosine, sine = angle.cos() * zoom, angle.sin() * zoom
    matrices = torch.stack(
        (sign * cosine * stretch, -sign * sine, shift[0], sine * stretch, cosine, shift[1]), dim=-1
    ).reshape(-1, 2, 3)
    covering = opaque[:, None].float()  # (B, 1, S, S)
    layers = torch.cat((images.float() / 255 * covering, covering), dim=1)  # (B, 4, S, S)
    placed = _sample(layers, matrices, backgrounds.shape[-1], padding="zeros")
    return placed[:, :3] + backgrounds * (1 - placed[:, 3:])


def plain_backgrounds(count: int, size: int, *, white: float, generator: torch.Generator) -> Tensor:
    """Makes backgrounds, (B, 3, I, I): a share of them white, the others from one colour to another."""
    ends = torch.rand(2, count, 3, 1, 1, generator=generator)
    way = torch.linspace(0, 1, size)
    across = torch.rand(count, 1, 1, 1, generator=generator)
    mix = across * way[:, None] + (1 - across) * way[None, :]  # (B, 1, I, I)
    is_white = torch.rand(count, 1, 1, 1, generator=generator) < white
    return torch.where(is_white, 1.0, ends[0] * mix + ends[1] * (1 - mix))


def random_colours(images: Tensor, strength: float, *, grey: float, generator: torch.Generator) -> Tensor:
    """Changes brightness, contrast, saturation and the balance of colours of each picture.

    Args:
        images: float (B, 3, I, I), 0 to 1.
        strength: Share by which each changes at most.
        grey: Share of pictures that lose their colours.
        generator: Where the random numbers come from.
    """
    count = len(images)
    factors = _uniform((3, count, 1, 1, 1), 1 - strength, 1 + strength, generator)
    balance = _uniform((count, 3, 1, 1), 1 - strength / 4, 1 + strength / 4, generator)
    images = images * factors[0] * balance
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = mean + (images - mean) * factors[1]
    brightness = torch.einsum("bchw,c->bhw", images, _GREY)[:, None]  # (B, 1, I, I)
    saturation = torch.where(torch.rand(count, 1, 1, 1, generator=generator) < grey, 0.0, factors[2])
    return (brightness + (images - brightness) * saturation).clamp(0, 1)


def random_coarseness(images: Tensor, share: float, *, least_size: int, generator: torch.Generator) -> Tensor:
    """Takes fine detail from a share of the pictures, as if they had `least_size` pixels a side or more."""
    chosen = torch.rand(len(images), generator=generator) < share
    if not chosen.any():
        return images
    size = int(torch.randint(least_size, images.shape[-1], (1,), generator=generator))
    coarse = F.interpolate(images[chosen], size=(size, size), mode="bilinear", antialias=True)
    images = images.clone()
    images[chosen] = F.interpolate(coarse, size=images.shape[-2:], mode="bicubic").clamp(0, 1)
    return images


def random_holes(images: Tensor, share: float, *, largest: float, generator: torch.Generator) -> Tensor:
    """Covers a square of each of some pictures by a colour (DeVries and Taylor 2017).

    Args:
        images: float (B, 3, I, I), 0 to 1.
        share: Of pictures with a hole.
        largest: Side of the largest hole, as a share of a picture's side.
        generator: Where the random numbers come from.
    """
    count, _, size, _ = images.shape
    side = _uniform((count,), 0.1, largest, generator) * size
    centre = torch.rand(2, count, generator=generator) * size
    places = torch.arange(size)
    rows, columns = ((places[None, :] - one[:, None]).abs() < side[:, None] / 2 for one in centre)  # (B, I)
    chosen = torch.rand(count, generator=generator) < share
    hole = rows[:, :, None] & columns[:, None, :] & chosen[:, None, None]  # (B, I, I)
    return torch.where(hole[:, None], torch.rand(count, 3, 1, 1, generator=generator), images)


def _sample(images: Tensor, matrices: Tensor, size: int, *, padding: str) -> Tensor:
    """Maps pictures by matrices (B, 2, 3), from what is seen to what is stored; four samples make a pixel."""
    grid = F.affine_grid(matrices, [len(images), images.shape[1], 2 * size, 2 * size], align_corners=False)
    fine = F.grid_sample(images, grid, mode="bilinear", padding_mode=padding, align_corners=False)
    return F.avg_pool2d(fine, 2)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)
