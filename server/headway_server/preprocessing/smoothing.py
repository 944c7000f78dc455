"""Images smoothed by a Gaussian and resized by linear interpolation, as image processors of OWLv2 do.

H, W height and width of an image, S its longer side, N side of the result, K places that a pixel is read from.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_TRUNCATED: Final = 4.0
"""Standard deviations of the Gaussian that are read on each side, as in SciPy."""
_NUM_CACHED: Final = 16
"""Pairs of sides whose weights are kept, of at most 1 MiB each."""


def smooth_square(pixels: NDArray[np.uint8], side: int) -> NDArray[np.float32]:
    """Adds black on the right or below to a square, smooths it against aliasing, and resizes it.

    The standard deviation is (S / N - 1) / 2, and 0 for an image that grows. Beyond its border the square is mirrored.
    The black is not computed, and the longer side is resized first, which bounds the memory of an elongated image.

    Args:
        pixels: (H, W, 3).
        side: N.

    Returns:
        float32 (N, N, 3), from 0 to 255.
    """
    height, width, channels = pixels.shape
    longer = max(height, width)
    resized = np.empty((side, side, channels), np.float32)
    order = (0, 1) if height >= width else (1, 0)
    for channel in range(channels):
        plane: NDArray[np.float32] | NDArray[np.uint8] = pixels[:, :, channel]
        for axis in order:
            plane = _resize_axis(plane if axis == 0 else plane.T, longer, side)
            plane = plane if axis == 0 else plane.T
        resized[:, :, channel] = plane
    return resized


def _resize_axis(plane: NDArray[np.float32] | NDArray[np.uint8], longer: int, side: int) -> NDArray[np.float32]:
    """Resizes the first axis: (H, W) -> (N, W), where rows from H to S are black."""
    places, weights = _taps(longer, side)
    resized = np.zeros((side, plane.shape[1]), np.float32)
    for place, weight in zip(places, weights, strict=True):
        within = place < len(plane)
        resized[within] += plane[place[within]] * weight[within, np.newaxis]
    return resized


@lru_cache(_NUM_CACHED)
def _taps(longer: int, side: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Returns the places that each pixel of the result is read from, and their weights: (K, N) each."""
    factor = longer / side
    deviation = max(0.0, (factor - 1) / 2)
    radius = int(_TRUNCATED * deviation + 0.5)
    offsets = np.arange(-radius, radius + 1)
    gaussian = np.exp(-0.5 * (offsets / deviation) ** 2) if radius else np.ones(1)
    gaussian /= gaussian.sum()
    centres = (np.arange(side) + 0.5) * factor - 0.5
    first = np.floor(centres)
    share = centres - first
    # A mean of two neighbours of the smoothed image, each a mean around it.
    weights = np.zeros((2 * radius + 2, side))
    weights[:-1] += gaussian[:, np.newaxis] * (1 - share)
    weights[1:] += gaussian[:, np.newaxis] * share
    places = first.astype(np.intp) + np.arange(-radius, radius + 2)[:, np.newaxis]
    return _mirrored(places, longer), weights.astype(np.float32)


def _mirrored(places: NDArray[np.intp], length: int) -> NDArray[np.intp]:
    """Returns places within an axis, mirrored at the centres of its first and its last pixel."""
    if length == 1:
        return np.zeros_like(places)
    period = 2 * (length - 1)
    within = places % period
    return np.minimum(within, period - within)
