"""The same models run bare, in a process of their own: what the machine could do without queues, text and gRPC.

Classifiers: ONNX Runtime on batches of a fixed number of prepared inputs, sorted by length. Decoders: the runner's
steps with all rows busy, the most likely token each time; a row that ends goes on with the next input at once.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from inputs import encode_texts
from numpy.typing import NDArray

from headway_server.batching import BatchGraph
from headway_server.bundles import Bundle, Precision, Task, Variant, open_bundle
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import CrossTensors, EncoderRunner
from headway_server.preprocessing import ImageLimits, ImagePreprocessor
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.outputs import LOGITS
from headway_server.tasks.text.model import text_graph, text_tensors

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
"""Fixed batches of a classifier that are tried."""
_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BareModel:
    """What to run without a server."""

    folder: Path
    """Of the bundle."""
    precision: str
    device: Literal["cpu", "cuda"]
    num_threads: int | None
    inputs: tuple[str | bytes, ...]
    new_tokens: int
    """Tokens after a prompt."""
    num_slots: int
    """Most rows of a decoder."""


class BareProcess:
    """A process that runs models bare; it keeps them loaded until it is closed."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def measure_batches(self, model: BareModel, seconds: float) -> list[dict[str, Any]]:
        """Inputs a second of a classifier at each of `BATCH_SIZES`, `seconds` for each."""
        return self._pool.submit(_measure_batches, model, seconds).result()

    def measure_decoding(self, model: BareModel, num_rows: int, seconds: float) -> dict[str, Any]:
        """Inputs and tokens a second of a decoder with `num_rows` rows."""
        return self._pool.submit(_measure_decoding, model, num_rows, seconds).result()


# What follows runs in that process.

_loaded: dict[tuple[Path, str], Any] = {}


def _load(model: BareModel, make: Callable[[Runtime, Bundle, Variant], Any]) -> Any:
    """Makes what runs a model, once."""
    key = (model.folder, model.precision)
    if key not in _loaded:
        bundle = open_bundle(model.folder)
        runtime = Runtime(device=model.device, num_threads=model.num_threads)
        _loaded[key] = make(runtime, bundle, bundle.manifest.variants[Precision(model.precision)])
    return _loaded[key]


def _measure_batches(model: BareModel, seconds: float) -> list[dict[str, Any]]:
    def make(runtime: Runtime, bundle: Bundle, variant: Variant) -> Any:
        session = runtime.open(bundle, variant.graphs["model"])
        if bundle.manifest.task is Task.IMAGE_CLASSIFICATION:
            return BatchGraph(session), [{"pixel_values": pixels} for pixels in _pixels(bundle, model)]
        ids = encode_texts(bundle, [text for text in model.inputs if isinstance(text, str)])
        return text_graph(session, bundle.manifest.special_tokens), [text_tensors(row) for row in sorted(ids, key=len)]

    graph, items = _load(model, make)
    figures = []
    for batch_size in BATCH_SIZES:
        batches = [graph.collate(batch) for batch in _batches(items, batch_size)]
        graph.run(batches[0], (LOGITS,))
        begun_s, count = time.perf_counter(), 0
        for feeds in cycle(batches):
            graph.run(feeds, (LOGITS,))
            count += batch_size
            if (elapsed_s := time.perf_counter() - begun_s) >= seconds:
                break
        figures.append({"batch_size": batch_size, "inputs_per_s": count / elapsed_s})
    return figures


def _pixels(bundle: Bundle, model: BareModel) -> list[NDArray[np.float32]]:
    settings = bundle.manifest.image_preprocessing
    assert settings is not None, "the manifest's validator demands it"
    defaults = ServerSettings(store=model.folder)
    limits = ImageLimits(
        max_bytes=int(defaults.max_image_mib * 2**20), max_pixels=int(defaults.max_image_megapixels * 1e6)
    )
    images = [image for image in model.inputs if isinstance(image, bytes)]
    fields = [f"images[{index}]" for index in range(len(images))]
    prepared = asyncio.run(ImagePreprocessor(settings, limits).prepare_batch(images, fields=fields))
    return [image.pixel_values for image in prepared]


