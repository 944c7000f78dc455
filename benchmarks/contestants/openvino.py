"""OpenVINO in-process on prepared inputs, in the best fixed batch of the best order, as the bare graph is.

python -m benchmarks.contestants.openvino THREADS fp32|int8 f32|bf16      # the graph, and what OpenVINO computes in
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import openvino

from benchmarks.contestants.classifier import Inputs
from benchmarks.contestants.in_process import Case, Fastest, Run, classifying_ways
from benchmarks.worker import serve


def _load(threads: int, precision: str, hint: str, case: Case) -> tuple[Inputs, list[Any], Any]:
    inputs = Inputs(Path(case["bundle"]))
    hints = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
    hints |= {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}  # all threads on one batch
    model = openvino.Core().compile_model(str(inputs.graph_file(precision)), "CPU", hints)
    return inputs, [inputs.prepare(text) for text in case["texts"] or case["images"]], model.create_infer_request()


def _ways(model: tuple[Inputs, list[Any], Any], case: Case, callers: int) -> Mapping[str, Run]:
    inputs, items, request = model
    orders = ("in order", "sorted") if case["texts"] else ("in order",)
    return classifying_ways(items, callers, collate=inputs.collate, run=request.infer, orders=orders)


if __name__ == "__main__":
    load = partial(_load, int(sys.argv[1]), sys.argv[2], sys.argv[3])
    serve(Fastest(load, _ways).answer, ["openvino"])
