"""Whether a training fits into the machine, and about how fast it will be, told before it begins."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway_training.errors import RecipeError
from headway_training.footprint import Footprint, in_units, measure_footprint
from headway_training.hardware import available_bytes, matrix_flops
from headway_training.models import NAMED_CONFIGURATIONS, AttentionKind, build_model
from headway_training.recipes import Recipe
from headway_training.tasks import Task
from headway_training.tasks.base import TrainingBatch

WARM_UP_PASSES = 3
WARM_UP_S = 5.0
"""Time that passes over a first batch may take together; where they would take longer, the speed is estimated."""
_SAMPLED_BATCHES = 8
_PLENTY = 10
"""Times what a training needs: in blocks that are kept and do not fit, the translation recipe held seven times that."""
_ESTIMATED_SHARE = 0.5
"""Of the matrix throughput, what a training of large matrices reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What a training needs and will do."""

    footprint: Footprint
    batch: TrainingBatch
    """The largest of the first batches."""
    available_bytes: int | None
    """Memory there is; None if unknown."""

    @property
    def flops_per_unit(self) -> float:
        """Floating-point operations of matrix products for a token or an image, padding included."""
        return self.footprint.step_flops / max(1, self.batch.num_units)

    @property
    def leaves_room(self) -> bool:
        """Whether memory is so plentiful that none need be given back between two steps."""
        return self.available_bytes is not None and self.available_bytes >= _PLENTY * self.footprint.total_bytes

    def describe(self) -> str:
        """Memory that is needed and there."""
        there = f", of {in_units(self.available_bytes)} there is" if self.available_bytes is not None else ""
        return f"memory: {self.footprint.describe()}{there} (estimate)"


def attention_kind(device: torch.device) -> AttentionKind:
    """On CPU, the backward pass of torch's fused attention takes half of a step: plain operators are faster."""
    return "fused" if device.type == "cuda" else "plain"


def size_up(recipe: Recipe, task: Task, seed: int, device: torch.device) -> Sizing:
    """Counts what a training needs.

    Raises:
        RecipeError: It is more than the memory there is; names the largest named configuration that fits.
        ValueError: The model's configuration is not a valid one.
    """
    batch = _largest_batch(task, seed)
    footprint = _footprint(recipe, recipe.model, task, batch.tensors, device)
    sizing = Sizing(footprint=footprint, batch=batch, available_bytes=available_bytes(device))
    if sizing.available_bytes is not None and footprint.total_bytes > sizing.available_bytes:
        raise RecipeError(
            f"{recipe.name} with {footprint.parameter_count:,} parameters needs about {footprint.describe()}, "
            f"and there is {in_units(sizing.available_bytes)}. {_advice(recipe, task, sizing, device)}"
        )
    return sizing


def _largest_batch(task: Task, seed: int) -> TrainingBatch:
    """The one with the largest tensors among the first."""
    batches = task.epoch_batches(seed, 0)[:_SAMPLED_BATCHES]
    if not batches:
        raise RecipeError("the training data makes no batch: it is too small for the recipe's model.max_length")
    made = [task.collate(batch, torch.Generator().manual_seed(seed)) for batch in batches]
    return max(made, key=lambda one: max(tensor.numel() for tensor in one.tensors.values()))


def _footprint(
    recipe: Recipe, model: Mapping[str, object], task: Task, tensors: Mapping[str, Tensor], device: torch.device
) -> Footprint:
    fields = {name: value for name, value in model.items() if name != "architecture"}

    def make_model() -> nn.Module:
        architecture = str(model["architecture"])
        return build_model(architecture, {**fields, **task.model_fields()}, attention=attention_kind(device))

    return measure_footprint(
        make_model,
        lambda module, batch: task.loss(module, batch, recipe.optimization.label_smoothing),
        tensors,
        bf16=recipe.optimization.precision == "bf16",
        averaged=recipe.optimization.average_decay > 0,
        muon=recipe.optimization.optimizer == "muon",
    )


def _advice(recipe: Recipe, task: Task, sizing: Sizing, device: torch.device) -> str:
    """What fits: the batch of this model, and the largest named configuration of the architecture with this batch."""
    footprint, tensors, available = sizing.footprint, sizing.batch.tensors, sizing.available_bytes
    assert available is not None, "it is what was too small"
    fitting: dict[str, int] = {}
    for name, named in NAMED_CONFIGURATIONS.items():
        if named.architecture == recipe.model["architecture"]:
            values = {"architecture": named.architecture, **named.configuration.to_dict()}
            other = _footprint(recipe, values, task, _shortened(values, tensors), device)
            if other.total_bytes <= available:
                fitting[name] = other.parameter_count
    advice = ["No named size fits at this batch"]
    if fitting:
        largest = max(fitting, key=fitting.__getitem__)
        advice = [f"The largest named size that fits is {largest}: take it with --model {largest}"]
    left = available - (footprint.total_bytes - footprint.activation_bytes)
    share = left / max(1, footprint.activation_bytes)
    if share * len(next(iter(tensors.values()))) >= 1:  # one row fits
        advice.append(f"or set optimization.batch_size or batch_tokens to {share:.0%} of what it is")
    return "; ".join(advice)


def _shortened(values: Mapping[str, object], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch of texts, (B, T) each, cut to the positions that a configuration has."""
    limits = [int(str(value)) for name, value in values.items() if name.startswith("max_") and name.endswith("length")]
    return {name: one[:, : min(limits)] if limits and one.ndim == 2 else one for name, one in tensors.items()}


def expected_throughput(sizing: Sizing, loss: nn.Module, *, bf16: bool, device: torch.device) -> tuple[float, str]:
    """About how many units a second will be trained on, and how that is known.

    A few forward and backward passes over a batch are timed, without the optimizer's part; a model of which they would
    take longer than `WARM_UP_S` is estimated from the matrix throughput of the machine. Weights and random numbers
    are left as they are, gradients are cleared.

    Args:
        sizing: Of the training.
        loss: Tensors of a batch -> the summed loss, as it is trained.
        bf16: Whether matrix products run in bf16.
        device: Where.
    """
    flops = matrix_flops(device, bf16=bf16)
    if WARM_UP_PASSES * sizing.footprint.step_flops / flops > WARM_UP_S:
        rate = _ESTIMATED_SHARE * flops / sizing.flops_per_unit
        return rate, f"estimated: {_ESTIMATED_SHARE:.0%} of the {flops / 1e9:,.0f} GFLOP/s of matrix products here"
    tensors = {name: tensor.to(device) for name, tensor in sizing.batch.tensors.items()}
    state = torch.random.get_rng_state()
    best_s, spent_s, passes = float("inf"), 0.0, 0
    while passes < WARM_UP_PASSES and spent_s < WARM_UP_S:
        start_s = time.perf_counter()
        loss(tensors).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        duration_s = time.perf_counter() - start_s
        best_s, spent_s, passes = min(best_s, duration_s), spent_s + duration_s, passes + 1
    loss.zero_grad(set_to_none=True)
    torch.random.set_rng_state(state)
    return sizing.batch.num_units / best_s, f"measured over {passes} passes, without the optimizer"
