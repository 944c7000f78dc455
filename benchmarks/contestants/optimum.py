"""Optimum's ONNX Runtime models, translating: python -m benchmarks.contestants.optimum THREADS.

An encoder and a decoder with its cache, exported by Optimum itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM

from benchmarks.contestants.checkpoints import load_marian
from benchmarks.contestants.in_process import Case, Fastest, Run, decoding_batches, run_decoding
from benchmarks.contestants.transformers import translate
from benchmarks.worker import serve

_models: dict[str, Any] = {}


def _ways(threads: int, case: Case, callers: int) -> Mapping[str, Run]:
    weights = Path(case["weights"])
    converted = weights / "converted" / "optimum-fp32"
    if not (converted / "config.json").is_file():
        load_marian(weights).save_pretrained(weights / "converted" / "marian")
        exported = ORTModelForSeq2SeqLM.from_pretrained(weights / "converted" / "marian", export=True)
        exported.save_pretrained(converted)
    if case["weights"] not in _models:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        _models[case["weights"]] = ORTModelForSeq2SeqLM.from_pretrained(converted, session_options=options)
    generate = partial(translate, _models[case["weights"]], case["beam_size"])
    return {"merged decoder": run_decoding(generate, *decoding_batches(case, callers))}


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    serve(Fastest(partial(_ways, int(sys.argv[1]))).answer, ["optimum-onnx", "onnxruntime", "transformers"])
