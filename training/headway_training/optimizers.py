"""The optimizers a recipe can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from headway_training.recipes.settings import OptimizationSettings


def make_optimizer(model: nn.Module, settings: OptimizationSettings) -> Optimizer:
    """Makes the optimizer of a recipe for a model's weights.

    Matrices are decayed; vectors and position tables are not. Every group's `lr` may be set before a step.
    """
    layers: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "positions" in name:
            kept.append(parameter)
        elif settings.optimizer == "muon" and is_layer_matrix(name, parameter):
            layers.append(parameter)
        else:
            decayed.append(parameter)
    adamw = AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
    if not layers:
        return adamw
    muon = Muon(layers, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
    return JoinedOptimizer(muon, adamw)


def is_layer_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a weight is what Muon is for: a matrix within a layer, neither an embedding nor an output projection."""
    return parameter.ndim == 2 and "layers." in name and "positions" not in name


class JoinedOptimizer(Optimizer):
    """Several optimizers, each of weights of its own, as one: it has the groups and the state of all."""

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        self._share()

    def __repr__(self) -> str:
        return f"JoinedOptimizer({', '.join(type(part).__name__ for part in self._parts)})"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Takes a step of every part; there is no closure."""
        if closure is not None:
            raise ValueError("a joined optimizer takes no closure")
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Gives the parts this one's groups and state, so that there is one of each."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
