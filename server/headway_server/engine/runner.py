"""Runs the graphs of a decoder on slots; knows nothing of requests and queues.

Shapes: R rows of a step (slots 0 to R-1), T tokens of a prefill, V vocabulary, N sources, S source tokens.

State lives in one buffer a state tensor, (num_slots, heads, max_length, head_dim), that is bound to the graph as past
and as present at once: a step writes its own positions and copies nothing. A binding is made once for every number of
rows and for every slot that prefills, since only the small inputs change from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Bundle, Manifest, Task, TensorSpec, Variant
from headway_server.engine.memory_plan import SlotSizes
from headway_server.errors import BundleError
from headway_server.runtime import Runtime, Session
from headway_server.runtime.memory import StateBuffer, allocate

PREFILL_CHUNK = 128
"""Tokens of a prefill step at most; chunk boundaries sit on multiples of it from position 0, so that a prompt is always
computed in the same pieces. A chunk takes about 50 ms at GPT-2-small size on two cores."""

_LOGITS = "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTensors:
    """What a decoder reads of one encoded source sentence."""

    num_tokens: int
    """S, padding not counted."""
    tensors: dict[str, NDArray[Any]]
    """Each (heads, S, head_dim), by the name that the encoder and the decoder give it."""


def slot_sizes(manifest: Manifest, variant: Variant) -> SlotSizes:
    """Returns what a slot of a `DecoderRunner` takes.

    Raises:
        BundleError: A tensor that the manifest names as state has no fixed size.
    """
    specs = {spec.name: spec for spec in variant.graphs["decoder"].inputs}
    max_length, max_source = manifest.limits.max_total_tokens or 0, manifest.limits.max_input_tokens or 0
    return SlotSizes(
        state_bytes=sum(max_length * _bytes_per_token(specs[state.past]) for state in variant.state),
        source_bytes=sum(max_source * _bytes_per_token(specs[name]) for name in variant.cross),
        keeps_prompts=manifest.task is Task.GENERATION and max_length >= PREFILL_CHUNK,
    )


class DecoderRunner:
    """A decoder with its state. Not thread-safe: one engine's thread calls it.

    Attributes:
        num_slots: Rows that can run at once.
        num_prefix_slots: Slots past these that never run: they keep chunks of prompts.
        max_length: Positions of a slot.
        vocab_size: V.
        cache_bytes: Memory of the state and of packed sources, in bytes, taken when the runner is made.
        prefill_chunk: Tokens of a prefill at most.
    """

    def __init__(
        self, runtime: Runtime, bundle: Bundle, variant: Variant, *, num_slots: int, num_prefix_slots: int = 0
    ) -> None:
        """Opens the variant's decoder and allocates the state of `num_slots + num_prefix_slots` slots.

        Raises:
            BundleError: The graph is not what the manifest says.
        """
        max_length = bundle.manifest.limits.max_total_tokens
        assert max_length is not None, "the manifest's validator demands it"
        all_slots = num_slots + num_prefix_slots
        graph = variant.graphs["decoder"]
        specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        self._session = runtime.open(bundle, graph)
        self._state = [
            (state.past, state.present, _allocate_state(runtime, specs[state.past], all_slots, max_length))
            for state in variant.state
        ]
        max_sources, max_source_length = num_slots, bundle.manifest.limits.max_input_tokens or 0
        self._cross = {name: _CrossBuffer(specs[name], max_sources, max_source_length) for name in variant.cross}
        self._sources: dict[str, NDArray[Any]] = {}
        self._bindings: dict[tuple[int, int], _Binding] = {}
        self.num_slots = num_slots
        self.num_prefix_slots = num_prefix_slots
        self.max_length = max_length
        self.vocab_size = _fixed(specs[_LOGITS], -1)
        self.cache_bytes = sum(buffer.num_bytes for _, _, buffer in self._state) + sum(
            buffer.num_bytes for buffer in self._cross.values()
        )
        self.prefill_chunk = PREFILL_CHUNK
        self._logits: NDArray[np.float32] = np.empty((num_slots, 1, self.vocab_size), np.float32)

    def __repr__(self) -> str:
        return f"DecoderRunner({self.num_slots} slots x {self.max_length}, {self.cache_bytes} bytes of state)"

    def prefill(self, slot: int, token_ids: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Reads tokens into a slot, at positions `start` to `start + T - 1`.

        Args:
            slot: The slot; positions before `start` must have been written.
            token_ids: (T,) int64, at most `prefill_chunk` of them.
            start: Position of the first token.

        Returns:
            (V,) float32 logits after the last token: a view that the next call overwrites.
        """
        length = len(token_ids)
        end = start + length
        assert 0 < length <= self.prefill_chunk, "the scheduler cuts prompts into chunks"
        assert end <= self.max_length, "admission checks lengths"
        self._step(
            first_slot=slot,
            input_ids=token_ids[np.newaxis],
            position_ids=np.arange(start, end, dtype=np.int64)[np.newaxis],
            logits_positions=np.array([[length - 1]], np.int64),
            lengths=np.array([end], np.int32),
        )
        logits: NDArray[np.float32] = self._logits[0, 0]
        return logits

    def score(self, slot: int, token_ids: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Reads tokens into a slot as `prefill` does, and gives the logits after every one of them.

        Returns:
            (T, V) float32 logits, an array of their own.
        """
        length = len(token_ids)
        assert 0 < length <= self.prefill_chunk, "the caller cuts texts into chunks"
        assert start + length <= self.max_length, "the caller cuts texts into windows"
        logits: NDArray[np.float32] = np.empty((1, length, self.vocab_size), np.float32)
        binding = self._binding(slot, 1)
        binding.bind_logits(logits)
        try:
            self._step(
                first_slot=slot,
                input_ids=token_ids[np.newaxis],
                position_ids=np.arange(start, start + length, dtype=np.int64)[np.newaxis],
                logits_positions=np.arange(length, dtype=np.int64)[np.newaxis],
                lengths=np.array([start + length], np.int32),
            )
        finally:  # the next step must not write into an array that is gone
            binding.bind_logits(self._logits[:1])
        scores: NDArray[np.float32] = logits[0]
        return scores

    def decode(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Runs one token in each of the slots 0 to R-1, each at a position of its own.

        Args:
            token_ids: (R,) int64.
            positions: (R,) int64 positions of these tokens.

        Returns:
            (R, V) float32 logits of the next tokens: a view that the next call overwrites.
        """
        rows = len(token_ids)
        assert 0 < rows <= self.num_slots, "the scheduler runs a prefix of the slots"
        self._step(
            first_slot=0,
            input_ids=token_ids[:, np.newaxis],
            position_ids=positions[:, np.newaxis],
            logits_positions=np.zeros((rows, 1), np.int64),
            lengths=(positions + 1).astype(np.int32),
        )
        return self._logits[:rows, 0]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of slot `source` to slot `target`."""
        self.copy(source=(source, 0), target=(target, 0), length=length)

    def copy(self, *, source: tuple[int, int], target: tuple[int, int], length: int) -> None:
        """Copies `length` positions of a slot, from a position on, over those of another slot: (slot, position)."""
        assert max(source[1], target[1]) + length <= self.max_length, "a slot has no more positions"
        for _, _, buffer in self._state:
            buffer.copy(source, target, length)

    def set_sources(self, sources: Sequence[CrossTensors]) -> None:
        """Says which encoded sentences the running slots read, in the order of the slots.

        To be called whenever that changes. The tensors are packed to the longest source, (N, heads, S, head_dim), in
        memory that all steps share.
        """
        longest = max((source.num_tokens for source in sources), default=0)
        lengths = np.array([source.num_tokens for source in sources])
        self._sources = {name: buffer.pack(sources, longest) for name, buffer in self._cross.items()} if sources else {}
        if sources:
            self._sources["source_mask"] = (np.arange(longest) < lengths[:, np.newaxis]).astype(np.int64)  # (N, S)
        for binding in self._bindings.values():
            binding.sources_are_bound = False

    def _step(
        self,
        *,
        first_slot: int,
        input_ids: NDArray[np.int64],  # (R, T)
        position_ids: NDArray[np.int64],  # (R, T)
        logits_positions: NDArray[np.int64],  # (R, L)
        lengths: NDArray[np.int32],  # (R,) tokens of each row after this step
    ) -> None:
        binding = self._binding(first_slot, len(input_ids))
        if self._sources and not binding.sources_are_bound:
            binding.bind_inputs(self._sources)
            binding.sources_are_bound = True
        binding.bind_inputs(
            {
                "input_ids": input_ids,
                "position_ids": position_ids,
                "logits_positions": logits_positions,
                "seqlens_k": lengths - np.int32(1),
                "total_sequence_length": np.array(lengths.max(), np.int32),
            }
        )
        binding.run()

    def _binding(self, first_slot: int, rows: int) -> _Binding:
        """Returns the binding of the slots `first_slot` to `first_slot + rows - 1`, made when it is first needed."""
        key = (first_slot, rows)
        if key not in self._bindings:
            self._bindings[key] = _Binding(self._session, self._state, self._logits[:rows], first_slot, rows)
        return self._bindings[key]


class _Binding:
    """A run of neighbouring slots bound to the graph, with the state's memory as past and as present."""

    def __init__(
        self,
        session: Session,
        state: list[tuple[str, str, StateBuffer]],
        logits: NDArray[np.float32],
        first_slot: int,
        rows: int,
    ) -> None:
        self._session = session
        self._binding = session.new_binding()
        self.sources_are_bound = False
        self.bind_logits(logits)
        for past, present, buffer in state:
            where = (session.device, 0, buffer.dtype, (rows, *buffer.shape[1:]), buffer.address(first_slot))
            self._binding.bind_input(past, *where)
            self._binding.bind_output(present, *where)

    def bind_logits(self, logits: NDArray[np.float32]) -> None:
        """Binds where the logits go, (R, L, V) in host memory; the caller keeps it alive."""
        self._binding.bind_output(_LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)

    def bind_inputs(self, inputs: dict[str, NDArray[Any]]) -> None:
        """Binds host arrays; the binding keeps them alive."""
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, np.ascontiguousarray(array))

    def run(self) -> None:
        self._session.run_bound(self._binding)


