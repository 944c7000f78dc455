"""Exponential moving average of the weights: smoother, and often better, than the last ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """Follows the trainable weights of a model.

    Args:
        model: The model; a tied weight is followed once.
        decay: Share of the average that a step keeps; less in the first steps, so that the start is forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = dict(model.named_parameters())
        self.tensors = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def __repr__(self) -> str:
        return f"WeightAverage(decay={self.decay}, tensors={len(self.tensors)})"

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights as they are after step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        current = [weight.detach() for weight in self._weights.values()]
        torch._foreach_lerp_(list(self.tensors.values()), current, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the average into the model, and the model's own weights back at the end."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            own = weight.detach().clone()
            weight.copy_(self.tensors[name])
            self.tensors[name].copy_(own)
