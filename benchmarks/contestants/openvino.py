"""OpenVINO in-process on prepared inputs, in the best fixed batch of the best order, as the bare graph is.

python -m benchmarks.contestants.openvino THREADS fp32|int8 f32|bf16      # the graph, and what OpenVINO computes in
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import openvino

from benchmarks.contestants.classifier import Inputs
from benchmarks.contestants.in_process import Case, Fastest, Run, classifying_ways
from benchmarks.worker import serve

_models: dict[str, tuple[Inputs, list[Any], Any]] = {}


def _ways(threads: int, precision: str, hint: str, case: Case, callers: int) -> Mapping[str, Run]:
    folder = case["bundle"]
    if folder not in _models:
        inputs = Inputs(Path(folder))
        hints = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
        hints |= {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}  # all threads on one batch
        model = openvino.Core().compile_model(str(inputs.graph_file(precision)), "CPU", hints)
        items = [inputs.prepare(text) for text in case["texts"] or case["images"]]
        _models[folder] = inputs, items, model.create_infer_request()
    inputs, items, request = _models[folder]
    orders = ("in order", "sorted") if case["texts"] else ("in order",)
    return classifying_ways(items, callers, collate=inputs.collate, run=request.infer, orders=orders)


if __name__ == "__main__":
    ways = partial(_ways, int(sys.argv[1]), sys.argv[2], sys.argv[3])
    serve(Fastest(ways).answer, ["openvino"])
