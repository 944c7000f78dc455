"""The most likely tokens of every row at once, without sorting the vocabulary.

Tokens are divided into many groups, each with a maximum. All C largest values of a row are at least the C-th largest of
these maxima, and only few tokens are. Every operation concerns one row, so a row's result does not depend on the rest
of the batch.

Shapes: n rows, V vocabulary, C candidates, G groups of tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GROUPS_PER_CANDIDATE = 4
_TOKENS_PER_GROUP = 24  # more groups take longer to partition, fewer leave more tokens above the floor
_SMALLEST = np.finfo(np.float32).min  # minus infinity, the logit of tokens that may not follow, is below it


def top_candidates(
    values: NDArray[np.float32], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Finds the tokens with the largest values; among equals the lower id comes first.

    Args:
        values: (n, V) float32, contiguous, no NaN.
        counts: (n,) requested number of each row, 1 to V.

    Returns:
        Ids and values, each (n, C), by falling value, where C is the largest count. Past a row's own count, and past
        the tokens whose value is not minus infinity, the values are minus infinity and the ids mean nothing.
    """
    largest = int(counts.max())
    ids, found = select(values, candidate_floor(values, largest), padding=-np.inf)
    if (lacking := largest - ids.shape[1]) > 0:
        ids, found = np.pad(ids, ((0, 0), (0, lacking))), np.pad(found, ((0, 0), (0, lacking)), constant_values=-np.inf)
    order = np.argsort(-found, axis=1, kind="stable")[:, :largest]  # stable: ids rise within a row
    ids, found = np.take_along_axis(ids, order, axis=1), np.take_along_axis(found, order, axis=1)
    found[np.arange(largest) >= counts[:, np.newaxis]] = -np.inf
    return ids, found


def candidate_floor(values: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Returns a value (n,) for each row that at least `count` of its tokens reach and not many more.

    Tokens of minus infinity never reach it. It is the `count`-th largest of the maxima of groups of tokens, or of all
    values if the groups would be too small to save time.

    Args:
        values: (n, V) float32, no NaN.
        count: 1 to V.
    """
    vocab_size = values.shape[1]
    num_groups = max(_GROUPS_PER_CANDIDATE * count, vocab_size // _TOKENS_PER_GROUP)
    depth = vocab_size // num_groups
    if depth > 1:
        grouped = values[:, : depth * num_groups].reshape(len(values), depth, num_groups)
        values = grouped.max(axis=1)  # (n, G), of tokens G apart, which is faster than of neighbours
    kth = values.shape[1] - count
    floor: NDArray[np.float32] = np.partition(values, kth, axis=1)[:, kth]
    return np.maximum(floor, _SMALLEST)


def select(
    values: NDArray[np.float32], floor: NDArray[np.float32], *, padding: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Packs the tokens of every row whose value reaches its floor.

    Args:
        values: (n, V) float32, contiguous.
        floor: (n,) above minus infinity.
        padding: Value that fills up shorter rows.

    Returns:
        Ids, rising, and values, each (n, C), where C is the largest number of tokens of a row.
    """
    num_rows, vocab_size = values.shape
    flat = np.flatnonzero(values >= floor[:, np.newaxis])
    starts = np.searchsorted(flat, np.arange(num_rows + 1) * vocab_size)  # of each row's tokens in `flat`
    found = np.diff(starts)
    rows = np.repeat(np.arange(num_rows), found)
    width = int(found.max())
    positions = np.arange(len(flat)) + np.repeat(np.arange(num_rows) * width - starts[:-1], found)
    ids = np.zeros((num_rows, width), np.int64)
    selected = np.full((num_rows, width), padding, np.float32)
    ids.reshape(-1)[positions] = flat - rows * vocab_size
    selected.reshape(-1)[positions] = values.reshape(-1)[flat]
    return ids, selected
