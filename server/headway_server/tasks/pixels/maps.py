"""Maps of a model's cells, enlarged to an image's pixels.

H, W height and width of an image, R, S rows and columns of the model's cells, C labels, P pixels of a band. The first
and the last cell of an axis end where the image ends, as `interpolate` of PyTorch has it without `align_corners`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_server.tasks.outputs import sigmoid

_BAND_VALUES: Final = 2**22
"""Numbers computed at a time, which bounds the temporary memory of a large image."""
_RIVALS: Final = (2, 4, 16)
"""Numbers of labels that are interpolated together, besides all."""
_CUBIC: Final = -0.75
"""Parameter of the cubic convolution (Keys 1981, "Cubic Convolution Interpolation for Digital Image Processing"), that
of PyTorch."""
_MOST_LEVEL: Final = 2**16 - 1
_FAST: Final = 1
"""Compression of a PNG of many levels; a stronger one takes many times as long, for a tenth of its bytes."""


class _Axis(NamedTuple):
    """Linear interpolation between cells along one axis."""

    low: NDArray[np.intp]
    """Lower cell of each pixel."""
    high: NDArray[np.intp]
    weight: NDArray[np.float32]
    """Weight of the higher cell."""

    @classmethod
    def of(cls, num_cells: int, num_pixels: int) -> _Axis:
        places = np.maximum(_places(num_cells, num_pixels), 0)
        low = np.minimum(places.astype(np.intp), num_cells - 1)
        return cls(low, np.minimum(low + 1, num_cells - 1), (places - low).astype(np.float32))

    def part(self, band: slice) -> _Axis:
        """Returns that of some pixels."""
        return _Axis(self.low[band], self.high[band], self.weight[band])

    @property
    def nearest(self) -> NDArray[np.intp]:
        """The nearest cell of each pixel."""
        return np.where(self.weight < 0.5, self.low, self.high)


def _places(num_cells: int, num_pixels: int) -> NDArray[np.float64]:
    """Returns the centre of each pixel, in cells: 0 is the centre of the first one."""
    places: NDArray[np.float64] = (np.arange(num_pixels, dtype=np.float64) + 0.5) * (num_cells / num_pixels) - 0.5
    return places


@dataclass(frozen=True, slots=True, eq=False)
class ClassMap:
    """The label of each pixel of an image."""

    classes: NDArray[np.uint8] | NDArray[np.uint16]
    """(H, W), the number of each pixel's label."""
    counts: NDArray[np.int64]
    """(C,), pixels of each label."""
    scores: NDArray[np.float32]
    """(C,), mean over these pixels of the label's score at the nearest cell; 0 without any."""

    @classmethod
    def of(cls, logits: NDArray[np.float32], size: tuple[int, int], *, is_score: bool = False) -> ClassMap:
        """Labels pixels as `post_process_semantic_segmentation` of transformers does, by interpolated logits.

        Pixels between four cells whose logits leave one label have it, and for others only the labels that are left are
        interpolated.

        Args:
            logits: (C, R, S).
            size: Width and height of the image, in pixels.
            is_score: True if they are scores themselves; False: scores are their softmax.

        Raises:
            FloatingPointError: A logit is not finite.
        """
        num_labels, rows, columns = logits.shape
        if not np.isfinite(logits).all():
            raise FloatingPointError("the model's logits have values that are not finite")
        cells = np.ascontiguousarray(logits.reshape(num_labels, -1).T)  # (R S, C)
        down, across = _Axis.of(rows, size[1]), _Axis.of(columns, size[0])
        best = cells.argmax(axis=1).astype(np.uint8 if num_labels <= 2**8 else np.uint16).reshape(rows, columns)
        rivals = _Rivals.of(cells, rows)
        classes = best[down.low][:, across.low]  # (H, W)
        normalizers = None if is_score else _normalizers(cells)  # (R S,)
        counts, sums = np.zeros(num_labels, np.int64), np.zeros(num_labels, np.float64)
        step = max(1, _BAND_VALUES // size[0])
        for start in range(0, size[1], step):
            band = slice(start, start + step)
            _label_edge(classes[band], cells, rivals, down.part(band), across)
            found = classes[band].astype(np.intp)
            nearest = down.nearest[band][:, np.newaxis] * columns + across.nearest
            near = cells[nearest, found]
            if normalizers is not None:
                near = np.exp(near - normalizers[nearest])
            counts += np.bincount(found.ravel(), minlength=num_labels)
            sums += np.bincount(found.ravel(), weights=near.ravel(), minlength=num_labels)
        return cls(classes, counts, (sums / np.maximum(counts, 1)).astype(np.float32))

    def png(self) -> bytes:
        """Returns a grey PNG of the labels' numbers, of 8 or 16 bits a pixel."""
        return _png(self.classes)


def _normalizers(cells: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the logarithm of the sum of a softmax, (R S, C) -> (R S,)."""
    highest = cells.max(axis=1)
    sums = np.empty_like(highest)
    step = max(1, _BAND_VALUES // cells.shape[1])
    for start in range(0, len(cells), step):
        band = slice(start, start + step)
        sums[band] = np.exp(cells[band] - highest[band, np.newaxis]).sum(axis=1)
    logarithms: NDArray[np.float32] = highest + np.log(sums)
    return logarithms


class _Rivals(NamedTuple):
    """Labels that may win between a cell and its neighbours to the right, below, and both."""

    counts: NDArray[np.intp]
    """(R, S), how many; 1 where the pixels between have one label."""
    labels: NDArray[np.intp]
    """(R S, K), the first K of them in order, and then others."""

    @classmethod
    def of(cls, cells: NDArray[np.float32], num_rows: int) -> _Rivals:
        """Finds them in the logits of cells, (R S, C).

        A label that is below another one's least logit of the four at each of them is below it at every mean of them.
        """
        num_labels, num_columns = cells.shape[1], len(cells) // num_rows
        most = min(_RIVALS[-1], num_labels)
        counts = np.empty(len(cells), np.intp)
        labels = np.empty((len(cells), most), np.intp)
        by_row = cells.reshape(num_rows, num_columns, num_labels)
        step = max(1, _BAND_VALUES // (4 * num_columns * num_labels))
        for start in range(0, num_rows, step):
            upper, lower = by_row[start : start + step], by_row[start + 1 : start + step + 1]
            lower = np.concatenate([lower, upper[-1:]])[: len(upper)]
            low, high = np.minimum(upper, lower), np.maximum(upper, lower)
            low[:, :-1] = np.minimum(low[:, :-1], low[:, 1:])
            high[:, :-1] = np.maximum(high[:, :-1], high[:, 1:])
            may_win = (high >= low.max(axis=-1, keepdims=True)).reshape(-1, num_labels)
            place = slice(start * num_columns, start * num_columns + len(may_win))
            counts[place] = may_win.sum(axis=1)
            labels[place] = np.argsort(~may_win, axis=1, kind="stable")[:, :most]
        return cls(counts.reshape(num_rows, num_columns), labels)


def _label_edge(classes: NDArray[Any], cells: NDArray[np.float32], rivals: _Rivals, down: _Axis, across: _Axis) -> None:
    """Labels the pixels of a band where several labels may win, in place, by interpolated logits of these."""
    num_columns, num_labels = rivals.counts.shape[1], cells.shape[1]
    counts, fewer = rivals.counts[down.low][:, across.low], 1  # (P / W, W)
    for most in (*_RIVALS, num_labels):
        ys, xs = np.nonzero((counts > fewer) & (counts <= most))
        fewer, step = most, max(1, _BAND_VALUES // (4 * most))
        for start in range(0, len(ys), step):
            y, x = ys[start : start + step], xs[start : start + step]
            above, below = down.low[y] * num_columns, down.high[y] * num_columns
            left, right, share = across.low[x], across.high[x], across.weight[x, np.newaxis]
            corners = above + left, above + right, below + left, below + right
            if most in _RIVALS:
                labels = rivals.labels[corners[0], :most]  # (P, K)
                logits = [cells[places[:, np.newaxis], labels] for places in corners]
            else:
                labels, logits = None, [cells[places] for places in corners]  # (P, C)
            upper, lower = _blend(logits[0], logits[1], share), _blend(logits[2], logits[3], share)
            best = _blend(upper, lower, down.weight[y, np.newaxis]).argmax(axis=1)
            classes[y, x] = best if labels is None else labels[np.arange(len(y)), best]


def _blend(low: NDArray[np.float32], high: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the mean of two, in the memory of the second."""
    high -= low
    high *= weight
    high += low
    return high


@dataclass(frozen=True, slots=True, eq=False)
class ProbabilityMaps:
    """The probability of each label at each pixel of an image, each label by itself."""

    classes: NDArray[np.uint8]
    """(H, W), the number of each pixel's likeliest label."""
    counts: NDArray[np.int64]
    """(C,), pixels of each label."""
    scores: NDArray[np.float32]
    """(C,), mean over these pixels of the label's probability; 0 without any."""
    pngs: Sequence[bytes]
    """A grey PNG of each label, of which level 255 is a probability of 1."""

    @classmethod
    def of(cls, logits: NDArray[np.float32], size: tuple[int, int]) -> ProbabilityMaps:
        """Interpolates logits linearly and takes their sigmoid.

        Args:
            logits: (C, R, S), of at most 256 labels.
            size: Width and height of the image, in pixels.

        Raises:
            FloatingPointError: A logit is not finite.
        """
        if not np.isfinite(logits).all():
            raise FloatingPointError("the model's logits have values that are not finite")
        num_labels, rows, columns = logits.shape
        down, across = _Axis.of(rows, size[1]), _Axis.of(columns, size[0])
        classes = np.zeros(size[::-1], np.uint8)
        best = np.full(size[::-1], -np.inf, np.float32)
        levels, pngs = np.empty(size[::-1], np.uint8), []
        step = max(1, _BAND_VALUES // size[0])
        for label in range(num_labels):
            wide = _blend(logits[label][:, across.low], logits[label][:, across.high], across.weight)  # (R, W)
            for start in range(0, size[1], step):
                band = slice(start, start + step)
                low, high, weight = down.part(band)
                found = _blend(wide[low], wide[high], weight[:, np.newaxis])
                better = found > best[band]
                classes[band][better] = label
                np.maximum(best[band], found, out=best[band])
                levels[band] = np.rint(sigmoid(found) * 255)
            pngs.append(_png(levels, compress_level=_FAST))
        counts = np.bincount(classes.ravel(), minlength=num_labels)
        sums = np.bincount(classes.ravel(), weights=sigmoid(best).ravel(), minlength=num_labels)
        return cls(classes, counts, (sums / np.maximum(counts, 1)).astype(np.float32), pngs)

    def png(self) -> bytes:
        """Returns a grey PNG of the labels' numbers."""
        return _png(self.classes)


def enlarge_depth(depth: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """Interpolates depth as `post_process_depth_estimation` of transformers does, by cubic convolution.

    Args:
        depth: (R, S).
        size: Width and height of the image, in pixels.

    Returns:
        float32 (H, W).

    Raises:
        FloatingPointError: A value is not finite.
    """
    if not np.isfinite(depth).all():
        raise FloatingPointError("the model's depth has values that are not finite")
    (down, down_weights), (across, across_weights) = _taps(depth.shape[0], size[1]), _taps(depth.shape[1], size[0])
    wide = np.zeros((depth.shape[0], size[0]), np.float32)  # (R, W)
    for cells, weights in zip(across, across_weights, strict=True):
        wide += depth[:, cells] * weights
    enlarged = np.zeros((size[1], size[0]), np.float32)
    step = max(1, _BAND_VALUES // size[0])
    for start in range(0, size[1], step):
        band = slice(start, start + step)
        for cells, weights in zip(down, down_weights, strict=True):
            enlarged[band] += wide[cells[band]] * weights[band, np.newaxis]
    return enlarged


def _taps(num_cells: int, num_pixels: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Returns the four cells around each pixel, (4, pixels), and their weights (Keys 1981, equation 4)."""
    places = _places(num_cells, num_pixels)
    first = np.floor(places)
    part, cells = places - first, first.astype(np.intp)

    def near(distance: NDArray[np.float64]) -> NDArray[np.float64]:
        return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1

    def far(distance: NDArray[np.float64]) -> NDArray[np.float64]:
        return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC

    weights = np.stack([far(part + 1), near(part), near(1 - part), far(2 - part)])
    around = np.clip(cells + np.arange(-1, 3)[:, np.newaxis], 0, num_cells - 1)
    return around, weights.astype(np.float32)


def depth_png(depth: NDArray[np.float32]) -> tuple[bytes, float, float]:
    """Returns a grey PNG of 16 bits a pixel, and the depth at its levels 0 and 65535.

    Args:
        depth: (H, W), which is overwritten.
    """
    least, most = float(depth.min()), float(depth.max())
    depth -= np.float32(least)
    depth *= np.float32(_MOST_LEVEL / (most - least) if most > least else 0)
    np.rint(depth, out=depth)
    return _png(np.minimum(depth, _MOST_LEVEL, out=depth).astype(np.uint16), compress_level=_FAST), least, most


def _png(levels: NDArray[Any], **options: int) -> bytes:
    file = BytesIO()
    Image.fromarray(levels).save(file, "PNG", **options)
    return file.getvalue()
