"""Runs the graph of a decoder on slots; knows nothing of requests and queues.

Shapes: R rows of a step (slots 0 to R-1), T tokens of a prefill, V vocabulary, N sources, S source positions.

State lives in slots (`state.py`). It is bound to the graph once for every number of rows and for every slot that
prefills, since only the small inputs change from step to step. A graph gets those of the step's inputs that it
declares: a recurrent decoder needs no positions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import ALIGNMENT, ENCODER_DECODER_TASKS, Bundle, Graph, Manifest, Task, Variant, demanded
from headway_server.bundles.chain import DECODING_AXES, VERIFIES
from headway_server.bundles.manifest import (
    ATTENDS_AHEAD,
    EXPONENTIAL_MEANS,
    FRAMES,
    LIKELIEST_IDS,
    LIKELIEST_LOGITS,
    MEDIA_EMBEDDINGS,
    MEDIA_POSITIONS,
    NUM_LIKELIEST,
    POSITION_OFFSETS,
)
from headway_server.decoding.interfaces import PromptMedia, Ranking, SlotCopy
from headway_server.decoding.runner.encoder import CrossTensors, PackedSources, bytes_per_token, padded_length
from headway_server.decoding.runner.memory_plan import SlotSizes
from headway_server.decoding.runner.state import SlotState, StateSizes, fixed_size
from headway_server.errors import BundleError
from headway_server.runtime import Runtime, Session

PREFILL_CHUNK = 128
"""Most tokens of a prefill step. Chunks begin at multiples of it, so a prompt is always computed in the same chunks. A
chunk takes about 50 ms at GPT-2-small size on two cores."""

COARSE: Final = "coarse_decoder"
"""Role of the second decoder of a staged synthesis model."""
_LOGITS = "logits"
_NOTHING: Final[Mapping[str, NDArray[Any]]] = MappingProxyType({})
_NO_DRAFTS: NDArray[np.int64] = np.zeros(0, np.int64)
_MODERATE = 60.0
"""Maximum magnitude of a row's largest logit for the graph's mean of exponentials. Sums of millions of exponentials
stay within float32, and none that matters beside the largest is lost."""
_BINDINGS_PER_SLOT = 4
"""Cached bindings per slot: with beams, groups of slots begin anywhere and have any length."""


def slot_sizes(manifest: Manifest, variant: Variant) -> SlotSizes:
    """Returns the memory of a slot of a `DecoderRunner`.

    Raises:
        BundleError: A tensor that the manifest names as state has no fixed size.
    """
    specs = {spec.name: spec for spec in variant.graphs["decoder"].inputs}
    max_source = manifest.limits.max_input_tokens or 0
    state = _state_sizes(manifest, variant)
    more = 0
    if COARSE in variant.graphs:
        stage_manifest, stage = coarse_stage(manifest, variant)
        more = _state_sizes(stage_manifest, stage).of_slot
    reads_prompts = manifest.task in (Task.GENERATION, Task.SPEECH_SYNTHESIS)
    return SlotSizes(
        state_bytes=state.of_slot + more,
        windows=_windows(variant, manifest.limits.max_total_tokens or 0),
        source_bytes=sum(padded_length(max_source) * bytes_per_token(specs[name]) for name in variant.cross),
        prefix_slot_bytes=state.of_prefix_slot if reads_prompts and state.num_chunks else 0,
    )


def coarse_stage(manifest: Manifest, variant: Variant) -> tuple[Manifest, Variant]:
    """Returns manifest and variant of the second decoder of a staged synthesis model, for a runner of its own."""
    limits = manifest.limits.model_copy(update={"max_total_tokens": demanded(manifest.stages).coarse_length})
    return (
        manifest.model_copy(update={"limits": limits}),
        variant.model_copy(update={"graphs": {"decoder": variant.graphs[COARSE]}}),
    )


def _windows(variant: Variant, max_length: int) -> str:
    """Says which caches hold fewer positions than a slot of `max_length` has."""
    specs = {spec.name: spec for spec in variant.graphs["decoder"].inputs}
    num_caches = sum(state.update == "in_place" for state in variant.state)
    counts = Counter(fixed_size(specs[state.past], 2) for state in variant.state if state.window is not None)
    parts = [f"{count} of {num_caches} caches hold {rows}" for rows, count in sorted(counts.items())]
    return f"{', '.join(parts)} of {max_length} positions" if parts else ""


def _state_sizes(manifest: Manifest, variant: Variant) -> StateSizes:
    return StateSizes.of(variant, manifest.limits.max_total_tokens or 0, _longest_step(variant.graphs["decoder"]))


class DecoderRunner:
    """A decoder with its state. Not thread-safe: one engine's thread calls it.

    Attributes:
        num_slots: Rows that can run at once.
        num_cached_chunks: Chunks of prompts that the prefix cache has room for.
        max_length: Positions of a slot.
        vocab_size: V, or the numbers that a step gives in place of logits.
        cache_bytes: Memory of the state and of packed sources, in bytes, taken when the runner is made.
        prefill_chunk: Maximum tokens of a prefill step; 1 if the graph reads only one.
        has_positions: True if some state has positions.
        keeps_positions: True if all state has positions, so that tokens can be read again.
        has_alignment: True if `align` can be called.
        ranking: Ranking of the last `decode`, if the graph ranks its logits (`Decoder.ranking`).
    """

    def __init__(
        self,
        runtime: Runtime,
        bundle: Bundle,
        variant: Variant,
        *,
        num_slots: int,
        num_prefix_slots: int = 0,
        sharing: Session | None = None,
        allocate: Callable[[int, str], NDArray[Any]] | None = None,
    ) -> None:
        """Opens the variant's decoder and allocates the state of `num_slots + num_prefix_slots` slots.

        Args:
            runtime: Where it runs.
            bundle: The bundle.
            variant: One of its variants.
            num_slots: Rows that can run at once.
            num_prefix_slots: Slots of the prefix cache.
            sharing: Open session of the same decoder; None: one is opened.
            allocate: Room for packed sources (`PackedSources`); None: main memory.

        Raises:
            BundleError: The graph does not match the manifest.
        """
        max_length = bundle.manifest.limits.max_total_tokens
        assert max_length is not None, "the manifest's validator demands it"
        graph = variant.graphs["decoder"]
        specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        in_lanes = bundle.manifest.task in ENCODER_DECODER_TASKS
        self._session = (
            runtime.open(bundle, graph, fixed_axes=DECODING_AXES, in_lanes=in_lanes) if sharing is None else sharing
        )
        self._chunks_per_slot = _state_sizes(bundle.manifest, variant).num_chunks
        self.num_cached_chunks = num_prefix_slots * self._chunks_per_slot
        self._state = SlotState(
            runtime.device,
            variant,
            num_slots=num_slots,
            max_length=max_length,
            num_prefix_slots=num_prefix_slots,
            num_snapshots=self.num_cached_chunks,
        )
        self._input_names = frozenset(spec.name for spec in graph.inputs)
        self._no_media = no_media(graph)
        self._packed = PackedSources(
            [specs[name] for name in variant.cross],
            max_sources=num_slots,
            max_length=bundle.manifest.limits.max_input_tokens or 0,
            allocate=allocate,
        )
        self._sources: dict[int, dict[str, NDArray[Any]]] = {}  # by the first slot that reads them
        self._bindings: dict[tuple[int, int], _Binding] = {}
        self.num_slots = num_slots
        self.max_length = max_length
        self._output = FRAMES if FRAMES in specs else _LOGITS
        self.vocab_size = fixed_size(specs[self._output], -1)
        self.cache_bytes = self._state.num_bytes + self._packed.num_bytes
        self.prefill_chunk = _longest_step(graph)
        with_positions = [state.update == "in_place" for state in variant.state]
        self.has_positions, self.keeps_positions = any(with_positions), all(with_positions)
        self.has_alignment = ALIGNMENT in specs
        self.ranking: Ranking | None = None
        self._logits: NDArray[np.float32] = np.empty((num_slots, 1, self.vocab_size), np.float32)

    @property
    def session(self) -> Session:
        """The decoder's session, for runners that share it."""
        return self._session

    @property
    def state(self) -> SlotState:
        """The state of the slots, for another session of the same graph."""
        return self._state

    def __repr__(self) -> str:
        return f"DecoderRunner({self.num_slots} slots x {self.max_length}, {self.cache_bytes} bytes of state)"

    def prefill(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        start: int,
        source: CrossTensors | None = None,
        *,
        media: PromptMedia | None = None,
    ) -> NDArray[np.float32]:
        """Reads tokens into a slot, at positions `start` to `start + T - 1`.

        Args:
            slot: The slot; positions before `start` must have been written.
            token_ids: (T,) int64, at most `prefill_chunk` of them, or a block of `media`.
            start: Position of the first token.
            source: Encoded source, for an encoder-decoder. The sources of `decode` stay unchanged.
            media: Embeddings in place of some tokens', for a model of images, by their places among the tokens.

        Returns:
            (V,) float32 logits after the last token: a view that the next call overwrites.
        """
        assert 0 < len(token_ids) <= self.prefill_chunk or _is_block(media), "the scheduler cuts prompts into chunks"
        assert start + len(token_ids) <= self.max_length, "admission checks lengths"
        if source is None:
            self._begin_text(slot, start, media)
            self._step(slot, **_prefill_inputs(token_ids, start), media=media)
        else:
            self._run(self._source_binding(slot, source), **_prefill_inputs(token_ids, start))
        logits: NDArray[np.float32] = self._logits[0, 0]
        return logits

    def score(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        start: int,
        source: CrossTensors | None = None,
        *,
        media: PromptMedia | None = None,
    ) -> NDArray[np.float32]:
        """Reads tokens into a slot as `prefill` does, and returns the logits after each of them.

        Returns:
            (T, V) float32 logits, a new array.
        """
        length = len(token_ids)
        assert 0 < length <= self.prefill_chunk or _is_block(media), "the caller cuts texts into chunks"
        assert start + length <= self.max_length, "the caller cuts texts into windows"
        logits: NDArray[np.float32] = np.empty((1, length, self.vocab_size), np.float32)
        inputs = _prefill_inputs(token_ids, start, logits_positions=np.arange(length))
        if source is not None:
            binding = self._source_binding(slot, source)
            binding.bind_output(_LOGITS, logits)
            self._run(binding, **inputs)
        else:
            self._begin_text(slot, start, media)
            binding = self._binding(slot, 1)
            binding.bind_output(_LOGITS, logits)
            try:
                self._step(slot, **inputs, media=media)
            finally:  # the next step must not write into a freed array
                binding.bind_output(_LOGITS, self._logits[:1])
        scores: NDArray[np.float32] = logits[0]
        return scores

    def decode(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        first_slot: int = 0,
        *,
        num_likeliest: int = 1,
        further: Mapping[str, NDArray[Any]] = _NOTHING,
    ) -> NDArray[np.float32]:
        """Runs one token in each of R neighbouring slots, each at its own position.

        Args:
            token_ids: (R,) int64.
            positions: (R,) int64 positions of these tokens.
            first_slot: The first of the slots.
            num_likeliest: Tokens of each row that are ranked, if the graph ranks them.
            further: Other inputs of the graph, (R, ...) each.

        Returns:
            (R, V) float32 logits of the next tokens: a view that the next call overwrites; the caller may change it.
        """
        rows = len(token_ids)
        assert 0 < rows <= self.num_slots - first_slot, "the scheduler assigns these slots only"
        ranks = NUM_LIKELIEST in self._input_names
        if ranks:
            self._binding(first_slot, rows).bind_ranking(num_likeliest)
        if further:
            self._binding(first_slot, rows).bind_inputs(dict(further))
        self._step(
            first_slot,
            input_ids=token_ids[:, np.newaxis],
            position_ids=positions[:, np.newaxis],
            logits_positions=np.zeros((rows, 1), np.int64),
            lengths=(positions + 1).astype(np.int32),
        )
        self.ranking = self._binding(first_slot, rows).read_ranking(self._logits[:rows, 0]) if ranks else None
        return self._logits[:rows, 0]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of slot `source` to slot `target`."""
        self._state.copy(source, target, length)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot over those of another."""
        self._state.copy(source, target, length)

    def can_return(self, length: int, num_read: int) -> bool:
        """Returns True if the caches of a slot of `num_read` tokens can go on from the first `length` of them."""
        return self._state.can_return(length, num_read)

    def keep_chunk(self, slot: int, start: int, index: int, num_read: int) -> None:
        """Copies a chunk that a slot has just read, from position `start` on, to a place of the prefix cache."""
        self._state.keep_chunk(slot, start, start + self.prefill_chunk, self._place_of(index), num_read)
        self._state.keep(slot, index)

    def reuse_chunks(self, indices: Sequence[int], slot: int) -> None:
        """Copies chunks from places of the prefix cache to a slot, in order; of state without positions the last."""
        self._state.reuse_chunks([self._place_of(index) for index in indices], self.prefill_chunk, slot)
        self._state.restore(indices[-1], slot)

    def keep_states(self, slot: int, index: int) -> None:
        """Copies a slot's state without positions to a place of the prefix cache."""
        self._state.keep(slot, index)

    def reuse_states(self, index: int, slot: int) -> None:
        """Copies what `keep_states` has copied over a slot's."""
        self._state.restore(index, slot)

    def _place_of(self, index: int) -> tuple[int, int]:
        """Returns slot and position of a place of the prefix cache."""
        row, column = divmod(index, self._chunks_per_slot)
        return row, column * self.prefill_chunk

    def reorder(self, copies: Sequence[SlotCopy]) -> None:
        """Copies positions of slots over those of others. No slot is both read and written."""
        self._state.reorder(copies)

    def begin(self, slot: int, source: CrossTensors) -> None:
        """Fills the state that a slot starts from, if the encoder gives one; called before the slot's first step."""
        self._state.begin(slot, source.initial)

    def _begin_text(self, slot: int, start: int, media: PromptMedia | None) -> None:
        """Resets a slot's state without positions at the beginning of a text."""
        self._state.position_offsets[slot] = 0 if media is None or media.offsets is None else media.offsets[-1, 0]
        if start == 0 and not self.keeps_positions:
            self._state.begin(slot, {})

    def align(
        self, slot: int, source: CrossTensors, token_ids: NDArray[np.int64], num_prompt: int = 1
    ) -> NDArray[np.float32]:
        """Computes how much each token of a finished sequence attended to each position of its source.

        Reads the tokens into the slot again, from position 0; the slot's state is lost. The sources of `decode` stay as
        they are.

        Args:
            slot: The slot.
            source: Encoded source.
            token_ids: (T,) int64 decoder inputs: its prompt and all new tokens except the last.
            num_prompt: Tokens of the prompt among them.

        Returns:
            (T - num_prompt + 1, S) float32, a new array: a row for each new token; rows sum to one.

        Raises:
            BundleError: The graph has no such output (`has_alignment`).
        """
        if not self.has_alignment:
            raise BundleError(
                f"{self._session.graph.file}: has no output {ALIGNMENT}, so that translations cannot be aligned; "
                "export the model again"
            )
        assert 0 < len(token_ids) <= self.max_length, "they fitted the slot in decoding"
        self.begin(slot, source)
        binding = self._source_binding(slot, source)
        alignment: NDArray[np.float32] = np.empty((len(token_ids), source.num_positions), np.float32)
        for start in range(0, len(token_ids), self.prefill_chunk):
            stop = min(start + self.prefill_chunk, len(token_ids))
            binding.bind_output(ALIGNMENT, alignment[np.newaxis, start:stop])
            self._run(binding, **_prefill_inputs(token_ids[start:stop], start))
        alignment = alignment[num_prompt - 1 :]
        alignment /= alignment.sum(axis=-1, keepdims=True)  # in fp16 the sums are near one
        return alignment

    def set_sources(self, sources: Sequence[CrossTensors], first_slot: int = 0) -> None:
        """Sets the encoded sources that the slots from `first_slot` on attend to in `decode`, in their order.

        To be called whenever they change. Each source is read by as many neighbouring slots as the others, its beams.
        The tensors are packed into memory shared by all steps; other slots' tensors stay unchanged.
        """
        self._sources[first_slot] = self._packed.pack(sources, first_slot)
        for (slot, _), binding in self._bindings.items():
            if slot == first_slot:
                binding.sources_are_bound = False

    def _step(self, first_slot: int, *, media: PromptMedia | None = None, **inputs: NDArray[Any]) -> None:
        """Runs the slots from `first_slot` on with the sources of `set_sources`; takes what `_run` takes."""
        binding = self._binding(first_slot, len(inputs["input_ids"]))
        sources = self._sources.get(first_slot)
        if sources and not binding.sources_are_bound:
            binding.bind_inputs(sources)
            binding.sources_are_bound = True
        if POSITION_OFFSETS in self._input_names:
            shape = inputs["input_ids"].shape
            binding.bind_inputs({POSITION_OFFSETS: self._position_offsets(first_slot, *shape, media=media)})
        if media is None or not (media.embeddings or media.blocks):
            self._run(binding, **inputs)
            return
        assert self._no_media, "calls with images are checked"
        if media.embeddings:
            binding.bind_inputs({MEDIA_POSITIONS: media.positions, MEDIA_EMBEDDINGS: np.stack(media.embeddings)})
        if media.blocks:
            assert media.is_block, "a block is a step of its own"
            binding.bind_inputs({ATTENDS_AHEAD: np.ones(1, np.bool_)})
        try:
            self._run(binding, **inputs)
        finally:
            binding.bind_inputs(self._no_media)

    def _position_offsets(
        self, first_slot: int, rows: int, length: int, *, media: PromptMedia | None
    ) -> NDArray[np.int64]:
        """Returns the offsets of a step, (R, T, 3): those of a prompt's tokens, or those behind the slots' prompts."""
        if media is not None and media.offsets is not None:
            return media.offsets[np.newaxis]
        kept = self._state.position_offsets[first_slot : first_slot + rows]
        return np.broadcast_to(kept[:, np.newaxis, np.newaxis], (rows, length, 3))

    def _run(
        self,
        binding: _Binding,
        *,
        input_ids: NDArray[np.int64],  # (R, T)
        position_ids: NDArray[np.int64],  # (R, T)
        logits_positions: NDArray[np.int64],  # (R, L)
        lengths: NDArray[np.int32],  # (R,) tokens of each row after this step
    ) -> None:
        inputs = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "logits_positions": logits_positions,
            "seqlens_k": lengths - np.int32(1),
            "total_sequence_length": np.array(lengths.max(), np.int32),
        }
        binding.bind_inputs({name: array for name, array in inputs.items() if name in self._input_names})
        binding.run()

    def _binding(self, first_slot: int, rows: int) -> _Binding:
        """Returns the binding of slots `first_slot` to `first_slot + rows - 1`, made when it is first needed."""
        key = (first_slot, rows)
        binding = self._bindings.pop(key, None) or self._new_binding(first_slot, rows)
        if len(self._bindings) >= _BINDINGS_PER_SLOT * self.num_slots:
            del self._bindings[next(iter(self._bindings))]  # the least recently used one
        self._bindings[key] = binding
        return binding

    def _source_binding(self, slot: int, source: CrossTensors) -> _Binding:
        """Returns a new binding of one slot to one source."""
        binding = self._new_binding(slot, 1)
        binding.bind_inputs({name: tensor[np.newaxis] for name, tensor in source.tensors.items()})
        binding.bind_inputs({"source_mask": np.ones((1, source.num_positions), np.int64)})
        return binding

    def _new_binding(self, first_slot: int, rows: int) -> _Binding:
        binding = _Binding(self._session, self._state, first_slot, rows)
        binding.bind_output(self._output, self._logits[:rows])
        binding.bind_inputs(self._no_media)
        if VERIFIES in self._input_names:
            binding.bind_inputs({VERIFIES: _NO_DRAFTS})
        if NUM_LIKELIEST in self._input_names:
            binding.bind_inputs({NUM_LIKELIEST: np.ones(1, np.int64)})
        return binding


