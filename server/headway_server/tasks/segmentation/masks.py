"""Masks: from logits of cells to pixels of the caller's image, as run lengths or PNG.

H, W height and width of an image, S side of a mask in cells. Logits of pixels are interpolated linearly between the
centres of cells, or between those of the model's pixels, which are interpolated between cells (Kirillov et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_server.preprocessing.image import ImageTransform

_BAND_PIXELS: Final = 2**20
"""Pixels interpolated at a time, which bounds the temporary memory of a large mask."""
_STEEPEST: Final = 2.0**10
"""Maximum ratio of the logits of two neighbouring cells in a mask for which interpolation stays above 0 in fp32."""
_STABLE_OFFSET: Final = 1.0
"""Offset of the threshold of 0, in both directions, for `stability` (Kirillov et al. 2023, appendix B)."""


class Box(NamedTuple):
    """Bounding box of a mask in pixels; right and bottom are exclusive. Zeros for an empty mask."""

    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgedMask:
    """A mask with the logits of its edge alone: the others affect no pixel.

    A pixel lies between four cells, or between nine where the model's pixels come in between. If all of them are inside
    the mask, or all outside, so is the pixel, for any logits. A mask of noise is all edge.
    """

    inside: NDArray[np.uint8]
    """Bits of the cells that are in the mask, (S S / 8,)."""
    edge: NDArray[np.uint8]
    """Bits of the cells at the edge, likewise."""
    logits: NDArray[np.float32]
    """Logits of the edge cells, in order."""
    highest: np.float32
    """Shape of all logits."""
    side: int
    """S"""

    @classmethod
    def of_logits(cls, logits: NDArray[np.float32], *, by_model_pixels: bool = False) -> EdgedMask:
        """Keeps the edge of (S, S) logits; the last argument is that of `PixelMask.of_logits`."""
        reach, highest = min(3 if by_model_pixels else 2, len(logits)), logits.max()
        plain = _all_of(logits > highest / _STEEPEST, reach) | _all_of(logits <= 0, reach)  # both are false for NaN
        edge = np.zeros(logits.shape, np.bool_)
        places = [slice(start, len(logits) - reach + 1 + start) for start in range(reach)]
        for rows in places:
            for columns in places:
                edge[rows, columns] |= ~plain
        return cls(
            inside=np.packbits(logits > 0),
            edge=np.packbits(edge),
            logits=logits[edge],
            highest=highest,
            side=logits.shape[0],
        )

    def with_all_logits(self) -> NDArray[np.float32]:
        """Returns (S, S) logits of the same pixels: stored ones at the edge, and elsewhere values of the right sign."""
        inside, edge = (np.unpackbits(bits, count=self.side**2).view(np.bool_) for bits in (self.inside, self.edge))
        logits = np.where(inside, self.highest, np.float32(-1))
        logits[edge] = self.logits
        return logits.reshape(self.side, self.side)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, `most_bytes` at most."""
        return self.inside.nbytes + self.edge.nbytes + self.logits.nbytes

    @staticmethod
    def most_bytes(side: int) -> int:
        """Returns the bytes of a mask of noise."""
        return 4 * side**2 + 2 * -(-(side**2) // 8)


def _all_of(cells: NDArray[np.bool_], side: int) -> NDArray[np.bool_]:
    """Combines each square of cells by logical and: (S, S) -> (S - side + 1, S - side + 1)."""
    for _ in range(side - 1):
        pairs = cells[:-1] & cells[1:]
        cells = pairs[:, :-1] & pairs[:, 1:]
    return cells


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelMask:
    """A mask in the pixels of an image."""

    width: int
    height: int
    left: int
    """Bounds of the part that may contain mask pixels, in the image."""
    top: int
    columns: NDArray[np.bool_]
    """Mask of that part by columns, (its width, its height)."""

    @classmethod
    def of_logits(
        cls,
        logits: NDArray[np.float32],
        transform: ImageTransform,
        size: tuple[int, int],
        model_size: tuple[int, int],
        *,
        by_model_pixels: bool = False,
    ) -> PixelMask:
        """Resizes a mask to an image's pixels.

        Args:
            logits: (S, S), above 0 in the mask.
            transform: From the image's pixels to the model's.
            size: Width and height of the image.
            model_size: Width and height of the model's input. Pixels beyond it are outside the mask.
            by_model_pixels: True to interpolate first to the model's pixels in the image, and from there to its own.
        """
        side = logits.shape[0]
        inside = logits > 0
        across, down = (
            _Axis.of(
                (np.arange(size[axis]) + 0.5) * transform.scale[axis] + transform.offset[axis],
                model_size[axis] / side,
                np.flatnonzero(inside.any(axis=axis)),
                side,
                num_between=_num_model_pixels(transform, size, model_size, axis) if by_model_pixels else None,
            )
            for axis in (0, 1)
        )
        cells_by_column = np.ascontiguousarray(logits.T, np.float32)  # (S, S): x, y
        blended = down.blend(cells_by_column.T).T  # (S, pixels down)
        columns = np.empty((len(across.low), len(down.low)), np.bool_)
        step = max(1, _BAND_PIXELS // max(1, len(down.low)))
        for start in range(0, len(across.low), step):
            band = slice(start, start + step)
            np.greater(across.blend(blended, band), 0, out=columns[band])
        return cls(width=size[0], height=size[1], left=across.first, top=down.first, columns=columns)

    def runs(self) -> NDArray[np.int32]:
        """Returns run lengths by columns from the upper left corner: outside, inside, outside ...

        The format is COCO's uncompressed RLE; the first length is 0 if the first pixel is inside.
        """
        wide, high = self.columns.shape
        edged = np.zeros((wide, high + 2), np.int8)
        edged[:, 1:-1] = self.columns
        column, row = np.nonzero(np.diff(edged, axis=1))  # where runs begin and end, in turn
        bounds = (column + self.left) * self.height + row + self.top
        joined = np.flatnonzero(bounds[1:-1:2] == bounds[2::2])  # a run that goes on at the top of the next column
        bounds = np.delete(bounds, np.concatenate([2 * joined + 1, 2 * joined + 2]))
        counts: NDArray[np.int32] = np.diff(bounds, prepend=0, append=self.width * self.height).astype(np.int32)
        return counts[:-1] if len(counts) > 1 and counts[-1] == 0 else counts

    def png(self) -> bytes:
        """Returns a PNG of one bit a pixel, white in the mask, of the image's size."""
        file = BytesIO()
        Image.fromarray(self.pixels()).save(file, "PNG")
        return file.getvalue()

    def pixels(self) -> NDArray[np.bool_]:
        """Returns the whole mask, (H, W)."""
        full = np.zeros((self.height, self.width), np.bool_)
        wide, high = self.columns.shape
        full[self.top : self.top + high, self.left : self.left + wide] = self.columns.T
        return full

    @property
    def area(self) -> int:
        """Number of mask pixels."""
        return int(np.count_nonzero(self.columns))

    @property
    def box(self) -> Box:
        """The smallest box around the mask."""
        across, down = (np.flatnonzero(self.columns.any(axis=axis)) for axis in (1, 0))
        if not len(across):
            return Box(0, 0, 0, 0)
        left, right = self.left + int(across[0]), self.left + int(across[-1]) + 1
        return Box(left, self.top + int(down[0]), right, self.top + int(down[-1]) + 1)


def _num_model_pixels(transform: ImageTransform, size: tuple[int, int], model_size: tuple[int, int], axis: int) -> int:
    """Returns how many of the model's pixels an image covers along an axis."""
    return min(model_size[axis], max(1, round(transform.scale[axis] * size[axis] + transform.offset[axis])))


def covered_cells(
    transform: ImageTransform, size: tuple[int, int], model_size: tuple[int, int], side: int
) -> tuple[int, int]:
    """Returns how many rows and columns of (S, S) cells an image covers; there is padding beyond them."""
    columns, rows = (
        -(-side * _num_model_pixels(transform, size, model_size, axis) // model_size[axis]) for axis in (0, 1)
    )
    return rows, columns


class _Axis(NamedTuple):
    """Interpolation between cells along one axis of a part of an image."""

    first: int
    """First pixel of the part."""
    low: NDArray[np.intp]
    high: NDArray[np.intp]
    weight: NDArray[np.float32]
    """Weight of the higher cell."""
    between: _Axis | None = None
    """Interpolation between cells of the model's pixels, which `low` and `high` are then; None: these are cells."""

    @classmethod
    def of(
        cls,
        positions: NDArray[np.floating[Any]],
        stride: float,
        inner: NDArray[np.intp],
        side: int,
        *,
        num_between: int | None = None,
    ) -> _Axis:
        """Finds the pixels that a mask may contain.

        Args:
            positions: Centre of each pixel, in pixels of the model's input.
            stride: Side of a cell, likewise.
            inner: Cells of the axis whose row or column has a cell in the mask.
            side: Number of cells of the axis.
            num_between: Number of the model's pixels that are interpolated first; None: none is.
        """
        cells = positions / stride - 0.5
        first, last = (int(inner[0]), int(inner[-1])) if len(inner) else (0, -1)
        reach = 1 if num_between is None else 1 + 1 / stride
        near = (cells > first - reach) & (cells < last + reach) & (positions >= 0) & (positions <= side * stride)
        pixels = np.flatnonzero(near)
        start = int(pixels[0]) if len(pixels) else 0
        if num_between is None:
            return cls._at(start, cells[pixels], side)
        between = cls._at(0, (np.arange(num_between) + 0.5) / stride - 0.5, side)
        return cls._at(start, positions[pixels] - 0.5, num_between)._replace(between=between)

    @classmethod
    def _at(cls, first: int, places: NDArray[np.floating[Any]], count: int) -> _Axis:
        """Interpolates at places between so many values: 0 is the first one's, and `count` - 1 the last one's."""
        taken = np.clip(places, 0, count - 1)
        low = taken.astype(np.intp)
        return cls(first, low, np.minimum(low + 1, count - 1), (taken - low).astype(np.float32))

    def blend(self, cells: NDArray[np.float32], band: slice = slice(None)) -> NDArray[np.float32]:
        """Interpolates along the first axis: (S, X) -> (pixels, X)."""
        low, high = self.low[band], self.high[band]
        if self.between is not None and len(low):
            start = low[0]
            cells = self.between.blend(cells, slice(start, high[-1] + 1))
            low, high = low - start, high - start
        values: NDArray[np.float32] = cells[low]
        return values + self.weight[band, np.newaxis] * (cells[high] - values)


def stability(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the stability of masks (..., S, S) to the threshold: 0 to 1, (...); 0 for an empty mask."""
    small, large = ((logits > offset).sum(axis=(-2, -1)) for offset in (_STABLE_OFFSET, -_STABLE_OFFSET))
    shares: NDArray[np.float32] = (small / np.maximum(large, 1)).astype(np.float32)
    return shares


COMPARED: Final = 3
"""Memory of a comparison in multiples of the masks' bits: sorted copy, remaining masks, and bit counts."""


def drop_duplicates(
    inside: Sequence[NDArray[np.uint8]], scores: NDArray[np.float32], most_overlap: float, most: int
) -> list[int]:
    """Non-maximum suppression of masks, the best first.

    Takes `COMPARED` times the bytes of `inside`.

    Args:
        inside: Bits of the cells of N masks, each (S S / 8,).
        scores: (N,).
        most_overlap: Minimum intersection over union of two masks of which the worse is dropped.
        most: Maximum number of masks.

    Returns:
        Indices of masks, by falling score.
    """
    order = np.argsort(-scores, kind="stable")
    packed = np.zeros((len(order), -(-len(inside[0]) // 8) * 8), np.uint8)
    for row, number in enumerate(order):
        packed[row, : len(inside[number])] = inside[number]
    bits = packed.view(np.uint64)  # (N, S S / 64)
    areas = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
    waiting, kept = np.arange(len(order)), list[int]()
    while len(waiting) and len(kept) < most:
        best, waiting = waiting[0], waiting[1:]
        kept.append(int(order[best]))
        both = bits[waiting]
        both &= bits[best]
        shared = np.bitwise_count(both).sum(axis=1, dtype=np.int64)
        either = areas[waiting] + areas[best] - shared
        waiting = waiting[shared <= most_overlap * np.maximum(either, 1)]
    return kept
