"""BentoML: python -m bentoml serve serve_bentoml:Classify, with its settings in BENCHMARK_ARGUMENTS.

They are those of serve_litserve.py without the port: BUNDLE_FOLDER PRECISION WORKERS THREADS BATCH_SIZE WAIT_MS.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import bentoml
from classifier import Classifier

_ARGUMENTS = json.loads(os.environ["BENCHMARK_ARGUMENTS"])
FOLDER, PRECISION = Path(_ARGUMENTS[0]), str(_ARGUMENTS[1])
WORKERS, THREADS, BATCH_SIZE = (int(argument) for argument in _ARGUMENTS[2:5])
_PATIENCE_MS = 60_000
"""Its batcher refuses calls that it expects to answer later than this; the default of a minute is kept."""


_BATCHING = {"batchable": True, "max_batch_size": BATCH_SIZE, "max_latency_ms": _PATIENCE_MS} if BATCH_SIZE > 1 else {}
_TRAFFIC = {"timeout": 600, "max_concurrency": 1024}


@bentoml.service(workers=WORKERS, traffic=_TRAFFIC, logging={"access": {"enabled": False}})
class Classify:
    """One label for one input."""

    def __init__(self) -> None:
        self._classifier = Classifier(FOLDER, PRECISION, THREADS)

    @bentoml.api(**_BATCHING)
    def classify(self, inputs: list[str]) -> list[dict[str, Any]]:
        """Runs a batch that its adaptive batcher made."""
        decode = self._classifier.inputs.decode
        return self._classifier.classify([decode(text) for text in inputs])
