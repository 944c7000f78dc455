"""Encoded source sentences and what makes them.

Shapes: N sources, S source tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Bundle, TensorSpec, Variant
from headway_server.decoding.runner.state import fixed_size
from headway_server.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTensors:
    """What a decoder reads of one encoded source sentence."""

    num_tokens: int
    """S, padding not counted."""
    tensors: dict[str, NDArray[Any]]
    """Each (heads, S, head_dim), by the name that the encoder and the decoder give it."""
    initial: dict[str, NDArray[Any]] = field(default_factory=dict)
    """What the state without positions starts from, each of the shape of a slot, by the encoder's name."""


class EncoderRunner:
    """The encoder of a translation model. Calls may come from several threads."""

    def __init__(self, runtime: Runtime, bundle: Bundle, variant: Variant) -> None:
        """Opens the variant's encoder.

        Raises:
            BundleError: The graph is not what the manifest says.
        """
        self._session = runtime.open(bundle, variant.graphs["encoder"])
        self._cross = variant.cross
        self._initial = [state.initial for state in variant.state if state.initial is not None]

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
                num_tokens=length,
                tensors={name: outputs[name][row, :, :length].copy() for name in self._cross},
                initial={name: outputs[name][row].copy() for name in self._initial},
            )
            for row, length in enumerate(lengths)
        ]


def bytes_per_token(spec: TensorSpec) -> int:
    """Returns the bytes of a position of (rows, heads, positions, head_dim)."""
    return fixed_size(spec, 1) * fixed_size(spec, 3) * np.dtype(spec.dtype).itemsize
