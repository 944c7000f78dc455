"""A classifier's graph run bare: ONNX Runtime in a process of its own, on inputs that are prepared beforehand.

No queue, no text, no pictures to decode, no gRPC. Batches are of a fixed size, of inputs in the order they are sent in
(`in order`) or sorted by length (`sorted`), which a server that answers as it is asked can only come near to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

from classifier_peers.classifier import Classifier
from closed_loop import percentile

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
ORDERS = ("in order", "sorted")


@dataclass(frozen=True, slots=True, kw_only=True)
class BareClassifier:
    """What to run."""

    folder: Path
    """Of the bundle."""
    precision: str
    threads: int
    inputs: tuple[str | bytes, ...]


class BareProcess:
    """A process that runs graphs bare and keeps them loaded until it is closed."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def measure(self, model: BareClassifier, batch_size: int, order: str, seconds: float) -> dict[str, Any]:
        """Runs batch after batch.

        Returns:
            `inputs_per_s`, and `latency_p50_ms` and `latency_p99_ms` of a run.
        """
        return self._pool.submit(_measure, model, batch_size, order, seconds).result()


# What follows runs in that process.

_loaded: dict[tuple[Path, str], tuple[Classifier, list[Any]]] = {}


def _measure(model: BareClassifier, batch_size: int, order: str, seconds: float) -> dict[str, Any]:
    classifier, items = _load(model)
    if order == "sorted":
        items = sorted(items, key=len)  # pictures are all as long as each other
    batches = [classifier.inputs.collate(batch) for batch in cut_batches(items, batch_size)]
    return time_batches(classifier.run, batches, seconds)


def _load(model: BareClassifier) -> tuple[Classifier, list[Any]]:
    """Opens a graph and prepares its inputs, once."""
    key = (model.folder, model.precision)
    if key not in _loaded:
        classifier = Classifier(model.folder, model.precision, model.threads)
        data = (value if isinstance(value, bytes) else value.encode() for value in model.inputs)
        _loaded[key] = classifier, [classifier.inputs.prepare(one) for one in data]
    return _loaded[key]


def time_batches(
    run: Callable[[dict[str, Any]], Any], batches: Sequence[dict[str, Any]], seconds: float
) -> dict[str, float]:
    """Runs batch after batch in whole rounds: none, and so no long one, is met more often than the others.

    Returns:
        `inputs_per_s`, and `latency_p50_ms` and `latency_p99_ms` of a run.
    """
    run(max(batches, key=lambda feeds: sum(tensor.size for tensor in feeds.values())))  # takes the most memory
    times_ms: list[float] = []
    num_inputs = 0
    begun_s = time.perf_counter()
    for number, feeds in enumerate(cycle(batches), 1):
        start_s = time.perf_counter()
        run(feeds)
        end_s = time.perf_counter()
        times_ms.append((end_s - start_s) * 1e3)
        num_inputs += len(next(iter(feeds.values())))
        if end_s - begun_s >= seconds and number % len(batches) == 0:
            break
    times_ms.sort()
    return {
        "inputs_per_s": num_inputs / (end_s - begun_s),
        "latency_p50_ms": percentile(times_ms, 50),
        "latency_p99_ms": percentile(times_ms, 99),
    }


def cut_batches(items: Sequence[Any], batch_size: int) -> list[list[Any]]:
    """Cuts items into batches that are all full, going round until every item is in one."""
    num_batches = -(-len(items) // batch_size)
    return [
        [items[(start + offset) % len(items)] for offset in range(batch_size)]
        for start in range(0, num_batches * batch_size, batch_size)
    ]
