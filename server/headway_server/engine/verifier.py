"""Runs a few tokens a row at once, each bit for bit as `DecoderRunner.decode` runs it (docs/speculation.md).

Shapes: R rows (slots 0 to R-1), T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles.chain import VERIFIES, link_name
from headway_server.runtime import Session
from headway_server.runtime.memory import StateBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """What runs so many rows."""

    binding: Any  # onnxruntime.IOBinding, which has no types
    logits: NDArray[np.float32]
    """(R, T, V)"""


class Verifier:
    """A second session of a decoder's graph, on the state of the first: weights are held twice. Not thread-safe.

    Attributes:
        width: T.
        vocab_size: V.
    """

    def __init__(
        self, session: Session, state: Sequence[tuple[str, str, StateBuffer]], *, width: int, vocab_size: int
    ) -> None:
        """Runs on slots that another session reads and writes too, one call at a time.

        Args:
            session: Of a graph whose axes are fixed to `verifying_axes`.
            state: Names as past and as present, and memory, of each state tensor.
            width: The graph's `chain_width`, more than 1.
            vocab_size: Tokens there are.
        """
        assert width > 1, "a step of one token is a decode step"
        self._session = session
        self._state = state
        self._bound: dict[int, _Bound] = {}
        self.width = width
        self.vocab_size = vocab_size

    def __repr__(self) -> str:
        return f"Verifier({self.width} tokens a row)"

    def verify(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Runs T tokens in each of the slots 0 to R-1, each row from a position of its own.

        Positions of tokens that turn out wrong are written again when the right ones are run.

        Args:
            token_ids: (R, T) int64.
            positions: (R,) int64 position of each row's first token; T positions from there are the slot's.

        Returns:
            (R, T, V) float32 logits after every token: a view that the next call with as many rows overwrites.
        """
        rows, width = token_ids.shape
        assert width == self.width, "the graph runs so many tokens a row"
        if rows not in self._bound:
            self._bound[rows] = self._bind(rows)
        bound = self._bound[rows]
        inputs = {
            "input_ids": token_ids,
            "position_ids": positions[:, np.newaxis] + np.arange(width),
            "seqlens_k": (positions + (width - 1)).astype(np.int32),
            "total_sequence_length": np.array(positions.max() + width, np.int32),
        }
        for name, array in inputs.items():
            bound.binding.bind_cpu_input(name, np.ascontiguousarray(array))
        self._session.run_bound(bound.binding)
        return bound.logits

    def _bind(self, rows: int) -> _Bound:
        """Binds all that stays: the state, whose every version is the same memory, and where the logits go."""
        binding, device = self._session.new_binding(), self._session.device
        logits: NDArray[np.float32] = np.empty((rows, self.width, self.vocab_size), np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        for past, present, buffer in self._state:
            where = (device, 0, buffer.dtype, (rows, *buffer.shape[1:]), buffer.address(0))
            binding.bind_input(past, *where)
            for name in (present, *(link_name(present, number) for number in range(1, self.width))):
                binding.bind_output(name, *where)
        every = np.ascontiguousarray(np.broadcast_to(np.arange(self.width), (rows, self.width)))
        binding.bind_cpu_input("logits_positions", every)
        binding.bind_cpu_input(VERIFIES, np.zeros(1, np.int64))
        return _Bound(binding=binding, logits=logits)
