"""Which batch each optimizer step takes: a function of the seed alone, so that a resumed run goes on where it was."""

from __future__ import annotations

import math

import numpy as np
import torch

from headway_training.batches import Batch
from headway_training.errors import DataError
from headway_training.recipes.settings import OptimizationSettings
from headway_training.tasks.base import Task


class StepPlan:
    """Lays the batches of all epochs end to end.

    Args:
        task: Where batches come from.
        settings: How many epochs and steps.
        seed: Seed of the run.
    """

    def __init__(self, task: Task, settings: OptimizationSettings, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._epoch = -1
        self._batches: list[Batch] = []
        self._starts = [0]  # first step of each epoch; the last entry is the end
        for epoch in range(math.ceil(settings.epochs)):
            count = len(task.epoch_batches(seed, epoch))
            share = min(1.0, settings.epochs - epoch)
            self._starts.append(self._starts[-1] + math.ceil(count * share))
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
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._task.epoch_batches(self._seed, epoch)
        return self._batches[step - self._starts[epoch]]

    def epochs_at(self, step: int) -> float:
        """Passes over the data that `step` steps make."""
        epoch = min(int(np.searchsorted(self._starts, step, side="right")) - 1, len(self._starts) - 2)
        count = len(self._task.epoch_batches(self._seed, epoch))
        return epoch + (step - self._starts[epoch]) / count

    def generator(self, step: int) -> torch.Generator:
        """Random numbers that change the examples of a step."""
        return torch.Generator().manual_seed(step_seed(self._seed, step, 0))

    def evaluation_steps(self, evaluations: int) -> frozenset[int]:
        """Numbers of steps after which the model is validated, the last one among them."""
        return frozenset(max(1, round(self.num_steps * (i + 1) / evaluations)) for i in range(evaluations))


def step_seed(seed: int, step: int, stream: int) -> int:
    """A seed of its own for every step and stream; streams are the examples (0) and each process's dropout (1 on)."""
    return int(np.random.SeedSequence((seed, step, stream)).generate_state(1)[0])
