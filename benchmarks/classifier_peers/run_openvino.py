"""OpenVINO in-process: python run_openvino.py BUNDLE_FOLDER GRAPH_PRECISION THREADS HINT INPUTS_FILE SECONDS.

HINT is f32 or bf16. It is given batches of each size, sorted by length and in order, as the bare graph is; the last
line is JSON: a list with `batch_size`, `order`, `inputs_per_s`, `latency_p50_ms` and `latency_p99_ms` of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openvino
from classifier import Inputs

sys.path.append(str(Path(__file__).resolve().parents[1]))
from classifier_limits import BATCH_SIZES, ORDERS, cut_batches, time_batches


def main() -> None:
    """Measures every batch size in both orders."""
    inputs = Inputs(Path(sys.argv[1]))
    hints = {"INFERENCE_PRECISION_HINT": sys.argv[4], "INFERENCE_NUM_THREADS": int(sys.argv[3])}
    hints |= {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}  # all threads on one batch, as the bare graph has them
    model = openvino.Core().compile_model(str(inputs.graph_file(sys.argv[2])), "CPU", hints)
    request = model.create_infer_request()
    items = [inputs.decode(text) for text in json.loads(Path(sys.argv[5]).read_text(encoding="utf-8"))]
    figures = []
    for order in ORDERS:
        ordered = sorted(items, key=len) if order == "sorted" else items
        for batch_size in BATCH_SIZES:
            batches = [inputs.collate(batch) for batch in cut_batches(ordered, batch_size)]
            measured = time_batches(request.infer, batches, float(sys.argv[6]))
            figures.append({"batch_size": batch_size, "order": order} | measured)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
