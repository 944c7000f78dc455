"""OpenVINO in-process on prepared inputs, with the best of its numbers of streams, fixed batches and orders.

python -m benchmarks.contestants.openvino THREADS fp32|int8|nncf f32|bf16      # the graph, and what it is computed in

`nncf` is the fp32 graph in int8 as OpenVINO's own quantizer makes it of the case's inputs.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import openvino

from benchmarks.contestants.classifier import Inputs
from benchmarks.contestants.in_process import Case, Fastest, Run, classifying_ways
from benchmarks.worker import serve

_NUM_CALIBRATED = 32


def _load(threads: int, precision: str, hint: str, case: Case) -> tuple[Inputs, list[Any], dict[int, Any]]:
    """Returns how inputs are prepared, prepared inputs, and the compiled model by its number of streams."""
    inputs = Inputs(Path(case["bundle"]))
    items = [inputs.prepare(text) for text in case["texts"] or case["images"]]
    core = openvino.Core()
    model = core.read_model(str(inputs.graph_file("fp32" if precision == "nncf" else precision)))
    if precision == "nncf":
        import nncf  # type: ignore[import-not-found]  # noqa: PLC0415 (the other ways do without)

        texts = nncf.Dataset([inputs.collate([item]) for item in items[:_NUM_CALIBRATED]])
        model = nncf.quantize(model, texts, model_type=nncf.ModelType.TRANSFORMER, subset_size=_NUM_CALIBRATED)
    compiled = {}
    for streams in sorted({1, threads}):
        hints = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams}
        compiled[streams] = core.compile_model(model, "CPU", hints)
    return inputs, items, compiled


def _ways(model: tuple[Inputs, list[Any], dict[int, Any]], case: Case, callers: int) -> Mapping[str, Run]:
    inputs, items, compiled = model
    orders = ("in order", "sorted") if case["texts"] else ("in order",)
    ways: dict[str, Run] = {}
    for streams, each in compiled.items():
        if callers < streams:
            continue
        of_stream = [
            classifying_ways(items, callers // streams, collate=inputs.collate, run=request.infer, orders=orders)
            for request in (each.create_infer_request() for _ in range(streams))
        ]
        for name in of_stream[0]:
            ways[f"{streams} streams, {name}"] = partial(_together, [runs[name] for runs in of_stream])
    return ways


def _together(runs: list[Callable[[float], dict[str, Any]]], seconds: float) -> dict[str, Any]:
    """Runs every stream in a thread; the library lets go of the interpreter's lock."""
    figures: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda run=run: figures.append(run(seconds))) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return figures[0] | {"inputs_per_s": sum(one["inputs_per_s"] for one in figures)}


if __name__ == "__main__":
    load = partial(_load, int(sys.argv[1]), sys.argv[2], sys.argv[3])
    serve(Fastest(load, _ways).answer, ["openvino"])
