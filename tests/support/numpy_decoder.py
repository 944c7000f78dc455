"""A decoder and an encoder small enough for NumPy, with the runner's interface and a real key/value cache.

One layer of attention over the cache (and over the encoded source, if there is one), computed row by row, so that a row
is bit-identical whatever runs beside it. A slot's positions are written as the runner writes them: reading a slot that
was not moved or filled rightly gives other tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.interfaces import EncoderInput, SlotCopy
from headway_server.decoding.runner.encoder import CrossTensors

WIDTH = 16


class NumpyDecoder:
    """Follows `headway_server.decoding.interfaces.Decoder`; ranks nothing."""

    ranking = None
    has_positions = keeps_positions = True

    def __init__(
        self,
        *,
        num_slots: int,
        num_prefix_slots: int = 0,
        vocab_size: int,
        max_length: int = 64,
        prefill_chunk: int = 8,
        seed: int = 7,
        likely_id: int | None = None,
    ) -> None:
        """Draws weights; `likely_id` is a token that shall be frequent, such as the one that ends a sequence."""
        rng = np.random.default_rng(seed)
        self.num_slots = num_slots
        self.num_cached_chunks = num_prefix_slots * (max_length // prefill_chunk)
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.prefill_chunk = prefill_chunk
        self.tokens = rng.normal(size=(vocab_size, WIDTH)).astype(np.float32)
        self.places = rng.normal(size=(max_length, WIDTH)).astype(np.float32)
        self.projections = rng.normal(size=(4, WIDTH, WIDTH)).astype(np.float32) / np.float32(np.sqrt(WIDTH))
        self.output = rng.normal(size=(WIDTH, vocab_size)).astype(np.float32)
        if likely_id is not None:
            self.output[:, likely_id] *= np.float32(2)
        self.keys = np.zeros((num_slots + num_prefix_slots, max_length, WIDTH), np.float32)
        self.values = np.zeros((num_slots + num_prefix_slots, max_length, WIDTH), np.float32)
        self.sources: dict[int, list[CrossTensors]] = {}
        """By the first slot that reads them."""
        self.decode_sizes: list[int] = []
        """Rows of each decode step."""
        self.steps: list[str] = []
        """What was called, in order."""

    def prefill(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        start: int,
        source: CrossTensors | None = None,
        *,
        media: None = None,
    ) -> NDArray[np.float32]:
        assert media is None
        assert start % self.prefill_chunk == 0
        assert 0 < len(token_ids) <= self.prefill_chunk
        self.steps.append("prefill")
        for position, token_id in enumerate(token_ids.tolist(), start):
            logits = self._row(slot, token_id, position, source)
        return logits

    def score(self, slot: int, token_ids: NDArray[np.int64], start: int, *, media: None = None) -> NDArray[np.float32]:
        assert media is None
        self.steps.append("score")
        rows = enumerate(token_ids.tolist(), start)
        return np.stack([self._row(slot, token_id, position, None) for position, token_id in rows])

    def decode(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        first_slot: int = 0,
        *,
        num_likeliest: int = 1,  # noqa: ARG002 (it ranks nothing)
    ) -> NDArray[np.float32]:
        self.steps.append("decode")
        self.decode_sizes.append(len(token_ids))
        sources = self.sources.get(first_slot) or [None] * len(token_ids)
        num_beams, rest = divmod(len(token_ids), len(sources))
        assert rest == 0, "each source is read by as many rows"
        each_source = [source for source in sources for _ in range(num_beams)]
        rows = zip(token_ids.tolist(), positions.tolist(), each_source, strict=True)
        return np.stack([self._row(slot, *row) for slot, row in enumerate(rows, first_slot)])

    def move(self, source: int, target: int, length: int) -> None:
        for cache in (self.keys, self.values):
            cache[target, :length] = cache[source, :length]
            cache[source] = np.nan  # nobody may read it again before it is written

    def copy(self, source: int, target: int, length: int) -> None:
        self._copy((source, 0), (target, 0), length)

    def can_return(self, length: int, num_read: int) -> bool:  # noqa: ARG002 (nothing is dropped)
        return True

    def _copy(self, source: tuple[int, int], target: tuple[int, int], length: int) -> None:
        self.steps.append("copy")
        (from_slot, start), (to_slot, to_start) = source, target
        for cache in (self.keys, self.values):
            cache[to_slot, to_start : to_start + length] = cache[from_slot, start : start + length]

    def keep_chunk(self, slot: int, start: int, index: int, num_read: int) -> None:  # noqa: ARG002 (nothing is dropped)
        self._copy((slot, start), self._place_of(index), self.prefill_chunk)

    def reuse_chunks(self, indices: Sequence[int], slot: int) -> None:
        for number, index in enumerate(indices):
            self._copy(self._place_of(index), (slot, number * self.prefill_chunk), self.prefill_chunk)

    def _place_of(self, index: int) -> tuple[int, int]:
        row, column = divmod(index, self.max_length // self.prefill_chunk)
        return self.num_slots + row, column * self.prefill_chunk

    def keep_states(self, slot: int, index: int) -> None:
        """All state has positions."""

    def reuse_states(self, index: int, slot: int) -> None:
        """All state has positions."""

    def begin(self, slot: int, source: CrossTensors) -> None:
        """A cache starts from nothing."""

    def reorder(self, copies: Sequence[SlotCopy]) -> None:
        assert not {copy.source for copy in copies} & {copy.target for copy in copies}
        for copy in copies:
            for cache in (self.keys, self.values):
                cache[copy.target, copy.start : copy.stop] = cache[copy.source, copy.start : copy.stop]

    def align(
        self, slot: int, source: CrossTensors, token_ids: NDArray[np.int64], num_prompt: int = 1
    ) -> NDArray[np.float32]:
        self.keys[slot] = self.values[slot] = np.nan
        scores = self.tokens[token_ids[num_prompt - 1 :]] @ source.tensors["memory"][0].T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def set_sources(self, sources: Sequence[CrossTensors], first_slot: int = 0) -> None:
        self.sources[first_slot] = list(sources)

    def _row(self, slot: int, token_id: int, position: int, source: CrossTensors | None) -> NDArray[np.float32]:
        hidden = self.tokens[token_id] + self.places[position]
        query, key, value = (hidden @ self.projections[i] for i in range(3))
        self.keys[slot, position], self.values[slot, position] = key, value
        hidden = hidden + _attend(query, self.keys[slot, : position + 1], self.values[slot, : position + 1])
        if source is not None:
            memory = source.tensors["memory"][0]
            hidden = hidden + _attend(hidden @ self.projections[3], memory, memory)
        return np.tanh(hidden) @ self.output


class NumpyEncoder:
    """Follows `headway_server.decoding.interfaces.Encoder`."""

    def __init__(self, *, vocab_size: int, seed: int = 8) -> None:
        self.tokens = np.random.default_rng(seed).normal(size=(vocab_size, WIDTH)).astype(np.float32)
        self.batch_shapes: list[tuple[int, int]] = []
        """Sentences and longest sentence of each batch."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[CrossTensors]:
        sources = [each.tensors["input_ids"] for each in inputs]
        self.batch_shapes.append((len(sources), max(len(source) for source in sources)))
        return [
            CrossTensors(num_positions=len(source), tensors={"memory": np.tanh(self.tokens[source])[np.newaxis]})
            for source in sources
        ]


def _attend(query: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    scores = keys @ query / np.float32(np.sqrt(WIDTH))
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ values