class _Binding:
    """Neighbouring slots, bound to the graph."""

    def __init__(self, session: Session, state: SlotState, first_slot: int, rows: int) -> None:
        self._state = state
        self._slots = (first_slot, rows)
        self._binding = session.new_binding()
        self.sources_are_bound = False
        self._ranked: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]] | None = None
        state.bind(self._binding, *self._slots)

    def bind_output(self, name: str, array: NDArray[Any]) -> None:
        """Binds the array in host memory that an output is written to; the caller keeps it alive."""
        assert array.flags.c_contiguous, "the graph writes without gaps"
        self._binding.bind_output(name, "cpu", array.dtype.type, array.shape, array.ctypes.data)

    def bind_ranking(self, num_likeliest: int) -> None:
        """Binds the ranking outputs of a step of one token a row."""
        rows = self._slots[1]
        shape = (rows, 1, num_likeliest)
        if self._ranked is not None and self._ranked[0].shape == shape:
            return
        ids, logits, means = np.empty(shape, np.int64), np.empty(shape, np.float32), np.empty((rows, 1), np.float32)
        self._ranked = ids, logits, means
        self.bind_inputs({NUM_LIKELIEST: np.array([num_likeliest])})
        for name, array in (LIKELIEST_IDS, ids), (LIKELIEST_LOGITS, logits), (EXPONENTIAL_MEANS, means):
            self.bind_output(name, array)

    def read_ranking(self, logits: NDArray[np.float32]) -> Ranking:
        """Returns the ranking of the last run, whose logits are (R, V).

        Where a row's mean of exponentials means nothing, its normalizer is computed here. Each row's way is its own.
        """
        assert self._ranked is not None, "it was bound before the run"
        token_ids, likeliest, means = self._ranked
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            normalizers = np.log(means[:, 0], dtype=np.float64) + math.log(logits.shape[1])  # (R,)
            is_sure = np.isfinite(normalizers) & (np.abs(likeliest[:, 0, 0]) < _MODERATE)
            for row in np.flatnonzero(~is_sure).tolist():
                exact = logits[row].astype(np.float64)
                normalizers[row] = exact.max() + np.log(np.exp(exact - exact.max()).sum())  # NaN if one is not finite
        return Ranking(token_ids[:, 0], likeliest[:, 0], normalizers)

    def bind_inputs(self, inputs: dict[str, NDArray[Any]]) -> None:
        """Binds host arrays, which the binding references."""
        self._binding.bind_inputs(inputs)

    def run(self) -> None:
        """Runs a step, which updates the slots' state."""
        self._binding.run()
        self._state.take_over(*self._slots)


