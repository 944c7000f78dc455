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
Lengths = Sequence[int] | NDArray[np.int64]
"""Tokens of each example."""

POOL_BATCHES = 50
"""Batches' worth of examples that are sorted by length together: enough that little is padded, few enough that the
batches differ from epoch to epoch."""


class StepPlan:
    """Lays the batches of all epochs end to end. Of each epoch the batches are counted first, and made when it comes.

    Args:
        num_batches: Seed and number of an epoch -> how many batches it has.
        epoch_batches: Seed and number of an epoch -> its batches.
        settings: How many epochs, steps and validations.
        seed: Seed of the run.
    """

    def __init__(
        self,
        num_batches: Callable[[int, int], int],
        epoch_batches: Callable[[int, int], list[Batch]],
        settings: OptimizationSettings,
        seed: int,
    ) -> None:
        self._epoch_batches = epoch_batches
        self._seed = seed
        self._epoch = -1
        self._batches: list[Batch] = []
        self._counts: list[int] = []  # batches of each epoch, whole
        self._starts = [0]  # first step of each epoch; the last entry is the end
        for epoch in range(math.ceil(settings.epochs)):
            share = min(1.0, settings.epochs - epoch)
            self._counts.append(num_batches(seed, epoch))
            self._starts.append(self._starts[-1] + math.ceil(self._counts[-1] * share))
            if settings.max_steps and self._starts[-1] >= settings.max_steps:
                break
        self.num_steps = min(self._starts[-1], settings.max_steps or self._starts[-1])
        if self.num_steps == 0:
            raise DataError("the training data makes no batch: it is too small for the recipe's model.max_length")
        count = settings.evaluations
        self.evaluation_steps = frozenset(max(1, round(self.num_steps * (i + 1) / count)) for i in range(count))
        """Numbers of the steps after which the model is validated; the last step is one of them."""

    def __repr__(self) -> str:
        return f"StepPlan(num_steps={self.num_steps}, epochs={self.epochs_at(self.num_steps):.2f})"

    def batch(self, step: int) -> Batch:
        """The examples of step `step`, counted from 0."""
        epoch = self._epoch_of(step)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._epoch_batches(self._seed, epoch)
            assert len(self._batches) == self._counts[epoch], f"epoch {epoch} was counted otherwise than it is"
        return self._batches[step - self._starts[epoch]]

    def epochs_at(self, step: int) -> float:
        """Passes over the data that `step` steps make."""
        epoch = min(self._epoch_of(step), len(self._counts) - 1)
        return epoch + (step - self._starts[epoch]) / self._counts[epoch]

    def generator(self, step: int) -> torch.Generator:
        """Random numbers for the changes to the examples of a step."""
        return torch.Generator().manual_seed(step_seed(self._seed, step, 0))

    def _epoch_of(self, step: int) -> int:
        return int(np.searchsorted(self._starts, step, side="right")) - 1


def step_seed(seed: int, step: int, stream: int) -> int:
    """A seed of its own for every step and stream: stream 0 changes examples, the others are each process's dropout."""
    return int(np.random.SeedSequence((seed, step, stream)).generate_state(1)[0])


def even_batches(count: int, batch_size: int, lengths: Lengths | None = None, *, seed: int, epoch: int) -> list[Batch]:
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


def bucketed_batches(lengths: Lengths, batch_tokens: int, *, seed: int, epoch: int) -> list[Batch]:
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
    batches: list[Batch] = []
    for pool in _pools(order, sizes, batch_tokens):
        ordered = pool[np.argsort(sizes[pool], kind="stable")]
        batches += _cut(ordered, sizes[ordered], batch_tokens)
    return [batches[i] for i in generator.permutation(len(batches))]


def count_bucketed(lengths: Lengths, batch_tokens: int, *, seed: int, epoch: int) -> int:
    """Counts the batches of `bucketed_batches` without making them."""
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.random.default_rng((seed, epoch)).permutation(len(sizes))
    return sum(len(_ends(np.sort(sizes[pool]), batch_tokens)) for pool in _pools(order, sizes, batch_tokens))


def sorted_batches(lengths: Lengths, batch_tokens: int) -> list[Batch]:
    """Cuts examples into batches of similar length for evaluation, the longest first."""
    sizes = np.asarray(lengths, dtype=np.int64)
    ordered = np.argsort(sizes, kind="stable")
    return _cut(ordered, sizes[ordered], batch_tokens)[::-1]


def _pools(order: Batch, sizes: NDArray[np.int64], batch_tokens: int) -> list[Batch]:
    """Cuts an order of examples into those that are sorted together."""
    pool_size = max(1, round(POOL_BATCHES * batch_tokens / max(1.0, float(sizes.mean()))))
    return [order[start : start + pool_size] for start in range(0, len(order), pool_size)]


def _cut(ordered: Batch, sizes: NDArray[np.int64], batch_tokens: int) -> list[Batch]:
    """Cuts examples, whose sizes ascend, before each one that would break the bound."""
    return np.split(ordered, _ends(sizes, batch_tokens)[:-1])


def _ends(sizes: NDArray[np.int64], batch_tokens: int) -> list[int]:
    """Where the batches of examples with ascending sizes end."""
    ends, start = list[int](), 0
    while start < len(sizes):
        most = max(1, batch_tokens // max(1, int(sizes[start])))  # none that comes later is shorter
        coming = sizes[start : start + most]
        padded = coming * np.arange(1, len(coming) + 1)
        start += max(1, int(np.searchsorted(padded, batch_tokens, side="right")))
        ends.append(start)
    return ends