def _batches(items: Sequence[Any], batch_size: int) -> list[list[Any]]:
    """Cuts items into batches that are all full, going round until every item is in one."""
    num_batches = -(-len(items) // batch_size)
    return [
        [items[(start + offset) % len(items)] for offset in range(batch_size)]
        for start in range(0, num_batches * batch_size, batch_size)
    ]


def _measure_decoding(model: BareModel, num_rows: int, seconds: float) -> dict[str, Any]:
    def make(runtime: Runtime, bundle: Bundle, variant: Variant) -> tuple[Any, ...]:
        decoder = DecoderRunner(runtime, bundle, variant, num_slots=model.num_slots)
        encoder = EncoderRunner(runtime, bundle, variant) if "encoder" in variant.graphs else None
        return bundle, decoder, encoder

    bundle, decoder, encoder = _load(model, make)
    texts = encode_texts(bundle, [text for text in model.inputs if isinstance(text, str)])
    loop = _BareLoop(bundle, decoder, encoder, texts, num_rows=num_rows, new_tokens=model.new_tokens)
    return loop.measure(seconds)


class _BareLoop:
    """Decodes with every row busy."""

    def __init__(
        self,
        bundle: Bundle,
        decoder: DecoderRunner,
        encoder: EncoderRunner | None,
        texts: Sequence[NDArray[np.int64]],
        *,
        num_rows: int,
        new_tokens: int,
    ) -> None:
        tokens = bundle.manifest.special_tokens
        self._bos_id = tokens.bos if tokens else None
        self._eos_id = tokens.eos if tokens else None
        self._decoder = decoder
        self._encoder = encoder
        self._texts: Iterator[NDArray[np.int64]] = cycle(texts)
        self._num_rows = num_rows
        self._new_tokens = new_tokens if encoder is None else decoder.max_length
        self._token_ids = np.zeros(num_rows, np.int64)  # (R,) what the next step reads
        self._positions = np.zeros(num_rows, np.int64)  # (R,) and where
        self._num_new = np.zeros(num_rows, np.int64)  # (R,) tokens of each answer so far
        self._sources: list[CrossTensors | None] = [None] * num_rows
        self._fill(list(range(num_rows)))
        # As if they had begun one after another: rows that all ended at once would fill a window in waves.
        self._num_new += np.arange(num_rows) * (self._new_tokens - 1) // num_rows

    def measure(self, seconds: float) -> dict[str, Any]:
        """Runs for `seconds`, after a few steps that meet cold memory."""
        for _ in range(_WARM_UP_STEPS):
            self._step()
        num_inputs = num_tokens = 0
        steps_ms = []
        begun_s = step_s = time.perf_counter()
        while step_s - begun_s < seconds:
            num_ended = self._step()
            steps_ms.append((time.perf_counter() - step_s) * 1e3)
            step_s = time.perf_counter()
            num_inputs += num_ended
            num_tokens += self._num_rows + (num_ended if self._encoder is None else 0)  # a prefill gives a token too
        return {
            "rows": self._num_rows,
            "inputs_per_s": num_inputs / (step_s - begun_s),
            "tokens_per_s": num_tokens / (step_s - begun_s),
            "step_p50_ms": statistics.median(steps_ms),
        }

    def _step(self) -> int:
        """Decodes one token a row and refills the rows that ended; returns how many did."""
        logits = self._decoder.decode(self._token_ids, self._positions)  # (R, V)
        self._token_ids = logits.argmax(axis=-1)  # (R,)
        self._positions += 1
        self._num_new += 1
        has_ended = (self._num_new >= self._new_tokens) | (self._positions >= self._decoder.max_length)
        if self._eos_id is not None:
            has_ended |= self._token_ids == self._eos_id
        ended = np.flatnonzero(has_ended).tolist()
        if ended:
            self._fill(ended)
        return len(ended)

    def _fill(self, rows: list[int]) -> None:
        """Begins the next inputs in `rows`."""
        texts = [next(self._texts) for _ in rows]
        if self._encoder is None:
            for row, ids in zip(rows, texts, strict=True):
                self._prefill(row, ids)
            return
        assert self._bos_id is not None, "the server demands it of translation models"
        self._token_ids[rows] = self._bos_id
        self._positions[rows] = 0
        self._num_new[rows] = 0
        encoded = self._encoder.encode([EncoderInput.of_tokens(text) for text in texts])
        for row, source in zip(rows, encoded, strict=True):
            self._sources[row] = source
            self._decoder.begin(row, source)
        self._decoder.set_sources([source for source in self._sources if source is not None])

    def _prefill(self, row: int, ids: NDArray[np.int64]) -> None:
        """Reads a prompt in the server's chunks; its last logits give the first token."""
        chunk = self._decoder.prefill_chunk
        for start in range(0, len(ids), chunk):
            logits = self._decoder.prefill(row, ids[start : start + chunk], start)  # (V,)
        self._token_ids[row] = logits.argmax()
        self._positions[row] = len(ids)
        self._num_new[row] = 1
