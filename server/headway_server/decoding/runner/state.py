"""The state of a decoder, slot by slot, as the manifest's `state` describes it (docs/bundle.md).

There are two kinds, and a model may have both. A cache (`in_place`) has positions: (slots, heads, max_length,
head_dim), bound as past and as present at once, so that a step writes its own positions and copies nothing. A recurrent
state (`replace`) has none: a step reads (slots, ...) and returns a new one. Past and present do not share memory then,
since a graph may read the one after it has written the other; the order of its operators is not defined. So a step
writes into rows beside the slots, which are copied over the slots it ran when it is done: 0.9 us for 32 rows of 384
numbers. Two buffers that take turns would save that copy, but need all slots to have run equally often, and slots that
join, wait or run in another call have not.

The prefix cache has chunks of prompts: of a cache their positions, in slots of its own, and of a recurrent state a copy
as it was after the chunk, a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import StateTensor, TensorSpec, Variant
from headway_server.bundles.chain import link_name
from headway_server.errors import BundleError
from headway_server.runtime import Binding, Device
from headway_server.runtime.memory import StateBuffer, allocate


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A state tensor of all slots."""

    names: StateTensor
    buffer: StateBuffer
    following: StateBuffer | None
    """Where a step writes the new state, from row 0 on; None if it writes into the buffer itself."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Memory of the state, in bytes."""

    cached: int
    """Of a slot's positions."""
    replaced: int
    """Of the state without positions, once."""
    num_chunks: int
    """Chunks of prompts that a slot of the prefix cache holds; 0 if it can hold none."""

    @classmethod
    def of(cls, variant: Variant, max_length: int, chunk: int) -> StateSizes:
        """Returns the sizes of a decoder's state.

        Args:
            variant: Its decoder's state is meant.
            max_length: Positions of a slot.
            chunk: Tokens of a prompt that are read at once.

        Raises:
            BundleError: A tensor that the manifest names as state has no fixed size.
        """
        specs = {spec.name: spec for spec in variant.graphs["decoder"].inputs}
        sizes = {"in_place": 0, "replace": 0}
        for names in variant.state:
            shape = _slot_shape(names, specs[names.past], max_length)
            sizes[names.update] += math.prod(shape) * np.dtype(specs[names.past].dtype).itemsize
        cached, replaced = sizes["in_place"], sizes["replace"]
        num_chunks = max_length // chunk
        if replaced:  # snapshots take no more memory than a slot that runs
            num_chunks = min(num_chunks, (cached + 2 * replaced) // replaced)
        return cls(cached, replaced, num_chunks)

    @property
    def of_slot(self) -> int:
        """Memory of a slot that runs: the old state without positions and the new one are both in memory."""
        return self.cached + 2 * self.replaced

    @property
    def of_prefix_slot(self) -> int:
        """Memory of a slot of the prefix cache."""
        return self.cached + self.num_chunks * self.replaced


class SlotState:
    """The state of all slots.

    Attributes:
        max_length: Positions of a slot.
        num_bytes: Memory that it takes, all of it from the start.
    """

    def __init__(
        self,
        device: Device,
        variant: Variant,
        *,
        num_slots: int,
        max_length: int,
        num_prefix_slots: int = 0,
        num_snapshots: int = 0,
    ) -> None:
        """Allocates the state, all zeros.

        Args:
            device: Where the decoder runs.
            variant: Its decoder's state is meant.
            num_slots: Slots that run.
            max_length: Positions of a slot.
            num_prefix_slots: Slots after these, of state with positions alone.
            num_snapshots: Snapshots of state without positions.

        Raises:
            BundleError: A tensor that the manifest names as state has no fixed size.
        """
        specs = {spec.name: spec for spec in variant.graphs["decoder"].inputs}
        self._tensors: list[_Tensor] = []
        for names in variant.state:
            spec = specs[names.past]
            shape = _slot_shape(names, spec, max_length)
            is_replaced = names.update == "replace"
            count = num_slots + (num_snapshots if is_replaced else num_prefix_slots)
            following = allocate(device, (num_slots, *shape), spec.dtype) if is_replaced else None
            self._tensors.append(_Tensor(names, allocate(device, (count, *shape), spec.dtype), following))
        self._replaced = [tensor for tensor in self._tensors if tensor.following is not None]
        self._cached = [tensor.buffer for tensor in self._tensors if tensor.following is None]
        self._device = device
        self._num_slots = num_slots
        self.max_length = max_length
        self.num_bytes = sum(
            buffer.num_bytes for tensor in self._tensors for buffer in (tensor.buffer, tensor.following) if buffer
        )

    def __repr__(self) -> str:
        return f"SlotState({len(self._tensors)} tensors, {self.max_length} positions, {self.num_bytes} bytes)"

    def bind(self, binding: Binding, first_slot: int, rows: int, *, width: int = 1) -> None:
        """Binds the slots `first_slot` to `first_slot + rows - 1` to a graph, as past and as present.

        Args:
            binding: Binding of the decoder.
            first_slot: The first slot.
            rows: How many.
            width: Tokens of a row, each of whose states the graph returns, as one that verifies drafts does.
        """
        for tensor in self._tensors:
            buffer, following = tensor.buffer, tensor.following
            where = (self._device, buffer.dtype, (rows, *buffer.shape[1:]))
            address = buffer.address(first_slot)
            binding.bind_input(tensor.names.past, *where, address)
            binding.bind_output(tensor.names.present, *where, address if following is None else following.address(0))
            for number in range(1, width):
                binding.bind_output(link_name(tensor.names.present, number), *where, address)

    def take_over(self, first_slot: int, rows: int) -> None:
        """Makes the new state of a step that of the slots it ran; to be called after each step that succeeded."""
        for tensor in self._replaced:
            assert tensor.following is not None, "replaced tensors have it"
            tensor.buffer.copy_slots(tensor.following, 0, first_slot, rows)

    def begin(self, slot: int, initial: Mapping[str, NDArray[Any]]) -> None:
        """Fills state without positions before a slot's first step: with the encoder's output, or with zeros.

        Args:
            slot: The slot.
            initial: Initial values in the shape of a slot, by the name of the encoder's output.
        """
        for tensor in self._replaced:
            name = tensor.names.initial
            tensor.buffer.fill(slot, None if name is None else initial[name])

    def copy(self, source: tuple[int, int], target: tuple[int, int], length: int) -> None:
        """Copies `length` positions of a slot, from a (slot, position) on, over those of another.

        State without positions is copied whole.
        """
        self.copy_positions(source, target, length)
        for tensor in self._replaced:
            tensor.buffer.copy_slots(tensor.buffer, source[0], target[0], 1)

    def copy_positions(self, source: tuple[int, int], target: tuple[int, int], length: int) -> None:
        """Copies positions as `copy` does, and leaves state without positions as it is."""
        assert max(source[1], target[1]) + length <= self.max_length, "a slot has no more positions"
        for buffer in self._cached:
            buffer.copy(source, target, length)

    def keep(self, slot: int, snapshot: int) -> None:
        """Copies a slot's state without positions to a snapshot."""
        for tensor in self._replaced:
            tensor.buffer.copy_slots(tensor.buffer, slot, self._num_slots + snapshot, 1)

    def restore(self, snapshot: int, slot: int) -> None:
        """Copies a snapshot over a slot's state without positions."""
        for tensor in self._replaced:
            tensor.buffer.copy_slots(tensor.buffer, self._num_slots + snapshot, slot, 1)

    def reorder(self, copies: Sequence[tuple[int, int, int, int]]) -> None:
        """Copies positions of slots over those of others, none of which is read: (source, target, start, stop).

        State without positions is copied whole.
        """
        for tensor in self._tensors:
            if tensor.following is None:
                tensor.buffer.reorder(copies)
            else:
                for source, target, _, _ in copies:
                    tensor.buffer.copy_slots(tensor.buffer, source, target, 1)


def _slot_shape(names: StateTensor, spec: TensorSpec, max_length: int) -> tuple[int, ...]:
    """Returns the shape of one slot's state; of a cache it is (heads, max_length, head_dim)."""
    if names.update == "in_place":
        return fixed_size(spec, 1), max_length, fixed_size(spec, 3)
    return tuple(fixed_size(spec, axis) for axis in range(1, len(spec.shape)))


def fixed_size(spec: TensorSpec, axis: int) -> int:
    """Returns the size of an axis.

    Raises:
        BundleError: It is dynamic, or the tensor has no such axis.
    """
    if not -len(spec.shape) <= axis < len(spec.shape):
        raise BundleError(f"{spec.name}: must have an axis {axis}, the manifest says {list(spec.shape)}")
    size = spec.shape[axis]
    if not isinstance(size, int):
        raise BundleError(f"{spec.name}: axis {axis} must have a fixed size, the manifest says {size!r}")
    return size
