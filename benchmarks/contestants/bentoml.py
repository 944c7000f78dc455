"""BentoML: `bentoml serve benchmarks.contestants.bentoml:Classify`, with its settings in BENCHMARK_ARGUMENTS.

They are a JSON list of BUNDLE_FOLDER, PRECISION, WORKERS, THREADS, BATCH_SIZE and WAIT_MS, which is not used here.
"""

import json
import os
from pathlib import Path
from typing import Any

import bentoml

from benchmarks.contestants.classifier import Classifier

_ARGUMENTS = json.loads(os.environ["BENCHMARK_ARGUMENTS"])
FOLDER, PRECISION = Path(_ARGUMENTS[0]), str(_ARGUMENTS[1])
WORKERS, THREADS, BATCH_SIZE = (int(argument) for argument in _ARGUMENTS[2:5])
# Its batcher refuses calls that it expects to answer later than in a minute, as it does by default.
_BATCHING = {"batchable": True, "max_batch_size": BATCH_SIZE, "max_latency_ms": 60_000} if BATCH_SIZE > 1 else {}
_TRAFFIC = {"timeout": 600, "max_concurrency": 1024}


@bentoml.service(workers=WORKERS, traffic=_TRAFFIC, logging={"access": {"enabled": False}})
class Classify:
    """One label for one input."""

    def __init__(self) -> None:
        self._classifier = Classifier(FOLDER, PRECISION, THREADS)

    @bentoml.api(**_BATCHING)  # type: ignore[untyped-decorator]  # BentoML is not there where types are checked
    def classify(self, inputs: list[str]) -> list[dict[str, Any]]:
        """Runs a batch that its adaptive batcher made."""
        return self._classifier.classify([self._classifier.inputs.prepare(text) for text in inputs])