class _CrossBuffer:
    """Memory for one cross-attention tensor of all running sentences, packed to the longest of them."""

    def __init__(self, spec: TensorSpec, max_sources: int, max_length: int) -> None:
        self._heads, self._head_dim = _fixed(spec, 1), _fixed(spec, 3)
        self._name = spec.name
        self._memory: NDArray[Any] = np.zeros(max_sources * self._heads * max_length * self._head_dim, spec.dtype)
        self._memory.fill(0)  # takes the memory now
        self.num_bytes = self._memory.nbytes

    def pack(self, sources: Sequence[CrossTensors], length: int) -> NDArray[Any]:
        """Returns (N, heads, S, head_dim): a view that the next call overwrites, zero where a source is shorter."""
        shape = (len(sources), self._heads, length, self._head_dim)
        packed = self._memory[: math.prod(shape)].reshape(shape)
        for row, source in enumerate(sources):
            packed[row, :, : source.num_tokens] = source.tensors[self._name]
            packed[row, :, source.num_tokens :] = 0
        return packed


class EncoderRunner:
    """The encoder of a translation model. Calls may come from several threads."""

    def __init__(self, runtime: Runtime, bundle: Bundle, variant: Variant) -> None:
        """Opens the variant's encoder.

        Raises:
            BundleError: The graph is not what the manifest says.
        """
        self._session = runtime.open(bundle, variant.graphs["encoder"])
        self._names = variant.cross

    def encode(self, sources: Sequence[NDArray[np.int64]]) -> list[CrossTensors]:
        """Encodes source sentences in one batch, padded to the longest.

        Args:
            sources: (S,) int64 token ids of each sentence, of any lengths.

        Returns:
            What the decoder reads of each sentence, in order: copies, so that none keeps the whole batch alive.
        """
        lengths = [len(source) for source in sources]
        input_ids = np.zeros((len(sources), max(lengths)), np.int64)  # (N, S)
        mask = np.zeros_like(input_ids)
        for row, source in enumerate(sources):
            input_ids[row, : len(source)] = source
            mask[row, : len(source)] = 1
        outputs = self._session.run({"input_ids": input_ids, "attention_mask": mask})
        return [
            CrossTensors(
                num_tokens=length, tensors={name: outputs[name][row, :, :length].copy() for name in self._names}
            )
            for row, length in enumerate(lengths)
        ]


def _allocate_state(runtime: Runtime, spec: TensorSpec, num_slots: int, max_length: int) -> StateBuffer:
    """Allocates (num_slots, heads, max_length, head_dim) for a declared (slots, heads, cache_length, head_dim)."""
    return allocate(runtime.device, (num_slots, _fixed(spec, 1), max_length, _fixed(spec, 3)), spec.dtype)


def _bytes_per_token(spec: TensorSpec) -> int:
    """Returns the bytes of a position of (rows, heads, positions, head_dim)."""
    return _fixed(spec, 1) * _fixed(spec, 3) * np.dtype(spec.dtype).itemsize


def _fixed(spec: TensorSpec, axis: int) -> int:
    size = spec.shape[axis]
    if not isinstance(size, int):
        raise BundleError(f"{spec.name}: axis {axis} must have a fixed size, the manifest says {size!r}")
    return size
