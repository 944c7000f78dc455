"""Runs the encoder, and packs encoded sources as the decoder reads them.

The sources of one decode call are packed to the longest of them. When one source replaces another within the padded
length, only that source is written. The padded length stays until the remaining sources are much shorter. Padding costs
little and changes nothing, since it is masked, and since lengths are multiples of four: ONNX Runtime multiplies one row
by four others at a time, and sums a remainder of three in another order.

Shapes: N sources, S source positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Bundle, TensorSpec, Variant
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.state import fixed_size
from headway_server.runtime import Runtime

_LENGTH_AXIS = "length"
"""The manifest's name of the axis of an encoder's tensors that is as long as the input."""
_MASK = "attention_mask"
"""Input int64 (batch, length) that is 1 at positions of the input and 0 at padding; made here if the graph has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTensors:
    """Decoder inputs of one encoded source; an `EncodedSource`."""

    num_positions: int
    """S, without padding."""
    tensors: dict[str, NDArray[Any]]
    """The cross-attention keys and values, each (heads, S, head_dim), by their name in encoder and decoder."""
    initial: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Initial state without positions, in the shape of a slot, by the encoder's name."""


class EncoderRunner:
    """An encoder of any inputs. Calls may come from several threads."""

    def __init__(self, runtime: Runtime, bundle: Bundle, variant: Variant) -> None:
        """Opens the variant's encoder.

        Raises:
            BundleError: The graph does not match the manifest.
        """
        graph = variant.graphs["encoder"]
        self._session = runtime.open(bundle, graph)
        self._inputs = graph.inputs
        self._cross = {spec.name: spec for spec in graph.outputs if spec.name in variant.cross}
        self._initial = [state.initial for state in variant.state if state.initial is not None]

    def encode(self, inputs: Sequence[EncoderInput]) -> list[CrossTensors]:
        """Encodes inputs in one batch, each tensor padded with zeros to the largest.

        An encoder without a mask would read the padding: it has a batch for each shape of its inputs.

        Args:
            inputs: The tensors that the graph declares, without the batch axis; `attention_mask` is made here.

        Returns:
            Decoder inputs of each source, in order; copies, so that none references the whole batch.
        """
        if any(spec.name == _MASK for spec in self._inputs):
            return self._encode_batch(inputs)
        by_shape: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for number, each in enumerate(inputs):
            by_shape.setdefault(tuple(each.tensors[spec.name].shape for spec in self._inputs), []).append(number)
        encoded: dict[int, CrossTensors] = {}
        for numbers in by_shape.values():
            encoded |= zip(numbers, self._encode_batch([inputs[number] for number in numbers]), strict=True)
        return [encoded[number] for number in range(len(inputs))]

    def _encode_batch(self, inputs: Sequence[EncoderInput]) -> list[CrossTensors]:
        lengths = [self._length(each) for each in inputs]
        feeds = {
            spec.name: _mask(lengths)
            if spec.name == _MASK
            else _stacked([each.tensors[spec.name] for each in inputs], np.dtype(spec.dtype))
            for spec in self._inputs
        }
        outputs = self._session.run(feeds)
        encoded: list[CrossTensors] = []
        for row, length in enumerate(lengths):
            tensors = {
                name: outputs[name][row, :, : length if spec.shape[2] == _LENGTH_AXIS else None].copy()
                for name, spec in self._cross.items()
            }
            num_positions = next((tensor.shape[1] for tensor in tensors.values()), length)
            initial = {name: outputs[name][row].copy() for name in self._initial}
            encoded.append(CrossTensors(num_positions=num_positions, tensors=tensors, initial=initial))
        return encoded

    def _length(self, each: EncoderInput) -> int:
        """Returns the size of an input along the axis `length`; 1 if no tensor has it."""
        for spec in self._inputs:
            if spec.name != _MASK and _LENGTH_AXIS in spec.shape:
                return int(each.tensors[spec.name].shape[spec.shape.index(_LENGTH_AXIS) - 1])
        return 1

    def __repr__(self) -> str:
        return f"EncoderRunner({self._session!r})"


