"""sentence-transformers on an imported embedder: python -m benchmarks.contestants.sentence_transformers THREADS WAY.

WAY is fp32 or bf16, and `compile` behind a comma for torch.compile. Texts in, vectors out: it has its own tokenizer.
"""

import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from benchmarks.contestants.in_process import BATCH_SIZES, Case, Fastest, Run
from benchmarks.worker import serve


def _load(way: str, case: Case) -> Any:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[way.partition(",")[0]]
    model = SentenceTransformer(str(Path(case["weights"])), device="cpu", model_kwargs={"torch_dtype": dtype})
    if way.endswith("compile"):
        model[0].auto_model = torch.compile(model[0].auto_model, dynamic=True)
    return model


def _ways(model: Any, case: Case, callers: int) -> Mapping[str, Run]:
    sizes = [size for size in BATCH_SIZES if size <= callers]
    return {
        f"batches of {size}, sorted by length in each call": partial(_run, model, case, callers, size) for size in sizes
    }


def _run(model: Any, case: Case, callers: int, size: int, seconds: float) -> dict[str, Any]:
    """Encodes as many texts a call as there are callers, which the library sorts and cuts to batches."""
    texts, count, begun_s = case["texts"], 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - begun_s) < seconds or not count:
        first = count % len(texts)
        model.encode([*texts, *texts][first : first + callers], batch_size=size, show_progress_bar=False)
        count += callers
    return {"inputs_per_s": count / elapsed_s}


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    serve(Fastest(partial(_load, sys.argv[2]), _ways).answer, ["sentence-transformers", "transformers", "torch"])
