"""What a run needs of the machine, counted before it allocates anything: memory, arithmetic, and the expected speed.

Everything is counted on a model and a batch of torch's `meta` device, whose tensors have shapes and no storage. With P
parameters: weights 4 P bytes (6 P under bf16, with the copies that matrix products read), gradients 4 P, AdamW's
moments 8 P (4 bytes of each weight that is Muon's), the average of the weights 4 P. Activations are the distinct
tensors, other than weights, that autograd keeps of one forward pass, in fp32; bf16 takes nearly as much, as casts are
kept beside the halved tensors. Temporary memory of single operations is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from headway_training.checkpoint import HUGGINGFACE
from headway_training.errors import RecipeError
from headway_training.hardware import available_bytes, matrix_flops
from headway_training.models import NAMED_CONFIGURATIONS, AttentionKind, count_parameters
from headway_training.optimization import layer_matrices, layers_of
from headway_training.recipes import OptimizationSettings, Recipe
from headway_training.tasks import Task, TrainingBatch

if TYPE_CHECKING:
    from headway_training.huggingface import ModelFolder

WARM_UP_PASSES = 3
"""Passes over a first batch whose time is measured, at least; the one before them is slow."""
WARM_UP_S = 5.0
"""Time that all passes may take together; if they would take longer, the speed is estimated."""
_LEAST_S = 0.1
"""Time of the measured passes, in which other work of the machine shows."""
_SAMPLED_BATCHES = 8
_PLENTY = 10
"""Times what a run needs: kept blocks that do not fit came to seven times that in the translation recipe."""
_LONGEST_PLAIN = 512
"""Tokens of a model whose attention trains in plain operators on a CPU."""
_ESTIMATED_SHARE = 0.5
"""Share of the matrix throughput that a training run of large matrices reaches."""

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one training step holds in memory and computes."""

    parameter_count: int
    """Trainable weights; a tied one counts once."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Moments, and the average of the weights where there is one."""
    activation_bytes: int
    """What the backward pass needs of the forward pass, of the rows that are worked through at once."""
    step_flops: int
    """Floating-point operations of the matrix products over those rows, forward and backward."""

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes

    def describe(self) -> str:
        """The parts and their sum, in words."""
        parts = (
            ("weights", self.weight_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("activations", self.activation_bytes),
        )
        return f"{' + '.join(f'{name} {in_units(size)}' for name, size in parts)} = {in_units(self.total_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What a run needs, and what there is."""

    footprint: Footprint
    batch: TrainingBatch
    """The rows that are worked through at once, of the largest of the first batches."""
    available_bytes: int

    @property
    def flops_per_unit(self) -> float:
        """Floating-point operations of matrix products for a token or an image, padding included."""
        return self.footprint.step_flops / max(1, self.batch.num_units)

    @property
    def leaves_room(self) -> bool:
        """True if memory is so plentiful that none need be given back between two steps."""
        return self.available_bytes >= _PLENTY * self.footprint.total_bytes

    def describe(self) -> str:
        """Memory that is needed and available."""
        return f"memory: {self.footprint.describe()} of {in_units(self.available_bytes)} available (estimate)"


def attention_kind(device: torch.device, model: Mapping[str, Any]) -> AttentionKind:
    """The kernel that trains a recipe's model the fastest.

    Forward and backward on a core of an AMD EPYC, in bf16, causal: of 128 tokens plain operators take half of the time
    of torch's fused attention, of 256 and 512 1.1 and 1.3 times as long, of 1,024 and more twice (2026-11-24).
    """
    return "fused" if device.type == "cuda" or model.get("max_length", 0) > _LONGEST_PLAIN else "plain"


def size_up(recipe: Recipe, task: Task, seed: int, device: torch.device, source: ModelFolder | None = None) -> Sizing:
    """Counts what a run needs; `source` is the model folder that it starts from.

    Raises:
        RecipeError: It is more than the memory available; names the largest named configuration that fits.
        ValueError: The model's configuration is not a valid one.
    """
    batch = _largest_batch(recipe, task, seed)
    footprint = _footprint(recipe, recipe.model, task, batch.tensors, device, source=source)
    sizing = Sizing(footprint=footprint, batch=batch, available_bytes=available_bytes(device))
    if footprint.total_bytes > sizing.available_bytes:
        raise RecipeError(
            f"{recipe.name} with {footprint.parameter_count:,} parameters needs about {footprint.describe()}, "
            f"and {in_units(sizing.available_bytes)} are available. {_advice(recipe, task, sizing, device)}"
        )
    return sizing


def _largest_batch(recipe: Recipe, task: Task, seed: int) -> TrainingBatch:
    """The one with the largest tensors among the first, of which one accumulated part is taken."""
    batches = task.epoch_batches(seed, 0)[:_SAMPLED_BATCHES]
    if not batches:
        raise RecipeError("the training data makes no batch: it is too small for the recipe's model.max_length")
    made = [task.collate(batch, torch.Generator().manual_seed(seed)) for batch in batches]
    largest = max(made, key=lambda one: max(tensor.numel() for tensor in one.tensors.values()))
    parts = recipe.optimization.gradient_accumulation
    tensors = {name: tensor[::parts] for name, tensor in largest.tensors.items()}
    return TrainingBatch(tensors=tensors, num_units=max(1, largest.num_units // parts))


def _footprint(
    recipe: Recipe,
    model: Mapping[str, object],
    task: Task,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    *,
    source: ModelFolder | None = None,
) -> Footprint:
    def make_model() -> nn.Module:
        if source is not None:
            several = recipe.classification.multi_label
            empty = source.build(task.labels, multi_label=several, lora=recipe.lora, has_weights=False)
            return empty.use_attention(attention_kind(device, model))
        return task.wrap(task.build(model)).use_attention(attention_kind(device, model))

    def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return task.loss(module, batch, recipe.optimization.label_smoothing)

    return measure_footprint(make_model, loss, tensors, recipe.optimization)


def measure_footprint(
    make_model: Callable[[], nn.Module], loss: Loss, tensors: Mapping[str, Tensor], settings: OptimizationSettings
) -> Footprint:
    """Counts what a step needs, as the head of this module says.

    Args:
        make_model: Builds the model, with its attention; called on the `meta` device.
        loss: Loss of a model on a batch.
        tensors: A batch of the size that is worked through at once.
        settings: Precision, optimizer, average of the weights, activation checkpointing.
    """
    with torch.device("meta"):
        model = make_model().train()
    batch = {name: tensor.to("meta") for name, tensor in tensors.items()}
    kept = _ActivationCounter(model, by_layer=settings.activation_checkpointing)
    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        loss(model, batch)
    count = count_parameters(model)
    whole = sum(parameter.numel() for parameter in model.parameters())
    of_muon = sum(one.numel() for one in layer_matrices(model).values()) if settings.optimizer == "muon" else 0
    # A backward pass has twice the matrix products of the forward pass, and checkpointing runs the latter once more.
    passes = 4 if settings.activation_checkpointing else 3
    return Footprint(
        parameter_count=count,
        weight_bytes=whole * (6 if settings.precision == "bf16" else 4),
        gradient_bytes=count * 4,
        optimizer_bytes=(count * (3 if settings.average_decay else 2) - of_muon) * 4,
        activation_bytes=kept.num_bytes,
        step_flops=passes * counter.get_total_flops(),
    )


class _ActivationCounter:
    """Adds up the storages that autograd keeps; weights are not counted.

    Args:
        model: The model.
        by_layer: Whether activations are computed anew layer by layer, so that inputs of all layers are kept and the
            rest of one layer at a time.
    """

    def __init__(self, model: nn.Module, *, by_layer: bool) -> None:
        self._held: list[torch.UntypedStorage] = [tensor.untyped_storage() for tensor in model.parameters()]
        self._seen = {storage._cdata for storage in self._held}  # noqa: SLF001 (torch gives meta storages no address)
        self._outside = self._largest_layer = self._layer = 0
        self._in_layer = False
        for layer in layers_of(model) if by_layer else ():
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave)

    @property
    def num_bytes(self) -> int:
        """What is kept at most."""
        return self._outside + self._largest_layer

    def pack(self, tensor: Tensor) -> Tensor:
        """Takes note of a tensor that is kept."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:  # noqa: SLF001 (as above)
            self._seen.add(storage._cdata)  # noqa: SLF001 (as above)
            self._held.append(storage)  # so that its number is not given to another
            if self._in_layer:
                self._layer += storage.nbytes()
            else:
                self._outside += storage.nbytes()
        return tensor

    def _enter(self, _layer: nn.Module, inputs: tuple[object, ...]) -> None:
        for tensor in inputs:
            if isinstance(tensor, Tensor):
                self.pack(tensor)
        self._in_layer, self._layer = True, 0

    def _leave(self, *_: object) -> None:
        self._in_layer, self._largest_layer = False, max(self._largest_layer, self._layer)


def _advice(recipe: Recipe, task: Task, sizing: Sizing, device: torch.device) -> str:
    """What fits: the batch of this model, and the largest named configuration of the architecture with this batch."""
    footprint, tensors, available = sizing.footprint, sizing.batch.tensors, sizing.available_bytes
    fitting: dict[str, int] = {}
    for name, named in NAMED_CONFIGURATIONS.items():
        if named.architecture == recipe.architecture:
            values = {"architecture": named.architecture, **named.configuration.to_dict()}
            other = _footprint(recipe, values, task, _shortened(values, tensors), device)
            if other.total_bytes <= available:
                fitting[name] = other.parameter_count
    advice = ["No named size fits at this batch"]
    if recipe.architecture == HUGGINGFACE:
        advice = ["Take a smaller model, or LoRA, with --set lora.rank=8"]
    if fitting:
        largest = max(fitting, key=fitting.__getitem__)
        advice = [f"The largest named size that fits is {largest}: take it with --model {largest}"]
    left = available - (footprint.total_bytes - footprint.activation_bytes)
    share = left / max(1, footprint.activation_bytes)
    if task.compares_rows:
        advice.append("or take smaller batches, with --set optimization.batch_size")
    elif share * len(next(iter(tensors.values()))) >= 1:  # one row fits
        parts = recipe.optimization.gradient_accumulation * max(2, round(1 / share + 0.5))
        advice.append(f"or work through a batch in parts, with --set optimization.gradient_accumulation={parts}")
    return "; ".join(advice)


def _shortened(values: Mapping[str, object], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch of texts, (B, T) each, cut to the positions that a configuration has."""
    limits = [int(str(value)) for name, value in values.items() if name.startswith("max_") and name.endswith("length")]
    return {name: one[:, : min(limits)] if limits and one.ndim == 2 else one for name, one in tensors.items()}


def expected_throughput(sizing: Sizing, loss: nn.Module, *, bf16: bool, device: torch.device) -> tuple[float, str]:
    """About how many units a second a process will train on, and how that is known.

    A few forward and backward passes over a batch are timed, without the optimizer's part; the speed is that of all of
    them. If they would take longer than `WARM_UP_S`, the speed is estimated from the matrix throughput of the machine.
    Weights, buffers and random numbers are left as they are, gradients are cleared.

    Args:
        sizing: Of the run.
        loss: Tensors of a batch -> the summed loss, as it is trained.
        bf16: Whether matrix products run in bf16.
        device: Where.
    """
    flops = matrix_flops(device, bf16=bf16)
    if WARM_UP_PASSES * sizing.footprint.step_flops / flops > WARM_UP_S:
        rate = _ESTIMATED_SHARE * flops / sizing.flops_per_unit
        return rate, f"estimated: {_ESTIMATED_SHARE:.0%} of the {flops / 1e9:,.0f} GFLOP/s of matrix products here"
    tensors = {name: tensor.to(device) for name, tensor in sizing.batch.tensors.items()}
    state, buffers = torch.random.get_rng_state(), {name: one.clone() for name, one in loss.named_buffers()}
    durations_s: list[float] = []
    while (len(durations_s) <= WARM_UP_PASSES or sum(durations_s[1:]) < _LEAST_S) and sum(durations_s) < WARM_UP_S:
        start_s = time.perf_counter()
        loss(tensors).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations_s.append(time.perf_counter() - start_s)
    loss.zero_grad(set_to_none=True)
    torch.random.set_rng_state(state)
    for name, buffer in loss.named_buffers():  # some models note in training what they have read
        buffer.copy_(buffers[name])
    measured = durations_s[1:] or durations_s
    rate = len(measured) * sizing.batch.num_units / sum(measured)
    return rate, f"measured over {len(measured)} passes, without the optimizer"


def in_units(num_bytes: float) -> str:
    """A size in MiB or GiB."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
