"""The most likely tokens of every row at once, without sorting the vocabulary.

Shapes: n rows, V vocabulary, C candidates, G groups of tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MIN_GROUPS = 256
_GROUPS_PER_CANDIDATE = 4


def top_candidates(
    logits: NDArray[np.float32], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Finds the tokens with the largest logits; among equals the lower id comes first.

    Args:
        logits: (n, V) float32, contiguous, no NaN.
        counts: (n,) how many are wanted of each row, 1 to V.

    Returns:
        Ids and logits, each (n, C), by falling logit, where C is the largest count; past a row's own count the logits
        are minus infinity.
    """
    largest = int(counts.max())
    vocab_size = logits.shape[1]
    num_groups = max(_MIN_GROUPS, _GROUPS_PER_CANDIDATE * largest)
    ids, values = (
        _all(logits)
        if num_groups * 2 > vocab_size
        else select(logits, logits >= _floor(logits, largest, num_groups)[:, np.newaxis])
    )
    order = np.argsort(-values, axis=1, kind="stable")[:, :largest]  # stable: ids rise within a row
    ids, values = np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)
    values[np.arange(largest) >= counts[:, np.newaxis]] = -np.inf
    return ids, values


def _all(logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    return np.broadcast_to(np.arange(logits.shape[1]), logits.shape), logits


def _floor(logits: NDArray[np.float32], count: int, num_groups: int) -> NDArray[np.float32]:
    """Returns, a row, a logit (n,) that at least `count` of its tokens reach and not many more.

    It is the `count`-th largest among the maxima of groups of tokens: each of these maxima is such a token.
    """
    depth = logits.shape[1] // num_groups
    grouped = logits[:, : depth * num_groups].reshape(len(logits), depth, num_groups)
    maxima = grouped.max(axis=1)  # (n, G) of tokens G apart, which is faster than of neighbours
    maxima.partition(num_groups - count, axis=1)
    floor: NDArray[np.float32] = maxima[:, num_groups - count]
    return floor


def select(logits: NDArray[np.float32], chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Packs the chosen tokens of every row.

    Args:
        logits: (n, V) float32, contiguous.
        chosen: (n, V) at least one token of each row.

    Returns:
        Ids, rising, and logits, each (n, C), where C is the largest number of a row; padded with minus infinity.
    """
    flat = np.flatnonzero(chosen)
    rows, columns = np.divmod(flat, logits.shape[1])
    found = np.bincount(rows, minlength=len(logits))
    places = np.arange(len(flat)) - (np.cumsum(found) - found)[rows]
    ids = np.zeros((len(logits), int(found.max())), np.int64)
    values = np.full(ids.shape, -np.inf, np.float32)
    ids[rows, places] = columns
    values[rows, places] = logits.ravel()[flat]
    return ids, values
