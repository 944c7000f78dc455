"""What a training asks of a machine, before anything of it is allocated: parameters, memory and arithmetic.

Everything is counted on a model and a batch of torch's `meta` device, whose tensors have shapes and no storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from headway_training.models import count_parameters
from headway_training.optimizers import is_layer_matrix

_FP32_BYTES, _BF16_BYTES = 4, 2
_BACKWARD_SHARE = 3
"""A backward pass has twice the matrix products of the forward pass: one for inputs and one for weights."""

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one training step holds in memory and computes."""

    parameter_count: int
    """Trainable weights; a tied one counts once."""
    weight_bytes: int
    """fp32 weights; under bf16, the copies that matrix products read, too."""
    gradient_bytes: int
    """fp32."""
    optimizer_bytes: int
    """AdamW's two moments, or Muon's one of the matrices of layers; the average of the weights where there is one."""
    activation_bytes: int
    """What the backward pass needs of the forward pass, at the size of the batch."""
    step_flops: int
    """Floating-point operations of the matrix products of a step, forward and backward."""

    @property
    def total_bytes(self) -> int:
        """Everything together. What a single operation needs beside it for a moment is not counted."""
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


def measure_footprint(
    make_model: Callable[[], nn.Module],
    loss: Loss,
    tensors: Mapping[str, Tensor],
    *,
    bf16: bool,
    averaged: bool,
    muon: bool = False,
) -> Footprint:
    """Counts what a step needs.

    With P parameters: weights 4 P bytes (6 P under bf16), gradients 4 P, AdamW's moments 8 P (and 4 P for the averaged
    weights); of a layer's matrices Muon keeps 4 bytes a weight in place of 8. Activations are the distinct tensors,
    weights aside, that autograd keeps of one forward pass, in fp32; under bf16 it is nearly as much, as what is kept in
    half the width is kept beside casts. Matrix products are counted by torch's flop counter, forward, and taken three
    times.

    Args:
        make_model: Builds the model, with its attention; called on the `meta` device.
        loss: Loss of a model on a batch.
        tensors: A batch of the size that is trained with.
        bf16: Whether matrix products run in bf16.
        averaged: Whether an average of the weights is kept.
        muon: Whether the matrices of layers are Muon's.
    """
    with torch.device("meta"):
        model = make_model().train()
    batch = {name: tensor.to("meta") for name, tensor in tensors.items()}
    kept = _StorageCounter(model)
    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        loss(model, batch)
    count = count_parameters(model)
    of_muon = sum(weight.numel() for name, weight in model.named_parameters() if muon and is_layer_matrix(name, weight))
    return Footprint(
        parameter_count=count,
        weight_bytes=count * (_FP32_BYTES + (_BF16_BYTES if bf16 else 0)),
        gradient_bytes=count * _FP32_BYTES,
        optimizer_bytes=(count * (3 if averaged else 2) - of_muon) * _FP32_BYTES,
        activation_bytes=kept.num_bytes,
        step_flops=_BACKWARD_SHARE * counter.get_total_flops(),
    )


class _StorageCounter:
    """Adds up the storages that autograd keeps; those of the weights are there anyway."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[torch.UntypedStorage] = [tensor.untyped_storage() for tensor in model.parameters()]
        self._seen = {storage._cdata for storage in self._held}  # noqa: SLF001 (torch gives meta storages no address)
        self.num_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Takes note of a tensor that is kept."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:  # noqa: SLF001 (as above)
            self._seen.add(storage._cdata)  # noqa: SLF001 (as above)
            self._held.append(storage)  # so that its number is not given to another
            self.num_bytes += storage.nbytes()
        return tensor


def in_units(num_bytes: float) -> str:
    """A size in MiB or GiB."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
