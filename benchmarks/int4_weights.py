"""What a step takes with weights in 4 bits, beside int8, by the number of rows: where the lines cross.

    python -m benchmarks.int4_weights [make] [NAME ...]

The sizes are those of GPT-2 small and of Qwen2.5-0.5B, with random weights and an int8 cache. `make` writes the graphs
alone, which is work that needs no quiet machine. Blocks of steps take turns; figures are medians.
"""

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.environments import SCRATCH
from headway_server.bundles import (
    TOKENIZER_FILE,
    Bundle,
    Graph,
    Manifest,
    ParityFigures,
    Precision,
    TensorSpec,
    Variant,
)
from headway_server.bundles.manifest import StateTensor
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.runtime import Runtime

_LLAMA = {
    "norm_kind": "rms_norm",
    "norm_eps": 1e-6,
    "activation": "silu",
    "gated": True,
    "biases": False,
    "positions": "rotary",
}
_SIZES: dict[str, dict[str, object]] = {
    "gpt2-small": {"vocabulary_size": 50257, "num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072},
    "qwen2.5-0.5b": _LLAMA
    | {"vocabulary_size": 151936, "num_layers": 24, "d_model": 896, "num_heads": 14, "num_kv_heads": 2, "d_ff": 4864},
}
_VARIANTS = (Precision.INT8, Precision.INT4)
_LENGTH, _CACHED, _CHUNK = 256, 128, 128
_ROWS = (1, 2, 4, 8, 16, 32)
_ROUNDS, _BLOCK = 9, 5
"""Turns of a variant, and steps of each; the first step of a turn is not counted."""


def make(name: str, folder: Path) -> None:
    """Writes the decoder of each variant and its manifest."""
    import onnx_ir as ir  # noqa: PLC0415 (as the rest: measuring needs none of it, and less memory)
    import torch  # noqa: PLC0415

    from headway_export.rewriting import (  # noqa: PLC0415
        LayerRange,
        QuantizeBlocks,
        QuantizeCache,
        QuantizeProducts,
        rewrite,
    )
    from headway_export.tracing import trace  # noqa: PLC0415
    from headway_server.bundles import Task  # noqa: PLC0415
    from headway_training.models import build_model  # noqa: PLC0415

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages that are not needed
    warnings.filterwarnings("ignore", module=r"torch\..*")
    torch.manual_seed(1)
    traced = trace(build_model("gpt", {**_SIZES[name], "max_length": _LENGTH}).eval(), Task.GENERATION)
    (decoder,) = traced.graphs
    ranges = [LayerRange(key=4.0, value=4.0) for _ in traced.state[::2]]
    for precision in _VARIANTS:
        model = decoder.model.clone()
        products = [QuantizeProducts()] if precision is Precision.INT8 else [QuantizeBlocks(), QuantizeProducts()]
        rewrite(model, *products, QuantizeCache(ranges))
        (folder / precision).mkdir(parents=True, exist_ok=True)
        ir.save(model, folder / precision / "decoder.onnx", external_data="decoder.onnx.data")
        graph = type(decoder)(role="decoder", model=model)
        written = Graph(file=f"{precision}/decoder.onnx", inputs=graph.inputs, outputs=graph.outputs)
        (folder / precision / "graph.json").write_text(written.model_dump_json(), encoding="utf-8")


def measure(name: str, folder: Path) -> None:
    """Prints the milliseconds of a step of each variant."""
    runtime = Runtime(device="cpu")
    runners = {precision: _open(folder, precision, runtime) for precision in _VARIANTS}
    sizes = {p: sum(f.stat().st_size for f in (folder / p).iterdir()) for p in _VARIANTS}
    _print(f"{name}, {runtime}: " + ", ".join(f"{p} {size / 1e6:.0f} MB" for p, size in sizes.items()))
    for rows in _ROWS:
        step = partial(DecoderRunner.decode, token_ids=np.arange(rows) + 100, positions=np.full(rows, _CACHED))
        _compare(f"{rows} rows", runners, step)
    chunk = partial(DecoderRunner.prefill, slot=0, token_ids=np.arange(_CHUNK) + 100, start=0)
    _compare(f"chunk of {_CHUNK}", runners, chunk)


def _compare(what: str, runners: dict[Precision, DecoderRunner], step: Callable[[DecoderRunner], object]) -> None:
    times: dict[Precision, list[float]] = {precision: [] for precision in runners}
    for _ in range(_ROUNDS):
        for precision, runner in runners.items():
            step(runner)
            for _ in range(_BLOCK):
                start = time.perf_counter()
                step(runner)
                times[precision].append((time.perf_counter() - start) * 1e3)
    medians = {precision: statistics.median(found) for precision, found in times.items()}
    ratio = medians[Precision.INT4] / medians[Precision.INT8]
    _print(f"  {what}: " + ", ".join(f"{p} {ms:.2f} ms" for p, ms in medians.items()) + f", {ratio:.2f}")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _open(folder: Path, precision: Precision, runtime: Runtime) -> DecoderRunner:
    graph = Graph.model_validate_json((folder / precision / "graph.json").read_text(encoding="utf-8"))
    variant = Variant(
        device="cpu",
        graphs={"decoder": graph},
        state=tuple(_state(spec) for spec in graph.inputs if spec.name.startswith("past_")),
        cross=(),
        parity=ParityFigures(max_relative_logit_error=0.0, bound=None, checked_shape_count=0, provider=""),
        quality=None,
    )
    manifest = Manifest.model_validate(
        {
            "schema_version": 1,
            "name": "random",
            "version": "1",
            "task": "generation",
            "description": "",
            "license": "none",
            "architecture": {"kind": "gpt", "parameter_count": 0, "configuration": {}},
            "variants": {precision: variant},
            "special_tokens": {},
            "limits": {"max_input_tokens": _LENGTH - 1, "max_total_tokens": _LENGTH},
            "opset": 24,
            "libraries": {},
            "files": {name: {"sha256": "0" * 64, "size_bytes": 0} for name in (TOKENIZER_FILE, graph.file)},
        }
    )
    return DecoderRunner(runtime, Bundle(path=folder, manifest=manifest), variant, num_slots=max(_ROWS))


def _state(spec: TensorSpec) -> StateTensor:
    return StateTensor(past=spec.name, present=spec.name.replace("past", "present"), update="in_place")


if __name__ == "__main__":
    only_make = "make" in sys.argv[1:]
    for model_name in [name for name in sys.argv[1:] if name != "make"] or list(_SIZES):
        made = SCRATCH / "int4" / model_name
        if not all((made / precision / "graph.json").is_file() for precision in _VARIANTS):
            make(model_name, made)
        if not only_make:
            measure(model_name, made)
