"""The most likely tokens of every row at once, without sorting the vocabulary.

Shapes: n rows, V vocabulary, C candidates, G groups of tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GROUPS_PER_CANDIDATE = 4
_TOKENS_PER_GROUP = 24  # more groups take longer to partition, fewer are passed over more often
_WORD_BYTES = 8


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
    flat = true_positions(values >= floor[:, np.newaxis])
    rows, columns = np.divmod(flat, values.shape[1])
    found = np.bincount(rows, minlength=len(values))
    places = np.arange(len(flat)) - (np.cumsum(found) - found)[rows]
    ids = np.zeros((len(values), int(found.max())), np.int64)
    selected = np.full(ids.shape, padding, np.float32)
    ids[rows, places] = columns
    selected[rows, places] = values.ravel()[flat]
    return ids, selected


def true_positions(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns `np.flatnonzero(flags)`, faster where few of them are set: flags are looked at eight at a time.

    Args:
        flags: Contiguous, of any shape.
    """
    flat = flags.ravel()
    num_words = len(flat) // _WORD_BYTES
    packed = flat[: num_words * _WORD_BYTES]
    words = np.flatnonzero(packed.view(np.uint64) != 0)  # of booleans it is fast
    inner = np.flatnonzero(packed.reshape(num_words, _WORD_BYTES)[words])
    positions = words[inner // _WORD_BYTES] * _WORD_BYTES + inner % _WORD_BYTES
    rest = np.flatnonzero(flat[len(packed) :]) + len(packed)
    return np.concatenate([positions, rest])