def _mask(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Returns 1 at each row's positions and 0 at its padding, (N, length)."""
    return (np.arange(max(lengths)) < np.array(lengths)[:, np.newaxis]).astype(np.int64)


def _stacked(rows: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Stacks arrays of the same number of axes, padded with zeros at the end of each axis to the largest."""
    shape = np.max([row.shape for row in rows], axis=0)
    stacked = np.zeros((len(rows), *shape), dtype)
    for target, row in zip(stacked, rows, strict=True):
        target[tuple(slice(size) for size in row.shape)] = row
    return stacked


def bytes_per_token(spec: TensorSpec) -> int:
    """Returns the bytes of a position of (rows, heads, positions, head_dim)."""
    return fixed_size(spec, 1) * fixed_size(spec, 3) * np.dtype(spec.dtype).itemsize


_LENGTH_MULTIPLE = 4
"""Sources are padded to a multiple of this number of positions, in any batch (docs/decisions/batch-invariance.md)."""
_MOST_SPARE_TOKENS = 8
"""Positions of padding that are tolerated, or a quarter of the longest source if that is more."""


@dataclass(frozen=True, slots=True)
class _Room:
    """Packed sources of one decode call."""

    sources: list[CrossTensors]
    length: int
    """S."""


def padded_length(num_positions: int) -> int:
    """Returns the minimum padded length of a source."""
    return -(-num_positions // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def _zeros(count: int, dtype: str) -> NDArray[Any]:
    array: NDArray[Any] = np.empty(count, dtype)
    array.fill(0)  # unlike np.zeros, this allocates the memory now
    return array


class PackedSources:
    """Memory for the cross-attention keys and values of all running sequences.

    Attributes:
        num_bytes: Memory that it takes, all of it from the start.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        max_sources: int,
        max_length: int,
        allocate: Callable[[int, str], NDArray[Any]] | None = None,
    ) -> None:
        """Allocates the memory.

        Args:
            specs: The decoder's inputs (sources, heads, source_length, head_dim) for cross-attention.
            max_sources: Sources that can be read at once.
            max_length: Maximum positions of a source.
            allocate: Returns zeros, a number of them of a type; None: in main memory, all of it at once.

        Raises:
            BundleError: A tensor has no fixed size.
        """
        self._max_length = padded_length(max_length)
        self._shapes = {spec.name: (fixed_size(spec, 1), fixed_size(spec, 3)) for spec in specs}
        self._memory: dict[str, NDArray[Any]] = {}
        for spec in specs:
            heads, head_dim = self._shapes[spec.name]
            self._memory[spec.name] = (allocate or _zeros)(
                max_sources * heads * self._max_length * head_dim, spec.dtype
            )
        self._rooms: dict[int, _Room] = {}
        self.num_bytes = sum(memory.nbytes for memory in self._memory.values())

    def __repr__(self) -> str:
        rooms = ", ".join(f"{len(room.sources)} from {first}" for first, room in self._rooms.items())
        return f"PackedSources({self.num_bytes} bytes: {rooms or 'none'})"

    def pack(self, sources: Sequence[CrossTensors], first: int) -> dict[str, NDArray[Any]]:
        """Packs sources into the memory from source number `first` on, over what was packed there.

        Args:
            sources: N of them.
            first: Place of the first, 0 to `max_sources` - 1.

        Returns:
            Each tensor (N, heads, S, head_dim) by the decoder's name, and `source_mask` int64 (N, S), valid until
            the next call for any of the same places. An empty dict if there are no sources.
        """
        before = self._rooms.get(first, _Room([], 0))
        stop = first + len(sources)
        rooms = self._rooms.items()
        lost = [start for start, room in rooms if start < stop and first < start + len(room.sources)]
        for start in lost:
            del self._rooms[start]
        if not sources:
            return {}
        lengths = np.array([source.num_positions for source in sources])
        longest = padded_length(int(lengths.max()))
        is_reused = longest <= before.length <= longest + max(_MOST_SPARE_TOKENS, longest // 4)
        known = before.sources if is_reused else []
        room = self._rooms[first] = _Room(list(sources), before.length if is_reused else longest)
        new = [row for row, source in enumerate(sources) if row >= len(known) or known[row] is not source]
        packed = {name: self._write(name, room, first, new) for name in self._memory}
        packed["source_mask"] = (np.arange(room.length) < lengths[:, np.newaxis]).astype(np.int64)
        return packed

    def _write(self, name: str, room: _Room, first: int, rows: list[int]) -> NDArray[Any]:
        """Writes one tensor of some sources; returns that of all, zero past the end of a shorter source."""
        heads, head_dim = self._shapes[name]
        shape = (len(room.sources), heads, room.length, head_dim)
        start = first * heads * self._max_length * head_dim
        packed = self._memory[name][start : start + math.prod(shape)].reshape(shape)
        for row in rows:
            source = room.sources[row]
            packed[row, :, : source.num_positions] = source.tensors[name]
            packed[row, :, source.num_positions :] = 0
        return packed
