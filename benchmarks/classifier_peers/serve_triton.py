"""Triton by pytriton: python serve_triton.py BUNDLE_FOLDER PRECISION PORT WORKERS THREADS BATCH_SIZE WAIT_MS.

The wheel carries Triton with its Python backend and no other, so that the graph runs on ONNX Runtime in the workers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from classifier import Classifier
from pytriton.decorators import batch as batched
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

FOLDER, PRECISION = Path(sys.argv[1]), sys.argv[2]
PORT, WORKERS, THREADS, BATCH_SIZE = (int(argument) for argument in sys.argv[3:7])
WAIT_MICROSECONDS = round(float(sys.argv[7]) * 1e3)


def _worker() -> Any:
    classifier = Classifier(FOLDER, PRECISION, THREADS)

    @batched
    def infer(data: Any) -> dict[str, Any]:
        """(B, 1) of bytes to (B, 1) of labels and probabilities."""
        answers = classifier.classify([classifier.inputs.prepare(row[0]) for row in data])
        return {
            "label": np.array([[answer["label"].encode()] for answer in answers], object),
            "probability": np.array([[answer["probability"]] for answer in answers], np.float32),
        }

    return infer


if __name__ == "__main__":
    config = TritonConfig(
        grpc_address="127.0.0.1", http_address="127.0.0.1", grpc_port=PORT, http_port=PORT + 1, allow_metrics=False
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="classify",
            infer_func=[_worker() for _ in range(WORKERS)],
            inputs=[Tensor(name="data", dtype=bytes, shape=(1,))],
            outputs=[
                Tensor(name="label", dtype=bytes, shape=(1,)),
                Tensor(name="probability", dtype=np.float32, shape=(1,)),
            ],
            config=ModelConfig(
                max_batch_size=BATCH_SIZE, batcher=DynamicBatcher(max_queue_delay_microseconds=WAIT_MICROSECONDS)
            ),
            strict=False,
        )
        triton.serve()
