"""The most likely tokens of every row at once, without sorting the vocabulary.

Shapes: n rows, V vocabulary, C candidates, G groups of tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GROUPS_PER_CANDIDATE = 4
_TOKENS_PER_GROUP = 24  # more groups take longer to partition, fewer are passed over more often
_WORD_SHIFT = 3
_WORD_BYTES = 1 << _WORD_SHIFT


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
    ids, values = select(logits, candidate_floor(logits, largest), padding=-np.inf)
    order = np.argsort(-values, axis=1, kind="stable")[:, :largest]  # stable: ids rise within a row
    ids, values = np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)
    values[np.arange(largest) >= counts[:, np.newaxis]] = -np.inf
    return ids, values


def candidate_floor(values: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Returns, a row, a value (n,) that at least `count` of its tokens reach and not many more.

    It is the `count`-th largest among the maxima of groups of tokens: each of these maxima is such a token. Where
    groups would be too small for that to pay, it is the `count`-th largest value itself.

    Args:
        values: (n, V) float32, no NaN.
        count: 1 to V.
    """
    vocab_size = values.shape[1]
    num_groups = max(_GROUPS_PER_CANDIDATE * count, vocab_size // _TOKENS_PER_GROUP)
    depth = vocab_size // num_groups
    if depth > 1:
        grouped = values[:, : depth * num_groups].reshape(len(values), depth, num_groups)
        values = grouped.max(axis=1)  # (n, G) of tokens G apart, which is faster than of neighbours
    kth = values.shape[1] - count
    floor: NDArray[np.float32] = np.partition(values, kth, axis=1)[:, kth]
    return floor


def select(
    values: NDArray[np.float32], floor: NDArray[np.float32], *, padding: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Packs the tokens of every row whose value reaches its floor.

    Args:
        values: (n, V) float32, contiguous.
        floor: (n,) reached by at least one token of each row.
        padding: Value of places that are left over.

    Returns:
        Ids, rising, and values, each (n, C), where C is the largest number of a row.
    """
    num_rows, vocab_size = values.shape
    flat = true_positions(values >= floor[:, np.newaxis])
    starts = np.searchsorted(flat, np.arange(num_rows + 1) * vocab_size)  # of each row's tokens among `flat`
    found = np.diff(starts)
    rows = np.repeat(np.arange(num_rows), found)
    width = int(found.max())
    places = np.arange(len(flat)) + np.repeat(np.arange(num_rows) * width - starts[:-1], found)
    ids = np.zeros((num_rows, width), np.int64)
    selected = np.full((num_rows, width), padding, np.float32)
    ids.reshape(-1)[places] = flat - rows * vocab_size
    selected.reshape(-1)[places] = values.reshape(-1)[flat]
    return ids, selected


def true_positions(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns `np.flatnonzero(flags)`, faster where few of them are set: flags are looked at eight at a time.

    Args:
        flags: Contiguous, of any shape.
    """
    flat = flags.ravel()
    num_packed = len(flat) // _WORD_BYTES * _WORD_BYTES
    words = flat[:num_packed].view(np.uint64)
    found = np.flatnonzero(words != 0)  # of booleans it is fast
    inner = np.flatnonzero(words[found].view(np.bool_))
    positions = (found[inner >> _WORD_SHIFT] << _WORD_SHIFT) + (inner & (_WORD_BYTES - 1))
    rest = np.flatnonzero(flat[num_packed:]) + num_packed
    return np.concatenate([positions, rest]) if rest.size else positions
