"""LitServe: python -m benchmarks.contestants.litserve FOLDER PRECISION PORT WORKERS THREADS BATCH_SIZE WAIT_MS."""

import sys
from pathlib import Path
from typing import Any

import litserve

from benchmarks.contestants.classifier import Classifier


class ClassifierAPI(litserve.LitAPI):  # type: ignore[misc]  # LitServe is not there where types are checked
    """One label for one input."""

    def __init__(self, folder: Path, precision: str, threads: int, batch_size: int, wait_s: float) -> None:
        super().__init__(max_batch_size=batch_size, batch_timeout=wait_s)
        self._model = (folder, precision, threads)
        self._is_batched = batch_size > 1

    def setup(self, device: str) -> None:  # noqa: ARG002 (the framework's signature)
        """Loads the model in a worker."""
        self._classifier = Classifier(*self._model)

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """Prepares an input of a JSON body, which LitServe reads if this has no annotations."""
        return self._classifier.inputs.prepare(request["input"])

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Leaves inputs to `predict`: LitServe would stack them, which texts cannot be."""
        return inputs

    def predict(self, inputs: Any) -> Any:
        """Runs a batch; without batching a single input."""
        return self._classifier.classify(inputs) if self._is_batched else self._classifier.classify([inputs])[0]

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns an answer for every input."""
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON body."""
        return output


if __name__ == "__main__":
    port, workers, threads, batch_size = (int(argument) for argument in sys.argv[3:7])
    api = ClassifierAPI(Path(sys.argv[1]), sys.argv[2], threads, batch_size, float(sys.argv[7]) / 1e3)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=workers, timeout=False)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error", access_log=False)
