"""LitServe: python serve_litserve.py BUNDLE_FOLDER PRECISION PORT WORKERS THREADS BATCH_SIZE WAIT_MS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import litserve
from classifier import Classifier

FOLDER, PRECISION = Path(sys.argv[1]), sys.argv[2]
PORT, WORKERS, THREADS, BATCH_SIZE = (int(argument) for argument in sys.argv[3:7])
WAIT_S = float(sys.argv[7]) / 1e3


class ClassifierAPI(litserve.LitAPI):
    """One label for one input."""

    def setup(self, device: str) -> None:  # noqa: ARG002 (the framework's signature)
        """Loads the model in a worker."""
        self._classifier = Classifier(FOLDER, PRECISION, THREADS)

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """Prepares an input of a JSON body, which LitServe reads where this has no annotations."""
        return self._classifier.inputs.decode(request["input"])

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Inputs are collated by `predict`: by itself LitServe would stack them, which texts cannot be."""
        return inputs

    def predict(self, inputs: Any) -> Any:
        """Runs a batch; without batching a single input."""
        if BATCH_SIZE == 1:
            return self._classifier.classify([inputs])[0]
        return self._classifier.classify(inputs)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """There is an answer for every input already."""
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        """The answer is JSON already."""
        return output


if __name__ == "__main__":
    api = ClassifierAPI(max_batch_size=BATCH_SIZE, batch_timeout=WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=WORKERS, timeout=False)
    server.run(host="127.0.0.1", port=PORT, generate_client_file=False, log_level="error", access_log=False)
