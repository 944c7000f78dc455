"""Optimum's ONNX Runtime models, translating: python -m benchmarks.contestants.optimum THREADS.

An encoder and a decoder with its cache, exported by Optimum itself.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM

from benchmarks.contestants.in_process import Case, Fastest, Run, decoding_run
from benchmarks.contestants.transformers import make_marian, translate
from benchmarks.worker import serve


def _load(threads: int, case: Case) -> Any:
    folder = Path(case["weights"]) / "converted"
    if not (folder / "optimum-fp32" / "config.json").is_file():
        make_marian(Path(case["weights"])).save_pretrained(folder / "marian")
        ORTModelForSeq2SeqLM.from_pretrained(folder / "marian", export=True).save_pretrained(folder / "optimum-fp32")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return ORTModelForSeq2SeqLM.from_pretrained(folder / "optimum-fp32", session_options=options)


def _ways(model: Any, case: Case, callers: int) -> Mapping[str, Run]:
    return {"merged decoder": decoding_run(case, callers, partial(translate, model, case["beam_size"]))}


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    serve(Fastest(partial(_load, int(sys.argv[1])), _ways).answer, ["optimum-onnx", "onnxruntime", "transformers"])
