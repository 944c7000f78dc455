"""The order of examples: which of them make the batch of each optimizer step.

It is a function of seed and step alone, so a resumed run sees the batches of an unbroken one and nothing is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headway_training.errors import DataError
from headway_training.recipes import OptimizationSettings

Batch = NDArray[np.int64]
"""Indices of examples."""

POOL_BATCHES = 50
"""Batches' worth of examples that are sorted by length together: enough that little is padded, few enough that the
batches differ from epoch to epoch."""


class StepPlan:
    """Lays the batches of all epochs end to end.

    Args:
        epoch_batches: Seed and number of an epoch -> its batches.
        settings: How many epochs and steps.
        seed: Seed of the run.
    """

    def __init__(
        self, epoch_batches: Callable[[int, int], list[Batch]], settings: OptimizationSettings, seed: int
    ) -> None:
        self._epoch_batches = epoch_batches
        self._seed = seed
        self._epoch = -1
        self._batches: list[Batch] = []
        self._starts = [0]  # first step of each epoch; the last entry is the end
        for epoch in range(math.ceil(settings.epochs)):
            share = min(1.0, settings.epochs - epoch)
            self._starts.append(self._starts[-1] + math.ceil(len(self._of_epoch(epoch)) * share))
            if settings.max_steps and self._starts[-1] >= settings.max_steps:
                break
        self.num_steps = min(self._starts[-1], settings.max_steps or self._starts[-1])
        if self.num_steps == 0:
            raise DataError("the training data makes no batch: it is too small for the recipe's model.max_length")

    def __repr__(self) -> str:
        return f"StepPlan(num_steps={self.num_steps}, epochs={self.epochs_at(self.num_steps):.2f})"

    def batch(self, step: int) -> Batch:
        """The examples of step `step`, counted from 0."""
        epoch = int(np.searchsorted(self._starts, step, side="right")) - 1
        return self._of_epoch(epoch)[step - self._starts[epoch]]

    def epochs_at(self, step: int) -> float:
        """Passes over the data that `step` steps make."""
        epoch = min(int(np.searchsorted(self._starts, step, side="right")) - 1, len(self._starts) - 2)
        return epoch + (step - self._starts[epoch]) / len(self._of_epoch(epoch))

    def generator(self, step: int) -> torch.Generator:
        """Random numbers for the changes to the examples of a step."""
        return torch.Generator().manual_seed(step_seed(self._seed, step, 0))

    def evaluation_steps(self, evaluations: int) -> frozenset[int]:
        """Numbers of the steps after which the model is validated; the last step is one of them."""
        return frozenset(max(1, round(self.num_steps * (i + 1) / evaluations)) for i in range(evaluations))

    def _of_epoch(self, epoch: int) -> list[Batch]:
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._epoch_batches(self._seed, epoch)
        return self._batches


def step_seed(seed: int, step: int, stream: int) -> int:
    """A seed of its own for every step and stream: stream 0 changes examples, the others are each process's dropout."""
    return int(np.random.SeedSequence((seed, step, stream)).generate_state(1)[0])


def even_batches(
    count: int, batch_size: int, lengths: Sequence[int] | None = None, *, seed: int, epoch: int
) -> list[Batch]:
    """Cuts a random order of `count` examples into batches of `batch_size`; one may be smaller.

    With `lengths`, the tokens of each, examples of similar length come together.
    """
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(count)
    if lengths is None:
        return [order[start : start + batch_size] for start in range(0, count, batch_size)]
    sizes, pool_size, batches = np.asarray(lengths, dtype=np.int64), POOL_BATCHES * batch_size, list[Batch]()
    for start in range(0, count, pool_size):
        pool = order[start : start + pool_size]
        pool = pool[np.argsort(sizes[pool], kind="stable")]
        batches += [pool[first : first + batch_size] for first in range(0, len(pool), batch_size)]
    return [batches[i] for i in generator.permutation(len(batches))]


def bucketed_batches(lengths: Sequence[int], batch_tokens: int, *, seed: int, epoch: int) -> list[Batch]:
    """Cuts examples into batches of similar length, in random order; every example comes once an epoch.

    Args:
        lengths: Tokens of each example.
        batch_tokens: Bound of longest x count of a batch; a longer example is a batch of its own.
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


def sorted_batches(lengths: Sequence[int], batch_tokens: int) -> list[Batch]:
    """Cuts examples into batches of similar length for evaluation, the longest first."""
    sizes = np.asarray(lengths, dtype=np.int64)
    return _cut(np.argsort(sizes, kind="stable"), sizes, batch_tokens)[::-1]


def _cut(ordered: Batch, sizes: NDArray[np.int64], batch_tokens: int) -> list[Batch]:
    """Cuts examples of ascending length before each one that would break the bound."""
    batches, start = [], 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or sizes[ordered[end]] * (end - start + 1) > batch_tokens:
            batches.append(ordered[start:end])
            start = end
    return batches
