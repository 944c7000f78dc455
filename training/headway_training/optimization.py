"""How the weights are found: optimizers, learning rate, average of the weights, and activation checkpointing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from headway_training.errors import RecipeError
from headway_training.positions import position_tables
from headway_training.recipes import OptimizationSettings

_STACKS = ("layers", "layer", "h", "blocks")
"""Names that lists of layers have: here, and in the models of `transformers`."""
_IN_LAYER = re.compile(rf"(^|\.)({'|'.join(_STACKS)})\.\d+\.")


def make_optimizers(model: nn.Module, settings: OptimizationSettings) -> list[Optimizer]:
    """Makes the optimizers of a model's weights: AdamW, and Muon for the matrices of its layers where it is asked for.

    Matrices are decayed; vectors and position tables are not.

    Raises:
        RecipeError: Muon is asked for, and no layer has a matrix.
    """
    layers = layer_matrices(model) if settings.optimizer == "muon" else {}
    tables = position_tables(model)
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or name in layers:
            continue
        (kept if parameter.ndim < 2 or name in tables else decayed).append(parameter)
    if settings.optimizer == "muon" and not layers:
        raise RecipeError(
            "optimization.optimizer is 'muon', which is for the matrices of layers, and the model has none that is "
            "trained: set it to 'adamw'"
        )
    rate, decay = settings.learning_rate, settings.weight_decay
    groups = [{"params": decayed, "weight_decay": decay}, {"params": kept, "weight_decay": 0.0}]
    betas = (settings.beta1, settings.beta2)
    optimizers: list[Optimizer] = [AdamW(groups, lr=rate, betas=betas, eps=settings.epsilon, fused=True)]
    if layers:
        optimizers.append(Muon(list(layers.values()), lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def layer_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained weights that Muon is for, by name: matrices within a layer, neither embeddings nor output projections."""
    tables = position_tables(model)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and parameter.requires_grad and _IN_LAYER.search(name) and name not in tables
    }


def learning_rate(settings: OptimizationSettings, step: int, num_steps: int) -> float:
    """The learning rate of step `step` of `num_steps`, counted from 0.

    It rises linearly over the warm-up, and falls like half a cosine to 0 (Loshchilov and Hutter 2017).
    """
    warmup = max(1, round(settings.warmup_fraction * num_steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return settings.learning_rate * (1 + math.cos(math.pi * progress)) / 2


def make_average(model: nn.Module, decay: float) -> AveragedModel | None:
    """Makes an exponential moving average of a model's weights; None where `decay` is 0.

    In the first steps the decay is less, so that the start is forgotten.
    """

    def update(averages: Sequence[Tensor], weights: Sequence[Tensor], num_averaged: Tensor | int) -> None:
        step = int(num_averaged)
        move = get_ema_multi_avg_fn(min(decay, (1 + step) / (10 + step)))  # type: ignore[no-untyped-call] # torch's
        move(list(averages), list(weights), step)

    return AveragedModel(model, multi_avg_fn=update) if decay else None


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: the members of every `nn.ModuleList` called `layers` or the like."""
    stacks = (module for name, module in model.named_modules() if name.rpartition(".")[2] in _STACKS)
    return [layer for stack in stacks if isinstance(stack, nn.ModuleList) for layer in stack]


def checkpoint_activations(model: nn.Module) -> None:
    """Has every layer's activations computed anew in the backward pass (Chen et al. 2016), dropout as it was.

    Raises:
        ValueError: The model has no layers.
    """
    layers = layers_of(model)
    if not layers:
        raise ValueError("activation_checkpointing: the model has no layers to compute anew; turn it off")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
