"""A variant that has been written but not proved yet, opened through the runners that serve.

Shapes: R rows, T tokens, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_export.source import ExportSource
from headway_server.bundles import Bundle, Precision, Variant
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import CrossTensors, EncoderRunner
from headway_server.preprocessing.image import normalize
from headway_server.runtime import Runtime

NUM_SLOTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A variant in a staged bundle, with the module it was made from."""

    source: ExportSource
    bundle: Bundle
    precision: Precision
    variant: Variant
    runtime: Runtime

    def open_decoder(self) -> DecoderRunner:
        """Opens the decoder with `NUM_SLOTS` slots."""
        return DecoderRunner(self.runtime, self.bundle, self.variant, num_slots=NUM_SLOTS)

    def open_encoder(self) -> EncoderRunner:
        """Opens the encoder of a translation model."""
        return EncoderRunner(self.runtime, self.bundle, self.variant)

    def open_stateless(self) -> StatelessRunner:
        """Opens the graph of a model without state."""
        return StatelessRunner(self)


class StatelessRunner:
    """The graph of a model without state."""

    def __init__(self, candidate: Candidate) -> None:
        self._session = candidate.runtime.open(candidate.bundle, candidate.variant.graphs["model"])

    def run_texts(
        self, texts: Sequence[NDArray[np.int64]], types: Sequence[NDArray[np.int64]] | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """Runs token ids of any lengths in one padded batch.

        Args:
            texts: The ids of each text.
            types: The types of its tokens, for a graph that reads them; None: all are 0.

        Returns:
            The outputs of the graph by name, float32.
        """
        input_ids = np.zeros((len(texts), max(len(text) for text in texts)), np.int64)  # (B, T)
        mask, token_types = np.zeros_like(input_ids), np.zeros_like(input_ids)
        for row, text in enumerate(texts):
            input_ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
            if types is not None:
                token_types[row, : len(text)] = types[row]
        feeds = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": token_types}
        return self._session.run({spec.name: feeds[spec.name] for spec in self._session.graph.inputs})

    def run_images(self, pixel_values: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Runs images, float32 (B, 3, height, width), and returns the outputs of the graph by name, float32."""
        return self._session.run({"pixel_values": pixel_values})


def prefill(runner: DecoderRunner, slot: int, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Reads a prompt into a slot, chunk by chunk, and returns a copy of the last logits, (V,)."""
    logits = np.empty(0, np.float32)
    for start in range(0, len(token_ids), runner.prefill_chunk):
        logits = runner.prefill(slot, token_ids[start : start + runner.prefill_chunk], start)
    return logits.copy()


def open_sources(runner: DecoderRunner, sources: Sequence[CrossTensors]) -> None:
    """Lets encoded sentences begin in the slots from 0 on."""
    runner.set_sources(sources)
    for slot, source in enumerate(sources):
        runner.begin(slot, source)


def pixel_values_of(source: ExportSource, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Makes a model's input of pixels of the right size, as a server does.

    (N, height, width, 3) -> (N, 3, height, width) float32.
    """
    assert source.image_preprocessing is not None, "an image model has its preprocessing"
    return np.stack([normalize(Image.fromarray(image), source.image_preprocessing) for image in images])
