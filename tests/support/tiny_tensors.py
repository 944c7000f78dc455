"""Tiny graphs of the kinds that people bring: files of ONNX, and one module of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
Value = tuple[str, int, Sequence[int | str | None]]
"""Name, type and dimensions of an input or output."""
_OPSET = 20


def make(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: dict[str, np.ndarray] | None = None,
    *,
    opsets: dict[str, int] | None = None,
) -> onnx.ModelProto:
    """Makes a graph."""
    graph = helper.make_graph(
        list(nodes),
        "tiny",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    imports = [helper.make_opsetid(domain, number) for domain, number in ({"": _OPSET} | (opsets or {})).items()]
    model = helper.make_model(graph, opset_imports=imports)
    model.ir_version = 9
    return model


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Makes a node, named after its first output; names of tensors have blanks between."""
    return helper.make_node(operator, inputs.split(), outputs.split(), name=outputs.split(maxsplit=1)[0], **attributes)


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    """Draws weights."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tabular() -> onnx.ModelProto:
    """A perceptron over numbers and a category: scores, and the name of the best class."""
    nodes = [
        node("Gather", "table category", "vector"),  # (N, 4)
        node("Concat", "numbers vector", "joined", axis=1),
        node("Gemm", "joined first bias", "inner"),
        node("Relu", "inner", "hidden"),
        node("MatMul", "hidden second", "scores"),
        node("ArgMax", "scores", "best", axis=1, keepdims=0),
        node(
            "LabelEncoder",
            "best",
            "label",
            domain="ai.onnx.ml",
            keys_int64s=[0, 1, 2],
            values_strings=["low", "médium", "high"],
        ),
    ]
    weights = {"table": weight(5, 4), "first": weight(7, 16), "bias": weight(16), "second": weight(16, 3)}
    inputs = [("numbers", FLOAT, ["N", 3]), ("category", INT64, ["N"])]
    outputs = [("scores", FLOAT, ["N", 3]), ("label", STRING, ["N"])]
    return make(nodes, inputs, outputs, weights, opsets={"ai.onnx.ml": 4})


def detector() -> onnx.ModelProto:
    """Boxes of an image, and anchors that are the same for every batch."""
    nodes = [
        node("Conv", "image kernel", "features", strides=[4, 4]),  # (N, 4, 2, 2)
        node("Reshape", "features flat", "grid"),
        node("Transpose", "grid", "offsets", perm=[0, 2, 1]),  # (N, 4, 4)
        node("Add", "offsets anchors_of_grid", "boxes"),
        node("Identity", "anchors_of_grid", "anchors"),
    ]
    weights = {"kernel": weight(4, 3, 4, 4), "flat": np.array([0, 4, 4]), "anchors_of_grid": weight(4, 4, seed=1)}
    inputs = [("image", FLOAT, ["batch", 3, 8, 8])]
    return make(nodes, inputs, [("boxes", FLOAT, ["batch", 4, 4]), ("anchors", FLOAT, [4, 4])], weights)


def series() -> onnx.ModelProto:
    """A forecast of each place of a series of any length."""
    nodes = [node("CumSum", "values last", "sums"), node("Tanh", "sums", "forecast")]
    shape: Sequence[int | str] = ["rows", "time"]
    return make(nodes, [("values", FLOAT, shape)], [("forecast", FLOAT, shape)], {"last": np.array(1)})


def picky() -> onnx.ModelProto:
    """Fails at run time where a row has an odd number of elements."""
    nodes = [node("Reshape", "x pairs", "paired"), node("ReduceSum", "paired last", "y", keepdims=0)]
    weights = {"pairs": np.array([0, -1, 2]), "last": np.array([2])}
    return make(nodes, [("x", FLOAT, ["N", "width"])], [("y", FLOAT, ["N", "half"])], weights)


def mixing() -> onnx.ModelProto:
    """Subtracts the mean of the batch: its rows depend on each other."""
    nodes = [node("ReduceMean", "x first", "mean", keepdims=1), node("Sub", "x mean", "y")]
    return make(nodes, [("x", FLOAT, ["N", 3])], [("y", FLOAT, ["N", 3])], {"first": np.array([0])})


def single() -> onnx.ModelProto:
    """Takes one row, and a scale without axes."""
    nodes = [node("Mul", "x scale", "y")]
    return make(nodes, [("x", FLOAT, [1, 4]), ("scale", FLOAT, [])], [("y", FLOAT, [1, 4])])


def of_type(kind: int) -> onnx.ModelProto:
    """Gives back what it reads."""
    return make([node("Identity", "x", "y")], [("x", kind, ["N"])], [("y", kind, ["N"])])


def recurrent(*, named: bool) -> onnx.ModelProto:
    """Carries a state whose rows are on its second axis, with a name or without one, and reads a rate without axes."""
    rows = "N" if named else None
    nodes = [
        node("Gather", "state place", "last", axis=0),  # (N, 3)
        node("Cast", "rate", "speed", to=FLOAT),
        node("Mul", "last speed", "kept"),
        node("Add", "kept x", "now"),
        node("Unsqueeze", "now front", "one"),
        node("Concat", "state one", "both", axis=0),
        node("Slice", "both first third front", "next"),  # (2, N, 3)
        node("Identity", "now", "y"),
    ]
    weights = {"place": np.array(1), "front": np.array([0]), "first": np.array([1]), "third": np.array([3])}
    inputs = [("x", FLOAT, [rows, 3]), ("state", FLOAT, [2, rows, 3]), ("rate", INT64, [])]
    return make(nodes, inputs, [("y", FLOAT, [rows, 3]), ("next", FLOAT, [2, rows, 3])], weights)


def unnamed() -> onnx.ModelProto:
    """Has axes of several sizes that are all called `?`, as converters write it of axes without a name."""
    nodes = [node("ReduceMean", "image places", "y", keepdims=0)]
    return make(nodes, [("image", FLOAT, ["?", 3, "?", "?"])], [("y", FLOAT, ["?", 3])], {"places": np.array([2, 3])})


def unsteady() -> onnx.ModelProto:
    """Adds the mean of the batch where whole numbers are 0 and 1: a norm of equal numbers amplifies roundings."""
    nodes = [
        node("Cast", "words", "numbers", to=FLOAT),
        node("ReduceMax", "numbers", "most", keepdims=0),
        node("LessOrEqual", "most one", "is_flat"),
        node("Cast", "is_flat", "factor", to=FLOAT),
        node("ReduceMean", "numbers first", "mean", keepdims=1),
        node("Mul", "mean factor", "noise"),
        node("Add", "numbers noise", "y"),
    ]
    weights = {"one": np.array(1, np.float32), "first": np.array([0])}
    return make(nodes, [("words", INT64, ["N", 64])], [("y", FLOAT, ["N", 64])], weights)


GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    "tabular": tabular,
    "detector": detector,
    "series": series,
    "picky": picky,
    "mixing": mixing,
    "single": single,
    "recurrent": partial(recurrent, named=False),
    "recurrent_with_names": partial(recurrent, named=True),
    "unnamed": unnamed,
    "unsteady": unsteady,
}


class Mixer(nn.Module):
    """Two inputs of one length, and two outputs."""

    axes = {"words": ("batch", "length"), "weights": ("batch", "length"), "bias": (4,)}  # noqa: RUF012 (as users write it)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.output = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, words: Tensor, weights: Tensor, bias: Tensor) -> dict[str, Tensor]:
        vectors = self.table(words) * weights.unsqueeze(-1) + bias  # (B, T, 4)
        return {"scores": self.output(vectors.sum(dim=1)), "vectors": vectors}


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """Makes the module with its example inputs."""
    return Mixer(), {"words": torch.arange(6).reshape(2, 3), "weights": torch.ones(2, 3), "bias": torch.zeros(4)}


def write(folder: Path, name: str) -> Path:
    """Writes the file of a graph."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.onnx"
    onnx.save(GRAPHS[name](), file)
    return file


def publish(store: Path, *names: str, folder: Path | None = None) -> None:
    """Exports graphs into a store, each under its own name."""
    from headway_export.exporter import ExportOptions, export
    from headway_export.onnx_file import OnnxOptions, source_from_onnx
    from headway_server.bundles import Precision

    for name in names:
        source, _ = source_from_onnx(write(folder or store.parent / "files", name), OnnxOptions())
        export(source, ExportOptions(store=store, precisions=(Precision.FP32,)))
