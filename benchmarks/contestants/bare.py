"""The same graphs without a server: no queue, no text or pictures to decode, no gRPC. The worker that runs them.

Decoders run on the server's own runner with every row busy, and take the likeliest token; a row that has its tokens goes on
with the next input at once. Beams are rows like others: nothing is ranked across them and nothing moves between them.
Classifiers run on ONNX Runtime in the best fixed batch. The server's inner parts are imported here alone.

    python -m benchmarks.contestants.bare THREADS DEVICE NUM_SLOTS

Shapes: N inputs at a time with K beams each, R = N K rows, V vocabulary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.contestants.classifier import Classifier
from benchmarks.contestants.in_process import Case, Fastest, Run, classifying_ways
from benchmarks.worker import serve
from headway_server.bundles import Precision, open_bundle
from headway_server.engine.encoder_runner import EncoderRunner
from headway_server.engine.memory_plan import plan_memory
from headway_server.engine.runner import DecoderRunner, slot_sizes
from headway_server.engine.settings import EngineSettings
from headway_server.runtime import Runtime

_WARM_UP_STEPS = 3
_BEST_PRECISIONS = {"cpu": ("int8", "fp32"), "cuda": ("fp16", "fp32")}
"""What the server runs if no precision is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
    """What decodes."""

    runner: DecoderRunner
    encoder: EncoderRunner | None
    bos_id: int
    eos_id: int | None


class Bare:
    """Answers the requests of the benchmark; models stay loaded."""

    def __init__(self, threads: int, device: Literal["cpu", "cuda"], num_slots: int) -> None:
        self._threads = threads
        self._device = device
        self._num_slots = num_slots
        self._decoders: dict[tuple[Path, str], _Decoder] = {}
        self._classifiers: dict[tuple[Path, str], tuple[Classifier, list[Any]]] = {}
        self._fastest: dict[tuple[str, str], Fastest] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Measures a case, in a precision and an order if they are given; or tells the sizes of a bundle."""
        if "sizes_of" in request:
            return self._sizes(Path(request["sizes_of"]), request["precision"])
        precision, order = request.get("precision", ""), request.get("order", "in order")
        fastest = self._fastest.setdefault((precision, order), Fastest(partial(self._ways, precision, order)))
        return fastest.answer(request)

    def _ways(self, precision: str, order: str, case: Case, callers: int) -> Mapping[str, Run]:
        folder = Path(case["bundle"])
        variants = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))["variants"]
        chosen = precision or next(name for name in _BEST_PRECISIONS[self._device] if name in variants)
        if "decoder" in variants[chosen]["graphs"]:
            decoder = self._decoder(folder, chosen)
            num_inputs = min(callers, self._num_slots // case["beam_size"])
            return {"": _BareLoop(decoder, case, num_inputs).run}
        classifier, items = self._classifier(folder, chosen, case)
        run, collate = classifier.run, classifier.inputs.collate
        return classifying_ways(items, callers, collate=collate, run=run, orders=(order,))

    def _decoder(self, folder: Path, precision: str) -> _Decoder:
        if (folder, precision) not in self._decoders:
            bundle = open_bundle(folder)
            variant = bundle.manifest.variants[Precision(precision)]
            runtime = Runtime(device=self._device, num_threads=self._threads)
            tokens = bundle.manifest.special_tokens
            self._decoders[folder, precision] = _Decoder(
                runner=DecoderRunner(runtime, bundle, variant, num_slots=self._num_slots),
                encoder=EncoderRunner(runtime, bundle, variant) if "encoder" in variant.graphs else None,
                bos_id=(tokens.bos if tokens else None) or 0,
                eos_id=tokens.eos if tokens else None,
            )
        return self._decoders[folder, precision]

    def _classifier(self, folder: Path, precision: str, case: Case) -> tuple[Classifier, list[Any]]:
        if (folder, precision) not in self._classifiers:
            classifier = Classifier(folder, precision, self._threads, self._device)
            items = [classifier.inputs.prepare(text) for text in case["texts"] or case["images"]]
            self._classifiers[folder, precision] = classifier, items
        return self._classifiers[folder, precision]

    def _sizes(self, folder: Path, precision: str) -> dict[str, float]:
        """Returns what a server holds of a decoder: the files of its weights and the cache of all slots, in MiB."""
        manifest = open_bundle(folder).manifest
        sizes = slot_sizes(manifest, manifest.variants[Precision(precision)])
        plan = plan_memory(EngineSettings(num_slots=self._num_slots), sizes, available=None, owner=manifest.name)
        weights = (file.size_bytes for path, file in manifest.files.items() if path.startswith(f"{precision}/"))
        return {"weights_mib": round(sum(weights) / 2**20, 1), "cache_mib": round(plan.total_bytes / 2**20, 1)}


class _BareLoop:
    """Decodes with every row busy."""

    def __init__(self, decoder: _Decoder, case: Case, num_inputs: int) -> None:
        self._runner, self._encoder = decoder.runner, decoder.encoder
        self._bos_id, self._eos_id = decoder.bos_id, None if case["new_tokens"] else decoder.eos_id
        most = case["max_new_tokens"] or self._runner.max_length
        limits = case["new_tokens"] or [most] * len(case["token_ids"])
        self._inputs: Iterator[tuple[list[int], int]] = cycle(zip(case["token_ids"], limits, strict=True))
        self._num_beams = case["beam_size"]
        self._token_ids = np.zeros(num_inputs * self._num_beams, np.int64)  # (R,) what the next step reads
        self._positions = np.zeros(num_inputs, np.int64)  # (N,) and where
        self._num_new = np.zeros(num_inputs, np.int64)  # (N,) tokens of each answer so far
        self._limits = np.zeros(num_inputs, np.int64)  # (N,) and at the end
        self._encoded: list[Any] = [None] * num_inputs

    def run(self, seconds: float) -> dict[str, Any]:
        """Runs for so many seconds, after a few steps that meet cold memory."""
        everybody = np.arange(len(self._positions))
        self._begin(everybody)
        # As if they had begun one after another: rows that all ended at once would fill the time in waves.
        self._num_new += (self._limits - 1) * everybody // len(everybody)
        for _ in range(_WARM_UP_STEPS):
            self._step()
        num_ended, times_s = 0, [time.perf_counter()]
        while len(times_s) == 1 or times_s[-1] - times_s[0] < seconds:
            num_ended += self._step()
            times_s.append(time.perf_counter())
        elapsed_s, steps_s = times_s[-1] - times_s[0], np.diff(times_s)
        # A prefill gives a token too.
        num_tokens = len(steps_s) * len(everybody) + (num_ended if self._encoder is None else 0)
        return {
            "inputs_per_s": num_ended / elapsed_s,
            "tokens_per_s": num_tokens / elapsed_s,
            "step_p50_ms": float(np.median(steps_s)) * 1e3,
        }

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
        for number, encoded in zip(numbers.tolist(), self._encoder.encode(sources), strict=True):
            self._encoded[number] = encoded
            self._positions[number] = self._num_new[number] = 0
            for row in range(number * self._num_beams, (number + 1) * self._num_beams):
                self._token_ids[row] = self._bos_id
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
    bare = Bare(int(sys.argv[1]), cast("Literal['cpu', 'cuda']", sys.argv[2]), int(sys.argv[3]))
    serve(bare.answer, ["onnxruntime", "numpy"])
