"""Runs a few tokens of a row at once, each with the very bits of `DecoderRunner.decode` (docs/speculation.md).

Shapes: R rows (slots 0 to R-1), T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.bundles import POSITION_OFFSETS, Bundle, Variant
from headway_server.bundles.chain import VERIFIES, chain_width, verifying_axes
from headway_server.decoding.runner.decoder import DecoderRunner, no_media
from headway_server.decoding.runner.state import SlotState
from headway_server.decoding.speculation.drafting import verifies_exactly
from headway_server.runtime import Binding, Runtime, Session

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """The binding for a number of rows."""

    binding: Binding
    logits: NDArray[np.float32]
    """(R, T, V)"""


class Verifier:
    """A second session of a decoder's graph with a copy of the weights, on the state of the first. Not thread-safe.

    Attributes:
        width: T.
        vocab_size: V.
    """

    def __init__(self, session: Session, state: SlotState, *, width: int, vocab_size: int) -> None:
        """Runs on slots that another session reads and writes too; only one of the two may run at a time.

        Args:
            session: Session of a graph whose axes are fixed to `verifying_axes`.
            state: The slots.
            width: The graph's `chain_width`, more than 1.
            vocab_size: Size of the vocabulary.
        """
        assert width > 1, "a step of one token is a decode step"
        self._session = session
        self._has_offsets = any(spec.name == POSITION_OFFSETS for spec in session.graph.inputs)
        self._state = state
        self._bound: dict[int, _Bound] = {}
        self.width = width
        self.vocab_size = vocab_size

    def __repr__(self) -> str:
        return f"Verifier({self.width} tokens a row)"

    def verify(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Runs T tokens in each of the slots 0 to R-1, each row from its own position.

        Positions of tokens that turn out wrong are overwritten when the right ones are run.

        Args:
            token_ids: (R, T) int64.
            positions: (R,) int64 position of each row's first token; T positions from there are the slot's.

        Returns:
            (R, T, V) float32 logits after every token: a view that the next call with as many rows overwrites.
        """
        rows, width = token_ids.shape
        assert width == self.width, "the graph's number of tokens a row is fixed"
        if rows not in self._bound:
            self._bound[rows] = self._bind(rows)
        bound = self._bound[rows]
        inputs = {
            "input_ids": token_ids,
            "position_ids": positions[:, np.newaxis] + np.arange(width),
            "seqlens_k": (positions + (width - 1)).astype(np.int32),
            "total_sequence_length": np.array(positions.max() + width, np.int32),
        }
        if self._has_offsets:
            kept = self._state.position_offsets[:rows, np.newaxis, np.newaxis]
            inputs[POSITION_OFFSETS] = np.broadcast_to(kept, (rows, width, 3))
        bound.binding.bind_inputs(inputs)
        bound.binding.run()
        return bound.logits

    def _bind(self, rows: int) -> _Bound:
        """Binds the constant parts: the state, one memory for all T tokens, and the array of logits."""
        binding = self._session.new_binding()
        logits: NDArray[np.float32] = np.empty((rows, self.width, self.vocab_size), np.float32)
        binding.bind_output("logits", "cpu", np.float32, logits.shape, logits.ctypes.data)
        self._state.bind(binding, 0, rows, width=self.width)
        every = np.broadcast_to(np.arange(self.width), (rows, self.width))
        binding.bind_inputs(no_media(self._session.graph))
        binding.bind_inputs({"logits_positions": every, VERIFIES: np.zeros(1, np.int64)})
        return _Bound(binding=binding, logits=logits)


def can_verify(variant: Variant) -> bool:
    """Returns True if a variant's decoder can verify drafts."""
    return _width(variant) > 1


def open_verifier(runtime: Runtime, bundle: Bundle, variant: Variant, decoder: DecoderRunner) -> Verifier | None:
    """Opens a decoder's graph again, to verify drafts in its slots, and checks that answers would be the same.

    Args:
        runtime: Runtime of the decoder.
        bundle: The bundle.
        variant: Variant of the decoder.
        decoder: The decoder, not used yet: its first slots are written to.

    Returns:
        None if there can be no speculation: the graph cannot verify drafts, or its bits differ from those of decoding
        on this machine. The log says which.

    Raises:
        BundleError: The graph does not match the manifest.
    """
    owner = f"{bundle.manifest.name}/{bundle.manifest.version}"
    width = _width(variant)
    if width == 1:
        reason = "its bundle cannot verify drafts; export the model again"
        if not decoder.keeps_positions:
            reason = "a wrong draft could not be taken back from its states, which have no positions"
        _log.warning("no speculation", model=owner, reason=reason)
        return None
    session = runtime.open(bundle, variant.graphs["decoder"], fixed_axes=verifying_axes(width), in_lanes=False)
    verifier = Verifier(session, decoder.state, width=width, vocab_size=decoder.vocab_size)
    if not verifies_exactly(decoder, verifier):
        _log.warning("no speculation", model=owner, reason="on this machine texts would not be the same with it")
        return None
    _log.info("speculation", model=owner, tokens_a_run=width)
    return verifier


def _width(variant: Variant) -> int:
    return chain_width(variant.graphs["decoder"], variant.state[0].present) if variant.state else 1
