"""A variant that has been written but not proved yet, opened through the runners that serve.

Shapes: R rows, T tokens, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

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

    def open_classifier(self) -> ClassifierRunner:
        """Opens the graph of a classifier."""
        return ClassifierRunner(self)


class ClassifierRunner:
    """The graph of a stateless model."""

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
            float32 `logits`, (B, C), or (B, T, C) of a token classifier; and `embedding`, (B, D), if there is one.
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

    def classify_texts(self, texts: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """Classifies token ids of any lengths in one padded batch.

        Returns:
            float32 logits: (B, C), or (B, T, C) of a token classifier.
        """
        return self.run_texts(texts)["logits"]

    def run_images(self, pixel_values: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """(B, 3, height, width) float32 -> float32 `logits`, (B, C), and `embedding`, (B, D), if there is one."""
        return self._session.run({"pixel_values": pixel_values})

    def classify_images(self, pixel_values: NDArray[np.float32]) -> NDArray[np.float32]:
        """(B, 3, height, width) float32 -> (B, C) float32 logits."""
        return self.run_images(pixel_values)["logits"]


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


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[NDArray[np.int64]]:
    """Tokenizes texts as a server does."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
    return [np.array(encoding.ids, np.int64) for encoding in encodings]
