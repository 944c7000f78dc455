"""Triton: python -m benchmarks.contestants.triton FOLDER PRECISION PORT WORKERS THREADS BATCH_SIZE WAIT_MS.

It comes by pytriton, whose wheel carries the Python backend and no other, so that the graph runs on ONNX Runtime in
Triton's Python workers. It is called over HTTP with JSON, as the other servers are.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from pytriton.decorators import batch as batched
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.contestants.classifier import Classifier


def _worker(folder: Path, precision: str, threads: int) -> Any:
    classifier = Classifier(folder, precision, threads)

    @batched  # type: ignore[untyped-decorator]  # Triton is not there where types are checked
    def infer(text: Any) -> dict[str, Any]:
        """(B, 1) of bytes to (B, 1) of labels and probabilities."""
        answers = classifier.classify([classifier.inputs.prepare(row[0].decode()) for row in text])
        return {
            "label": np.array([[answer["label"].encode()] for answer in answers], object),
            "probability": np.array([[answer["probability"]] for answer in answers], np.float32),
        }

    return infer


def main() -> None:
    """Serves until it is ended."""
    port, workers, threads, batch_size = (int(argument) for argument in sys.argv[3:7])
    config = TritonConfig(
        http_address="127.0.0.1", http_port=port, grpc_address="127.0.0.1", grpc_port=port + 1, allow_metrics=False
    )
    batcher = DynamicBatcher(max_queue_delay_microseconds=round(float(sys.argv[7]) * 1e3))
    with Triton(config=config) as triton:
        triton.bind(
            model_name="classify",
            infer_func=[_worker(Path(sys.argv[1]), sys.argv[2], threads) for _ in range(workers)],
            inputs=[Tensor(name="text", dtype=bytes, shape=(1,))],
            outputs=[
                Tensor(name="label", dtype=bytes, shape=(1,)),
                Tensor(name="probability", dtype=np.float32, shape=(1,)),
            ],
            config=ModelConfig(max_batch_size=batch_size, batcher=batcher),
            strict=False,
        )
        triton.serve()


if __name__ == "__main__":
    main()
