"""Encoded source sentences, packed as the decoder reads them.

The sentences of one call are packed to the longest of them. Where one sentence takes the place of another and is not
longer than the others, it alone is written: the rest stays as it is, and so does the length unless the sentences that
are left are much shorter. Padding costs little and changes nothing, since it is masked.

Shapes: N sources, S tokens of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import TensorSpec
from headway_server.decoding.runner.encoder import CrossTensors
from headway_server.decoding.runner.state import fixed_size

_MOST_SPARE_TOKENS = 8
"""Padding that is not given up, or a quarter of the longest where that is more."""


@dataclass(frozen=True, slots=True)
class _Room:
    """What is packed from a place on."""

    sources: list[CrossTensors]
    length: int
    """S."""


class PackedSources:
    """Memory for the cross-attention tensors of all running sentences.

    Attributes:
        num_bytes: Memory that it takes, all of it from the start.
    """

    def __init__(self, specs: Sequence[TensorSpec], *, max_sources: int, max_length: int) -> None:
        """Takes the memory.

        Args:
            specs: The decoder's inputs (sources, heads, source_length, head_dim) that it reads sources from.
            max_sources: Sentences that can run at once.
            max_length: Most tokens of one.

        Raises:
            BundleError: A tensor has no fixed size.
        """
        self._max_length = max_length
        self._shapes = {spec.name: (fixed_size(spec, 1), fixed_size(spec, 3)) for spec in specs}
        self._memory: dict[str, NDArray[Any]] = {}
        for spec in specs:
            heads, head_dim = self._shapes[spec.name]
            self._memory[spec.name] = np.empty(max_sources * heads * max_length * head_dim, spec.dtype)
            self._memory[spec.name].fill(0)  # unlike np.zeros, this takes the memory now
        self._rooms: dict[int, _Room] = {}
        self.num_bytes = sum(memory.nbytes for memory in self._memory.values())

    def __repr__(self) -> str:
        rooms = ", ".join(f"{len(room.sources)} from {first}" for first, room in self._rooms.items())
        return f"PackedSources({self.num_bytes} bytes: {rooms or 'none'})"

    def pack(self, sources: Sequence[CrossTensors], first: int) -> dict[str, NDArray[Any]]:
        """Packs sources into the room of the sources from number `first` on; whatever was packed there is lost.

        Args:
            sources: N of them.
            first: Number of the first among all that there is room for.

        Returns:
            By the decoder's name each tensor (N, heads, S, head_dim), and `source_mask` int64 (N, S). They hold until
            the next call for some of the same room. Nothing where there are no sources.
        """
        before = self._rooms.get(first, _Room([], 0))
        stop = first + len(sources)
        rooms = self._rooms.items()
        lost = [start for start, room in rooms if start < stop and first < start + len(room.sources)]
        for start in lost:
            del self._rooms[start]
        if not sources:
            return {}
        lengths = np.array([source.num_tokens for source in sources])
        longest = int(lengths.max())
        is_kept = longest <= before.length <= longest + max(_MOST_SPARE_TOKENS, longest // 4)
        known = before.sources if is_kept else []
        room = self._rooms[first] = _Room(list(sources), before.length if is_kept else longest)
        new = [row for row, source in enumerate(sources) if row >= len(known) or known[row] is not source]
        packed = {name: self._write(name, room, first, new) for name in self._memory}
        packed["source_mask"] = (np.arange(room.length) < lengths[:, np.newaxis]).astype(np.int64)
        return packed

    def _write(self, name: str, room: _Room, first: int, rows: list[int]) -> NDArray[Any]:
        """Writes one tensor of some of a room's sources; returns that of all, zero where a source is shorter."""
        heads, head_dim = self._shapes[name]
        shape = (len(room.sources), heads, room.length, head_dim)
        start = first * heads * self._max_length * head_dim
        packed = self._memory[name][start : start + math.prod(shape)].reshape(shape)
        for row in rows:
            source = room.sources[row]
            packed[row, :, : source.num_tokens] = source.tensors[name]
            packed[row, :, source.num_tokens :] = 0
        return packed
