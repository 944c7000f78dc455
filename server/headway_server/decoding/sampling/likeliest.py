"""The likeliest tokens of every row, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

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


_BLOCK_TOKENS = 2**18
"""Logits of a block: 1 MiB, beside as much for their exponentials."""
_TOKENS_PER_RANKED_GROUP = 32  # more groups take longer to partition, fewer leave more tokens to look at
_GROUPS_PER_CANDIDATE = 4
_MODERATE = np.float32(60)
"""Where the largest logit is no further from 0, a row's exponentials are summed as they are: no sum of millions of them
leaves float32, and none that counts beside the largest is lost."""


@dataclass(frozen=True, slots=True)
class RankedRows:
    """What may follow in each row."""

    token_ids: NDArray[np.int64]
    """(R, C), by falling log-probability; the lower id first among equals."""
    log_probabilities: NDArray[np.float64]
    """(R, C) of the model's own distribution; minus infinity for banned tokens."""
    normalizers: NDArray[np.float64]
    """(R,) log sum exp of the logits; not finite where the logits mean nothing."""
    logits: NDArray[np.float32]
    """(R, V) that were ranked; minus infinity for banned tokens."""

    def log_probability(self, row: int, token_id: int) -> float:
        """Returns that of any token."""
        return float(self.logits[row, token_id] - self.normalizers[row])


class RowRanker:
    """Ranks rows."""

    def __init__(self, *, num_rows: int, vocab_size: int) -> None:
        """Makes room for the exponentials of a block.

        Args:
            num_rows: Most rows that there will be.
            vocab_size: V.
        """
        self._block_rows = max(1, min(num_rows, _BLOCK_TOKENS // vocab_size))
        self._weights: NDArray[np.float32] = np.empty((self._block_rows, vocab_size), np.float32)

    def __repr__(self) -> str:
        return f"RowRanker({self._block_rows} of {self._weights.shape[1]} tokens at a time)"

    def rank(self, logits: NDArray[np.float32], count: int, banned: Mapping[int, AbstractSet[int]]) -> RankedRows:
        """Ranks the tokens of each row.

        Args:
            logits: (R, V) float32, contiguous; banned tokens become minus infinity there.
            count: C, 1 to V.
            banned: By row, the tokens that may not follow.
        """
        num_rows, vocab_size = logits.shape
        num_groups = max(_GROUPS_PER_CANDIDATE * count, vocab_size // _TOKENS_PER_RANKED_GROUP)
        token_ids = np.empty((num_rows, count), np.int64)
        values = np.empty((num_rows, count), np.float32)
        normalizers = np.empty(num_rows)
        with np.errstate(invalid="ignore", under="ignore"):
            for start in range(0, num_rows, self._block_rows):
                rows = slice(start, min(start + self._block_rows, num_rows))
                block = logits[rows]
                maxima = _group_maxima(block, num_groups)  # (n, G)
                normalizers[rows] = self._normalizers(block, maxima)
                for row in range(rows.start, rows.stop) if banned else ():
                    if row in banned:
                        logits[row, list(banned[row])] = -np.inf
                        maxima[row - start] = _group_maxima(logits[row : row + 1], num_groups)[0]
                token_ids[rows], values[rows] = _largest(block, maxima, count)
        return RankedRows(token_ids, values - normalizers[:, np.newaxis], normalizers, logits)

    def _normalizers(self, block: NDArray[np.float32], maxima: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns log sum exp of each row (n,)."""
        largest = maxima.max(axis=1)
        rest = block[:, _num_grouped(block, maxima) :]
        if rest.size:
            largest = np.maximum(largest, rest.max(axis=1))
        weights = self._weights[: len(block)]
        shift = np.where(np.abs(largest) < _MODERATE, np.float32(0), largest)  # whether is a row's own affair
        if shift.any():
            np.subtract(block, shift[:, np.newaxis], out=weights)
            block = weights
        np.exp(block, out=weights)
        normalizers: NDArray[np.float64] = shift + np.log(weights.sum(axis=1).astype(np.float64))
        return normalizers


def _group_maxima(block: NDArray[np.float32], num_groups: int) -> NDArray[np.float32]:
    """Returns the largest logit of each group, (n, G); of V groups where they would have one token each."""
    depth = block.shape[1] // num_groups
    if depth <= 1:
        return block.copy()
    grouped: NDArray[np.float32] = block[:, : depth * num_groups].reshape(len(block), depth, num_groups).max(axis=1)
    return grouped


def _num_grouped(block: NDArray[np.float32], maxima: NDArray[np.float32]) -> int:
    """Returns how many tokens are in groups; the few others come after them."""
    num_groups: int = maxima.shape[1]
    num_tokens: int = block.shape[1]
    return num_tokens // num_groups * num_groups


def _largest(
    block: NDArray[np.float32], maxima: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns ids and logits (n, C) of the largest of each row, by falling logit, the lower id first among equals."""
    num_grouped, num_groups = _num_grouped(block, maxima), maxima.shape[1]
    groups = np.argpartition(maxima, num_groups - count, axis=1)[:, num_groups - count :]  # (n, C)
    members = np.arange(0, num_grouped, num_groups)
    candidates = (groups[:, :, np.newaxis] + members).reshape(len(block), -1)
    if num_grouped < block.shape[1]:
        others = np.arange(num_grouped, block.shape[1])
        candidates = np.concatenate([candidates, np.broadcast_to(others, (len(block), len(others)))], axis=1)
    values = np.take_along_axis(block, candidates, axis=1)
    chosen = np.argpartition(values, values.shape[1] - count, axis=1)[:, values.shape[1] - count :]  # (n, C)
    token_ids, largest = np.take_along_axis(candidates, chosen, axis=1), np.take_along_axis(values, chosen, axis=1)
    order = np.lexsort((token_ids, -largest), axis=1)
    token_ids, largest = np.take_along_axis(token_ids, order, axis=1), np.take_along_axis(largest, order, axis=1)
    least = largest[:, -1:]
    # Where others equal the least, it may have been chosen by chance and not by its id, from these groups or others.
    is_tied = ((values >= least).sum(axis=1) > count) | ((maxima >= least).sum(axis=1) > count)
    if is_tied.any():
        tied = np.flatnonzero(is_tied)
        token_ids[tied], largest[tied] = top_candidates(block[tied], np.full(len(tied), count))
    return token_ids, largest
