"""The order of examples: which indices make which batch, as a function of seed and epoch alone.

So a resumed run sees the same batches as an unbroken one without anything being stored. N examples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Batch = NDArray[np.int64]
"""Indices of examples."""

POOL_BATCHES = 50
"""Batches' worth of examples that are sorted by length together: enough that little is padded, few enough that the
batches differ from epoch to epoch."""


def even_batches(count: int, batch_size: int, *, seed: int, epoch: int) -> list[Batch]:
    """Cuts a random order of `count` examples into batches of `batch_size`; the last one may be smaller."""
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return [order[start : start + batch_size] for start in range(0, count, batch_size)]


def bucketed_batches(lengths: Sequence[int], batch_tokens: int, *, seed: int, epoch: int) -> list[Batch]:
    """Cuts examples into batches of similar length, in random order; every example comes once an epoch.

    Args:
        lengths: Tokens of each example.
        batch_tokens: Bound of longest x count of a batch; an example that is longer is a batch of its own.
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
    """
    generator = np.random.default_rng((seed, epoch))
    sizes = np.asarray(lengths, dtype=np.int64)
    order = generator.permutation(len(sizes))
    pool_size = max(1, round(POOL_BATCHES * batch_tokens / max(1.0, float(sizes.mean()))))
    batches: list[Batch] = []
    for start in range(0, len(order), pool_size):
        pool = order[start : start + pool_size]
        batches += _cut(pool[np.argsort(sizes[pool], kind="stable")], sizes, batch_tokens)
    return [batches[i] for i in generator.permutation(len(batches))]


def _cut(ordered: Batch, sizes: NDArray[np.int64], batch_tokens: int) -> list[Batch]:
    """Cuts examples that ascend in length where the next one would break the bound."""
    batches, start = [], 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or sizes[ordered[end]] * (end - start + 1) > batch_tokens:
            batches.append(ordered[start:end])
            start = end
    return batches


def sorted_batches(lengths: Sequence[int], batch_tokens: int) -> list[Batch]:
    """Cuts examples into batches of similar length for evaluation, the longest first."""
    sizes = np.asarray(lengths, dtype=np.int64)
    return _cut(np.argsort(sizes, kind="stable"), sizes, batch_tokens)[::-1]
