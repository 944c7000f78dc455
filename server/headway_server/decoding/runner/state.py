"""The state of a decoder, slot by slot, as the manifest's `state` describes it (docs/bundle.md).

There are three kinds, and a model may have all. A cache (`in_place`) has positions: (slots, heads, max_length,
head_dim), bound as past and as present at once, so that a step writes its own positions and copies nothing. A recurrent
state (`replace`) has none: a step reads (slots, ...) and returns a new one. Past and present do not share memory then,
since a graph may read the one after it has written the other; the order of its operators is not defined. So a step
writes into rows beside the slots, which are copied over the slots it ran when it is done: 0.9 us for 32 rows of 384
numbers. Two buffers that take turns would save that copy, but need all slots to have run equally often, and slots that
join, wait or run in another call have not.

The third kind is a cache of a window (`window`), where a token sees only so many. It has a few rows more than that, and
a step drops the oldest itself: which positions it holds depends on the number of tokens that the slot has read, and on
nothing else (`Window`). So it is copied as other caches are, but positions that have been dropped are no more there.

The prefix cache has chunks of prompts: of any cache all their positions, in slots of its own, and of a recurrent state
a copy as it was after the chunk, a snapshot.
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
class Window:
    """Which positions a slot of a cache holds, as `com.microsoft::GroupQueryAttention` keeps them.

    They are the newest, in order from row 0 on. When all rows are taken, so many are dropped that `size` are left with
    the next token. A cache of all positions is one in which nothing is ever dropped.
    """

    size: int
    """Tokens that a token sees, itself included."""
    num_rows: int
    """At least `size`."""

    def first(self, length: int) -> int:
        """Returns the position in row 0 of a slot that has read `length` tokens."""
        step = self.num_rows - self.size + 1
        return max(0, -(-(length - self.num_rows) // step)) * step


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A state tensor of all slots."""

    names: StateTensor
    buffer: StateBuffer


@dataclass(frozen=True, slots=True)
class _Cache(_Tensor):
    """A tensor with positions."""

    chunks: StateBuffer | None
    """Slots of the prefix cache, of all positions; None if it has none."""
    window: Window


