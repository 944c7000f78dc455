"""A translation model's graphs run bare, in a process of their own: what the machine could do without a server.

Every row is busy; a sentence that has its tokens is replaced by the next at once, and sentences that end together are
encoded together. Beams are rows like others here: their tokens are the likeliest, nothing is ranked across them and
nothing moves between them, so that a search's own work counts against the server.

Shapes: N sentences of K beams, R = N K rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.runtime import Runtime

_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BareTranslation:
    """What to run without a server."""

    folder: Path
    """Of the bundle."""
    precision: str
    num_threads: int
    sources: tuple[tuple[int, ...], ...]
    """Tokens of the sentences; a translation gets as many."""
    num_slots: int
    """Most rows."""


class BareTranslator:
    """A process that runs models bare; it keeps them loaded until it is closed."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def measure(self, model: BareTranslation, num_sentences: int, num_beams: int, seconds: float) -> dict[str, Any]:
        """Tokens a second with so many sentences of so many beams; beams of a sentence count once."""
        return self._pool.submit(_measure, model, num_sentences, num_beams, seconds).result()


# What follows runs in that process.

_loaded: dict[tuple[Path, str], tuple[DecoderRunner, EncoderRunner, int]] = {}


def _measure(model: BareTranslation, num_sentences: int, num_beams: int, seconds: float) -> dict[str, Any]:
    key = (model.folder, model.precision)
    if key not in _loaded:
        bundle = open_bundle(model.folder)
        variant = bundle.manifest.variants[Precision(model.precision)]
        runtime = Runtime(device="cpu", num_threads=model.num_threads)
        special_tokens = bundle.manifest.special_tokens
        assert special_tokens is not None, "the manifest's validator demands it"
        assert special_tokens.bos is not None, "the benchmark's models have one"
        decoder = DecoderRunner(runtime, bundle, variant, num_slots=model.num_slots)
        _loaded[key] = decoder, EncoderRunner(runtime, bundle, variant), special_tokens.bos
    decoder, encoder, bos_id = _loaded[key]
    loop = _BareLoop(
        decoder, encoder, bos_id=bos_id, sources=model.sources, num_sentences=num_sentences, num_beams=num_beams
    )
    return loop.measure(seconds)


class _BareLoop:
    """Decodes with every row busy."""

    def __init__(
        self,
        decoder: DecoderRunner,
        encoder: EncoderRunner,
        *,
        bos_id: int,
        sources: tuple[tuple[int, ...], ...],
        num_sentences: int,
        num_beams: int,
    ) -> None:
        self._decoder, self._encoder, self._bos_id = decoder, encoder, bos_id
        self._sources: Iterator[tuple[int, ...]] = cycle(sources)
        self._num_beams = num_beams
        self._token_ids = np.zeros(num_sentences * num_beams, np.int64)  # (R,) what the next step reads
        self._positions = np.zeros(num_sentences, np.int64)  # (N,) and where
        self._lengths = np.zeros(num_sentences, np.int64)  # (N,) tokens that each translation gets
        self._encoded: list[Any] = [None] * num_sentences
        self._begin(np.arange(num_sentences))
        # As if they had begun one after another: sentences that all ended at once would be encoded in large batches.
        self._positions = self._lengths * np.arange(num_sentences) // num_sentences

    def measure(self, seconds: float) -> dict[str, Any]:
        """Runs for `seconds`, after a few steps that meet cold memory."""
        for _ in range(_WARM_UP_STEPS):
            self._step()
        steps_s = []
        begun_s = step_s = time.perf_counter()
        while step_s - begun_s < seconds:
            self._step()
            steps_s.append(time.perf_counter() - step_s)
            step_s = time.perf_counter()
        return {
            "tokens_per_s": len(steps_s) * len(self._positions) / (step_s - begun_s),
            "step_p50_ms": float(np.median(steps_s)) * 1e3,
        }

    def _step(self) -> None:
        """Decodes one token a row, and begins the next sentences where some have ended."""
        positions: NDArray[np.int64] = self._positions.repeat(self._num_beams)  # (R,)
        logits = self._decoder.decode(self._token_ids, positions)  # (R, V)
        self._token_ids = logits.argmax(axis=-1)
        self._positions += 1
        if (ended := np.flatnonzero(self._positions >= self._lengths)).size:
            self._begin(ended)

    def _begin(self, sentences: NDArray[np.intp]) -> None:
        sources = [np.array(next(self._sources)) for _ in sentences]
        all_encoded = self._encoder.encode([EncoderInput.of_tokens(source) for source in sources])
        for sentence, source, encoded in zip(sentences, sources, all_encoded, strict=True):
            self._encoded[sentence] = encoded
            self._positions[sentence] = 0
            self._lengths[sentence] = len(source)
            rows = slice(sentence * self._num_beams, (sentence + 1) * self._num_beams)
            self._token_ids[rows] = self._bos_id
        self._decoder.set_sources(self._encoded)
