"""How far the numbers of one output are from those of another, so that no huge number hides the others.

The error of logits, of which a softmax makes probabilities, is the largest difference divided by their spread. Logits
more than 50 below the largest have no part in it: their probabilities are 0. Other outputs are divided by their size,
which is not more than ten times the median of their magnitudes. So one huge number hides no error of the others. A
score, which is a row of one number and may be near 0, is held to the bound itself where it is below 1. A caller may say
that smaller numbers are compared as if they had a certain size.

D numbers of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

_MOST_COMPARED = 1 << 20
"""Numbers that are compared at a time, in float64."""
_CLOSE = 50.0
"""Logits this far below the largest have no part in a softmax: exp(-50) is 2e-22."""
_MOST_MEDIANS = 10.0
"""Size of a row at most, in medians of its magnitudes."""
LEAST_SIZE = 1e-6


def relative_errors(
    found: NDArray[Any], expected: NDArray[Any], *, of_softmax: bool, least_size: float = LEAST_SIZE
) -> NDArray[np.float64]:
    """Returns the relative error of each row of an output, (..., D) -> (...); inf where it is not finite.

    Args:
        found: What a variant gives.
        expected: What PyTorch gives, in the same shape.
        of_softmax: True if they are logits that a softmax makes probabilities of.
        least_size: Least size that differences of other outputs are divided by.
    """
    *rows, width = expected.shape
    if expected.size > _MOST_COMPARED and len(rows) == 1:
        step = max(1, _MOST_COMPARED // width)
        parts = (slice(start, start + step) for start in range(0, rows[0], step))
        return np.concatenate(
            [
                relative_errors(found[part], expected[part], of_softmax=of_softmax, least_size=least_size)
                for part in parts
            ]
        )
    exact, other = expected.astype(np.float64), found.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        if of_softmax and width > 1:
            lowest = exact.max(axis=-1, keepdims=True) - _CLOSE
            exact, other = np.maximum(exact, lowest), np.maximum(other, lowest)
            size = _spread(exact, exact > lowest)
        else:
            size = np.maximum(np.abs(exact), np.maximum(_size(exact), least_size))
        np.subtract(other, exact, out=other)
        np.abs(other, out=other)
        np.divide(other, size, out=other)
        errors = other.max(axis=-1)
    finite: NDArray[np.float64] = np.where(np.isfinite(errors), errors, np.inf)
    return finite


def nearest_rows(expected: NDArray[np.floating[Any]], found: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Returns the number of the found row that stands for each expected one, (Q, D), (Q, D) -> (Q,): none twice.

    A model that chooses its boxes by their scores may exchange two of the same score.
    """
    distances = np.abs(expected[:, np.newaxis].astype(np.float64) - found).max(axis=-1)  # (Q, Q)
    order: NDArray[np.int64] = linear_sum_assignment(distances)[1]
    return order


def _spread(logits: NDArray[np.float64], close: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns how far the close logits of each row lie apart: (..., D) -> (..., D), or (..., 1).

    It is at least their largest magnitude up to 1. One that is alone has a probability of 1 whatever it is, and its
    own size.
    """
    are_all_close = bool(close.all())
    largest = logits.max(axis=-1, keepdims=True)
    smallest = (logits if are_all_close else np.where(close, logits, np.inf)).min(axis=-1, keepdims=True)
    magnitude = np.maximum(np.abs(largest), np.abs(smallest))
    size: NDArray[np.float64] = np.maximum(largest - smallest, np.minimum(magnitude, 1.0))
    if not are_all_close:
        alone = close.sum(axis=-1, keepdims=True) == 1
        size = np.where(alone, np.where(close, np.maximum(magnitude, 1.0), 1.0), size)
    return np.maximum(size, LEAST_SIZE)


def _size(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the size of the numbers of each row, (..., D) -> (..., 1)."""
    if rows.shape[-1] == 1:
        return np.ones_like(rows)
    magnitudes = np.abs(rows)
    # Zeros tell nothing of the size of what is not zero.
    counted = np.where(magnitudes > 0, magnitudes, np.nan)
    empty = ~(magnitudes > 0).any(axis=-1, keepdims=True)
    median = np.nanmedian(np.where(empty, 0.0, counted), axis=-1, keepdims=True)
    size: NDArray[np.float64] = np.minimum(magnitudes.max(axis=-1, keepdims=True), _MOST_MEDIANS * median)
    return size