@dataclass(frozen=True, slots=True)
class _Replaced(_Tensor):
    """A tensor without positions, with the snapshots behind the slots."""

    following: StateBuffer
    """Where a step writes the new state, from row 0 on."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Memory of the state, in bytes."""

    cached: int
    """Of a slot's caches."""
    positions: int
    """Of all positions of a slot, those included that caches of windows do not hold."""
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
        cached = positions = replaced = 0
        for names in variant.state:
            spec = specs[names.past]
            shape, itemsize = _slot_shape(names, spec, max_length), np.dtype(spec.dtype).itemsize
            if names.update == "replace":
                replaced += math.prod(shape) * itemsize
            else:
                cached += math.prod(shape) * itemsize
                positions += shape[0] * max_length * shape[2] * itemsize
        num_chunks = max_length // chunk
        if replaced:  # snapshots take no more memory than a slot that runs
            num_chunks = min(num_chunks, (cached + 2 * replaced) // replaced)
        return cls(cached, positions, replaced, num_chunks)

    @property
    def of_slot(self) -> int:
        """Memory of a slot that runs: the old state without positions and the new one are both in memory."""
        return self.cached + 2 * self.replaced

    @property
    def of_prefix_slot(self) -> int:
        """Memory of a slot of the prefix cache."""
        return self.positions + self.num_chunks * self.replaced


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
            num_prefix_slots: Slots of the prefix cache, of state with positions alone.
            num_snapshots: Snapshots of state without positions.

        Raises:
            BundleError: A tensor that the manifest names as state has no fixed size.
        """
        specs = {spec.name: spec for spec in variant.graphs["decoder"].inputs}
        self._caches: list[_Cache] = []
        self._replaced: list[_Replaced] = []
        for names in variant.state:
            spec = specs[names.past]
            shape = _slot_shape(names, spec, max_length)
            if names.update == "replace":
                buffer = allocate(device, (num_slots + num_snapshots, *shape), spec.dtype)
                self._replaced.append(_Replaced(names, buffer, allocate(device, (num_slots, *shape), spec.dtype)))
            else:
                buffer = allocate(device, (num_slots, *shape), spec.dtype)
                of_chunks = (num_prefix_slots, shape[0], max_length, shape[2])
                chunks = allocate(device, of_chunks, spec.dtype) if num_prefix_slots else None
                self._caches.append(_Cache(names, buffer, chunks, _window_of(names, spec, max_length)))
        self.position_offsets: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """(slots,) what is added to positions behind a prompt with images whose positions are those of a grid."""
        self._windows = {cache.window for cache in self._caches}
        self._device = device
        self._num_slots = num_slots
        self.max_length = max_length
        buffers = [tensor.buffer for tensor in (*self._caches, *self._replaced)]
        buffers += [cache.chunks for cache in self._caches if cache.chunks is not None]
        buffers += [tensor.following for tensor in self._replaced]
        self.num_bytes = sum(buffer.num_bytes for buffer in buffers)

    def __repr__(self) -> str:
        num_tensors = len(self._caches) + len(self._replaced)
        return f"SlotState({num_tensors} tensors, {self.max_length} positions, {self.num_bytes} bytes)"

    def bind(self, binding: Binding, first_slot: int, rows: int, *, width: int = 1) -> None:
        """Binds the slots `first_slot` to `first_slot + rows - 1` to a graph, as past and as present.

        Args:
            binding: Binding of the decoder.
            first_slot: The first slot.
            rows: How many.
            width: Tokens of a row, each of whose states the graph returns, as one that verifies drafts does.
        """
        for tensor in (*self._caches, *self._replaced):
            names, buffer = tensor.names, tensor.buffer
            where = (self._device, buffer.dtype, (rows, *buffer.shape[1:]))
            address = buffer.address(first_slot)
            binding.bind_input(names.past, *where, address)
            present = tensor.following.address(0) if isinstance(tensor, _Replaced) else address
            binding.bind_output(names.present, *where, present)
            for number in range(1, width):
                binding.bind_output(link_name(names.present, number), *where, address)

    def take_over(self, first_slot: int, rows: int) -> None:
        """Makes the new state of a step that of the slots it ran; to be called after each step that succeeded."""
        for tensor in self._replaced:
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

    def can_return(self, length: int, num_read: int) -> bool:
        """Returns True if a slot that has read `num_read` tokens can go on from the first `length` of them.

        Otherwise a window has dropped positions since. State without positions is not meant.
        """
        return all(window.first(length) == window.first(num_read) for window in self._windows)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of a slot over those of another; state without positions whole."""
        self.position_offsets[target] = self.position_offsets[source]
        for cache in self._caches:
            rows = min(length, cache.window.num_rows)
            cache.buffer.copy(cache.buffer, (source, 0), (target, 0), rows)
        for tensor in self._replaced:
            tensor.buffer.copy_slots(tensor.buffer, source, target, 1)

    def keep_chunk(self, slot: int, start: int, stop: int, place: tuple[int, int], num_read: int) -> None:
        """Copies the positions from `start` to before `stop`, which a slot has just read, to the prefix cache.

        Args:
            slot: The slot.
            start: The first position.
            stop: The position after the last.
            place: Slot of the prefix cache, and the position there that the first one goes to.
            num_read: Tokens that the slot has read. What a window has dropped by then is not copied: who goes on from
                the cache has read as many, and does not need it.
        """
        row, column = place
        for cache in self._caches:
            first = cache.window.first(num_read)
            begin = max(start, first)  # a window may be shorter
            if begin >= stop:
                continue
            assert cache.chunks is not None, "there is such a place"
            cache.chunks.copy(cache.buffer, (slot, begin - first), (row, column + begin - start), stop - begin)

    def reuse_chunks(self, places: Sequence[tuple[int, int]], chunk: int, slot: int) -> None:
        """Copies chunks of `chunk` tokens from the prefix cache, the first ones of a prompt, to a slot."""
        length = len(places) * chunk
        for cache in self._caches:
            first = cache.window.first(length)
            assert cache.chunks is not None, "there are such places"
            for number, (row, column) in enumerate(places):
                start = number * chunk
                begin = max(start, first)
                if (count := start + chunk - begin) > 0:
                    cache.buffer.copy(cache.chunks, (row, column + begin - start), (slot, begin - first), count)

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

        The slots have read `stop` tokens. State without positions is copied whole.
        """
        for cache in self._caches:
            cache.buffer.reorder(_rows_of(copies, cache.window))
        for tensor in self._replaced:
            for source, target, _, _ in copies:
                tensor.buffer.copy_slots(tensor.buffer, source, target, 1)


def _rows_of(copies: Sequence[tuple[int, int, int, int]], window: Window) -> list[tuple[int, int, int, int]]:
    """Returns copies of positions as copies of rows."""
    firsts = (window.first(stop) for _, _, _, stop in copies)
    return [
        (source, target, max(start - first, 0), stop - first)
        for (source, target, start, stop), first in zip(copies, firsts, strict=True)
    ]


def _window_of(names: StateTensor, spec: TensorSpec, max_length: int) -> Window:
    """Returns the window of a cache, one of all positions if it has none.

    Raises:
        BundleError: The cache has no fixed number of rows, or fewer than its window.
    """
    if names.window is None:
        return Window(max_length, max_length)
    num_rows = fixed_size(spec, 2)
    if num_rows < names.window:
        raise BundleError(f"{spec.name}: must have at least {names.window} rows for its window, and has {num_rows}")
    return Window(names.window, num_rows)


def _slot_shape(names: StateTensor, spec: TensorSpec, max_length: int) -> tuple[int, ...]:
    """Returns the shape of one slot's state; of a cache it is (heads, rows, head_dim)."""
    if names.update == "in_place":
        return fixed_size(spec, 1), _window_of(names, spec, max_length).num_rows, fixed_size(spec, 3)
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
