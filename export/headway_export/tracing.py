"""Traces a module at example sizes, with the tensors that a manifest declares for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx_ir as ir
import torch
from torch import Tensor, nn

from headway_export.errors import TraceError
from headway_export.graph_modules import float_dtype
from headway_export.rewriting import Declare, FuseAttention, rewrite
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

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors it reads."""
        return tuple(_spec_of(value) for value in self.model.graph.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The tensors it gives."""
        return tuple(_spec_of(value) for value in self.model.graph.outputs)


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
        rewrite(model, FuseAttention())
    rewrite(model, Declare((*inputs, *outputs)))
    return TracedGraph(role=role, model=model)


def _spec_of(value: ir.Value) -> TensorSpec:
    assert value.dtype is not None, "the tracer gives inputs and outputs types"
    assert value.shape is not None, "inputs and outputs are declared"
    shape = (axis if isinstance(axis, int) else str(axis.value) for axis in value.shape)
    return make_spec(str(value.name), value.dtype.numpy().name, *shape)
