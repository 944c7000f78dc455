"""ONNX Runtime models that Optimum exports itself: python -m benchmarks.contestants.optimum THREADS fp32|int8.

A translation model is an encoder and a decoder with its cache, in fp32. A classifier in int8 is quantized as Optimum
does it for AVX-512 with VNNI: a scale for each column of weights, and one for all of a product's inputs. Texts are
sorted by length.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from optimum.onnxruntime import (
    ORTModelForImageClassification,
    ORTModelForSeq2SeqLM,
    ORTModelForSequenceClassification,
    ORTQuantizer,
)
from optimum.onnxruntime.configuration import AutoQuantizationConfig

from benchmarks.contestants.classifier import Inputs
from benchmarks.contestants.in_process import Case, Fastest, Run, classifying_ways, decoding_run
from benchmarks.contestants.transformers import generate, make_model
from benchmarks.worker import serve

_KINDS: dict[str, Any] = {
    "translation": ORTModelForSeq2SeqLM,
    "text_classification": ORTModelForSequenceClassification,
    "image_classification": ORTModelForImageClassification,
}


def _load(threads: int, precision: str, case: Case) -> Any:
    weights, kind = Path(case["weights"]), _KINDS[case["task"]]
    folder = weights / "converted"
    if not (folder / "optimum-fp32" / "config.json").is_file():
        if not (weights / "config.json").is_file():
            weights = folder / "marian"
            make_model(case).save_pretrained(weights)
        kind.from_pretrained(weights, export=True).save_pretrained(folder / "optimum-fp32")
    names = {}
    if precision == "int8":
        if not (folder / "optimum-int8" / "model_quantized.onnx").is_file():
            way = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
            ORTQuantizer.from_pretrained(folder / "optimum-fp32").quantize(way, folder / "optimum-int8")
        names["file_name"] = "model_quantized.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return kind.from_pretrained(folder / f"optimum-{precision}", session_options=options, **names)


def _ways(model: Any, case: Case, callers: int) -> Mapping[str, Run]:
    if case["task"] == "translation":
        return {"merged decoder": decoding_run(case, callers, partial(generate, model, case["beam_size"], {}))}
    inputs = Inputs(Path(case["bundle"]))
    items = [inputs.prepare(one) for one in case["texts"] or case["images"]]
    return classifying_ways(items, callers, collate=inputs.collate, run=partial(_forward, model), orders=("sorted",))


def _forward(model: Any, feeds: dict[str, Any]) -> None:
    model(**feeds)  # NumPy in, NumPy out


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    load = partial(_load, int(sys.argv[1]), sys.argv[2])
    serve(Fastest(load, _ways).answer, ["optimum-onnx", "onnxruntime", "transformers"])
