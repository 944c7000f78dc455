"""Traces a module at example sizes, with the tensors that a manifest declares for it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx_ir as ir
import torch
from torch import Tensor, nn

from headway_export.errors import TraceError
from headway_export.fusion import fuse
from headway_export.graph_modules import float_dtype
from headway_server.bundles import StateTensor, TensorSpec

OPSET = 21
Role: TypeAlias = Literal["model", "encoder", "decoder"]

_EXAMPLE_SIZES = {
    "batch": 2,
    "length": 5,
    "slots": 4,
    "cache_length": 16,
    "logits_length": 2,
    "sources": 2,
    "source_length": 7,
}
"""Sizes that a graph is traced at. Not 0 or 1, which PyTorch would take for fixed."""

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
}
_FLOAT_NAMES: dict[torch.dtype, Literal["float32", "float16"]] = {torch.float32: "float32", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """A graph and the tensors it declares."""

    role: Role
    model: ir.Model
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """All graphs of one precision, with what a manifest says of them."""

    graphs: tuple[TracedGraph, ...]
    state: tuple[StateTensor, ...] = ()
    cross: tuple[str, ...] = ()
    alignment_layer: int | None = None


def make_spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    """Declares a tensor; a number is a fixed axis, a name a dynamic one."""
    return TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape})


def float_name(module: nn.Module) -> str:
    """Returns the dtype of a module's parameters as a manifest names it."""
    return _FLOAT_NAMES[float_dtype(module)]


def example_of(specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Returns tensors that a graph can be traced with; masks are all ones, and everything else zeros."""
    return tuple(
        torch.full(
            [_EXAMPLE_SIZES[axis] if isinstance(axis, str) else axis for axis in spec.shape],
            int(spec.name.endswith("mask")),
            dtype=_TORCH_DTYPES[spec.dtype],
        )
        for spec in specs
    )


def trace_graph(
    role: Role, graph: nn.Module, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> TracedGraph:
    """Traces a graph whose inputs are, in order, those that are declared.

    Raises:
        TraceError: PyTorch cannot trace it.
    """
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple({axis: dynamic for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs)
    named = graph.forward.__code__.co_argcount - 1  # the others come as one starred argument
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer warns of its own internals
            program = torch.onnx.export(
                graph.eval(),
                example_of(inputs),
                dynamo=True,
                dynamic_shapes=(*shapes[:named], shapes[named:]) if len(shapes) > named else shapes,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:
        raise TraceError(f"{role}: PyTorch cannot trace {type(graph).__name__}: {error}") from error
    assert program is not None, "the tracer returns a program when it is given no file"
    model: ir.Model = program.model
    if role == "decoder":
        fuse(model)
    _tidy(model, inputs, outputs)
    return TracedGraph(role=role, model=model, inputs=inputs, outputs=outputs)


def _tidy(model: ir.Model, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Names the dynamic axes and drops what the tracer notes for its own debugging, such as stack traces."""
    by_name: dict[str | None, TensorSpec] = {spec.name: spec for spec in (*inputs, *outputs)}
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape(by_name[value.name].shape)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.producer_name = "headway"
    model.producer_version = None
    model.doc_string = model.graph.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if not value.is_graph_output():
                value.shape = None
                _make_way(value, by_name)
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for value in list(model.graph.initializers.values()):
        _make_way(value, by_name)


def _make_way(value: ir.Value, declared: Mapping[str | None, TensorSpec]) -> None:
    """Renames a value within the graph whose name is a declared one: the tracer names values after modules."""
    if value.name in declared:
        value.name = f"{value.name}.inner"
