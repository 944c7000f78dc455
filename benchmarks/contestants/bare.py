"""The worker that runs the same graphs without a server: no queue, no text or pictures to decode, no gRPC.

Decoders run on the server's own runner with every row busy, and take the likeliest token; a row that has its tokens
goes on with the next input at once. Beams are rows like others: nothing is ranked across them or moves between them.
Classifiers run on ONNX Runtime in the best fixed batch. The server's inner parts are imported here alone.

    python -m benchmarks.contestants.bare THREADS DEVICE NUM_SLOTS

Shapes: N inputs at a time with K beams each, R = N K rows, V vocabulary.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contestants.classifier import Classifier
from benchmarks.contestants.in_process import Case, Fastest, Run, classifying_ways
from benchmarks.worker import serve
from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.runtime import Runtime

_WARM_UP_STEPS = 3
_BEST_PRECISIONS = {"cpu": ("int8-static", "int8", "fp32"), "cuda": ("fp16", "fp32")}
"""What the server runs if no precision is named."""


class Bare:
    """Answers the requests of the benchmark; models stay loaded."""

    def __init__(self, threads: int, device: Any, num_slots: int) -> None:
        self._threads, self._device, self._num_slots = threads, device, num_slots
        self._fastest: dict[tuple[str, str], Fastest] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Measures a case, in a precision and an order of texts if they are given."""
        precision, order = request.get("precision", ""), request.get("order", "in order")
        if (precision, order) not in self._fastest:
            ways = partial(self._ways, order)
            self._fastest[precision, order] = Fastest(partial(self._load, precision), ways)
        return self._fastest[precision, order].answer(request)

    def _load(self, precision: str, case: Case) -> Any:
        bundle = open_bundle(Path(case["bundle"]))
        variants = bundle.manifest.variants
        chosen = Precision(precision or next(name for name in _BEST_PRECISIONS[self._device] if name in variants))
        if "decoder" not in variants[chosen].graphs:
            classifier = Classifier(bundle.path, chosen, self._threads, self._device)
            return classifier, [classifier.inputs.prepare(one) for one in case["texts"] or case["images"]]
        runtime = Runtime(device=self._device, num_threads=self._threads)
        has_encoder = "encoder" in variants[chosen].graphs
        encoder = EncoderRunner(runtime, bundle, variants[chosen]) if has_encoder else None
        runner = DecoderRunner(runtime, bundle, variants[chosen], num_slots=self._num_slots)
        return runner, encoder, bundle.manifest.special_tokens

    def _ways(self, order: str, model: Any, case: Case, callers: int) -> Mapping[str, Run]:
        if len(model) > 2:
            runner, encoder, special_tokens = model
            num_inputs = min(callers, self._num_slots // case["beam_size"])
            return {"": _BareLoop(runner, encoder, special_tokens, case, num_inputs).run}
        classifier, items = model
        run, collate = classifier.run, classifier.inputs.collate
        return classifying_ways(items, callers, collate=collate, run=run, orders=(order,))


class _BareLoop:
    """Decodes with every row busy."""

    def __init__(
        self, runner: DecoderRunner, encoder: EncoderRunner | None, special_tokens: Any, case: Case, n: int
    ) -> None:
        self._runner, self._encoder, self._special_tokens = runner, encoder, special_tokens
        limits = case["new_tokens"] or [case["max_new_tokens"] or runner.max_length] * len(case["token_ids"])
        self._inputs: Iterator[tuple[list[int], int]] = cycle(zip(case["token_ids"], limits, strict=True))
        self._eos_id = special_tokens.eos if special_tokens and not case["new_tokens"] else None
        self._num_beams: int = case["beam_size"]
        self._token_ids = np.zeros(n * self._num_beams, np.int64)  # (R,) what the next step reads
        self._positions = np.zeros(n, np.int64)  # (N,) and where
        self._num_new = np.zeros(n, np.int64)  # (N,) tokens of each answer so far
        self._limits = np.zeros(n, np.int64)  # (N,) and at the end
        self._encoded: list[Any] = [None] * n

    def run(self, seconds: float) -> dict[str, Any]:
        """Runs for so many seconds, after a few steps that meet cold memory."""
        n = len(self._positions)
        self._begin(np.arange(n))
        # As if they had begun one after another: rows that all ended at once would fill the time in waves.
        self._num_new += (self._limits - 1) * np.arange(n) // n
        for _ in range(_WARM_UP_STEPS):
            self._step()
        num_ended, times_s = 0, [time.perf_counter()]
        while len(times_s) == 1 or times_s[-1] - times_s[0] < seconds:
            num_ended += self._step()
            times_s.append(time.perf_counter())
        num_tokens = (len(times_s) - 1) * n + (num_ended if self._encoder is None else 0)  # a prefill gives one too
        rates = {"inputs_per_s": num_ended, "tokens_per_s": num_tokens}
        step_ms = float(np.median(np.diff(times_s))) * 1e3
        return {name: count / (times_s[-1] - times_s[0]) for name, count in rates.items()} | {"step_p50_ms": step_ms}

    def _step(self) -> int:
        """Decodes one token a row and begins the next inputs where some have ended; returns how many did."""
        positions: NDArray[np.int64] = self._positions.repeat(self._num_beams)  # (R,)
        logits = self._runner.decode(self._token_ids, positions)  # (R, V)
        self._token_ids = logits.argmax(axis=-1)  # (R,)
        self._positions += 1
        self._num_new += 1
        has_ended = (self._num_new >= self._limits) | (self._positions >= self._runner.max_length)
        if self._eos_id is not None:
            has_ended |= self._token_ids[:: self._num_beams] == self._eos_id
        ended = np.flatnonzero(has_ended)
        if ended.size:
            self._begin(ended)
        return len(ended)

    def _begin(self, numbers: NDArray[np.intp]) -> None:
        """Begins the next inputs in the place of those with these numbers."""
        taken = [next(self._inputs) for _ in numbers]
        self._limits[numbers] = [limit for _, limit in taken]
        sources = [np.array(ids) for ids, _ in taken]
        if self._encoder is None:
            for number, ids in zip(numbers.tolist(), sources, strict=True):
                self._prefill(number, ids)
            return
        all_encoded = self._encoder.encode([EncoderInput.of_tokens(source) for source in sources])
        for number, encoded in zip(numbers.tolist(), all_encoded, strict=True):
            self._encoded[number] = encoded
            self._positions[number] = self._num_new[number] = 0
            for row in range(number * self._num_beams, (number + 1) * self._num_beams):
                self._token_ids[row] = self._special_tokens.bos
                self._runner.begin(row, encoded)
        self._runner.set_sources(self._encoded)

    def _prefill(self, row: int, ids: NDArray[np.int64]) -> None:
        """Reads a prompt in the server's chunks; its last logits give the first token."""
        chunk = self._runner.prefill_chunk
        for start in range(0, len(ids), chunk):
            logits = self._runner.prefill(row, ids[start : start + chunk], start)  # (V,)
        self._token_ids[row] = logits.argmax()
        self._positions[row] = len(ids)
        self._num_new[row] = 1


if __name__ == "__main__":
    serve(Bare(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])).answer, ["onnxruntime", "numpy"])