def _prefill_inputs(
    token_ids: NDArray[np.int64], start: int, logits_positions: NDArray[np.int64] | None = None
) -> dict[str, NDArray[Any]]:
    """Returns the inputs of one row that reads (T,) tokens from position `start` on, by default for the last logits."""
    length = len(token_ids)
    if logits_positions is None:
        logits_positions = np.array([length - 1])
    return {
        "input_ids": token_ids[np.newaxis],
        "position_ids": np.arange(start, start + length, dtype=np.int64)[np.newaxis],
        "logits_positions": logits_positions[np.newaxis],
        "lengths": np.array([start + length], np.int32),
    }


def no_media(graph: Graph) -> dict[str, NDArray[Any]]:
    """Returns the inputs of a step without images; nothing for a graph that reads none."""
    inputs: dict[str, NDArray[Any]]
    widths = [fixed_size(spec, 1) for spec in graph.inputs if spec.name == MEDIA_EMBEDDINGS]
    if not widths:
        return {}
    inputs = {MEDIA_POSITIONS: np.zeros(0, np.int64), MEDIA_EMBEDDINGS: np.zeros((0, widths[0]), np.float32)}
    if any(spec.name == ATTENDS_AHEAD for spec in graph.inputs):
        inputs[ATTENDS_AHEAD] = np.zeros(1, np.bool_)
    return inputs


def _is_block(media: PromptMedia | None) -> bool:
    """Returns True if all tokens of a step attend to each other."""
    return media is not None and media.is_block


def _longest_step(graph: Graph) -> int:
    """Returns the maximum tokens of a row in a step: the graph's fixed number, or a chunk; 1 if it reads frames."""
    length = next((spec.shape[1] for spec in graph.inputs if spec.name == "input_ids"), 1)
    return length if isinstance(length, int) else PREFILL_CHUNK
