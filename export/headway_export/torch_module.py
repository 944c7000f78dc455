"""A module of PyTorch with named inputs and outputs as a model of tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.errors import SourceError, reason_of
from headway_export.graphs import parameter_count
from headway_export.onnx_file import examples_file
from headway_export.source import ExportSource, find_made, load_strictly
from headway_export.tensors import BOUND, ROUNDED_BOUND, TensorModule, Trial
from headway_export.tracing import TracedGraph, make_spec, trace_graph
from headway_server.batching import Tensors
from headway_server.bundles import BATCH_AXIS, EXAMPLES_FILE, Architecture, Limits, Task, TensorSpec
from headway_server.tasks.tensors.graph import resized

Axes: TypeAlias = tuple[int | str, ...]
"""Sizes of fixed axes, and names of others."""
OUTPUT = "output"
"""Name of the output of a module that returns one tensor."""


def source_from_tensors(
    factory: str,
    *,
    weights: Path | None,
    name: str,
    max_sizes: Mapping[str, int],
    description: str = "",
    license_name: str = "not stated",
) -> tuple[ExportSource, tuple[str, ...]]:
    """Takes a module with example inputs (docs/bring-your-own.md).

    Args:
        factory: `package.module:function`; the function returns the module and its inputs by name.
        weights: safetensors file, loaded strictly; None: the factory's.
        name: The model's name in the store.
        max_sizes: Limits of dynamic axes, by name.
        description: One sentence.
        license_name: Of the weights.

    Returns:
        The source, and notes for the user.

    Raises:
        SourceError: The factory returns something else, or the module does not run.
    """
    made = find_made(factory)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise SourceError(
            f"--model {factory}: returned {type(made).__name__}; it must return a torch.nn.Module and its example "
            "inputs, tensors by name (docs/bring-your-own.md)"
        )
    inner, given = made
    if not (isinstance(given, Mapping) and given and all(isinstance(one, Tensor) for one in given.values())):
        raise SourceError(f"--model {factory}: its example inputs must be a mapping of names to tensors")
    if weights is not None:
        load_strictly(inner, weights, factory)
    module = NamedModule(inner.eval(), {name: _array(name, tensor) for name, tensor in given.items()})
    try:
        notes = module.find_interface(max_sizes)
    except SourceError as error:
        raise SourceError(f"--model {factory}: {error}") from error
    return (
        ExportSource(
            name=name,
            task=Task.TENSORS,
            module=module,
            make_reference=module.again,
            description=description or f"{type(inner).__name__}, exported from {factory}.",
            license=license_name,
            architecture=Architecture(
                kind=type(inner).__name__, parameter_count=parameter_count(inner), configuration={"factory": factory}
            ),
            limits=Limits(max_axis_sizes=dict(max_sizes)),
            documents={EXAMPLES_FILE: examples_file(module.interface)},
        ),
        notes,
    )


class _Named(nn.Module):
    """A module whose inputs are given in order, and whose outputs have names."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        found = self.inner(**dict(zip(self.names, inputs, strict=True)))
        if isinstance(found, tuple) and hasattr(found, "_asdict"):
            found = found._asdict()
        named = {OUTPUT: found} if isinstance(found, Tensor) else found
        if not (isinstance(named, Mapping) and named and all(isinstance(one, Tensor) for one in named.values())):
            raise SourceError(
                f"{type(self.inner).__name__} returned {type(found).__name__}; it must return a tensor, or a mapping "
                "of names to tensors"
            )
        return dict(named)


class NamedModule(TensorModule):
    """A module and its example inputs."""

    def __init__(self, inner: nn.Module, example: Tensors, axes: Mapping[str, Axes] | None = None) -> None:
        """Takes a module.

        Args:
            inner: The module; its attribute `axes` states the axes of its inputs, where it has one.
            example: Its inputs by name.
            axes: Axes of inputs that are likely; the others' first is the batch, and their further ones are fixed.
        """
        super().__init__()
        self._named = _Named(inner, tuple(example))
        self._example = example
        self._axes = dict(axes or {})

    def again(self, inner: nn.Module | None = None) -> NamedModule:
        """Returns the same with a copy of its module, or with another one."""
        other = NamedModule(inner or copy.deepcopy(self._named.inner), self._example, self._axes)
        other.interface = self.interface
        return other

    def answer(self, inputs: Tensors) -> Tensors:
        """Computes the outputs in PyTorch."""
        tensors = (torch.from_numpy(np.ascontiguousarray(inputs[name])).reshape(inputs[name].shape) for name in inputs)
        with torch.inference_mode():
            return {name: _array(name, tensor) for name, tensor in self._named(*tensors).items()}

    def find_interface(self, max_sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Finds the axes; returns notes.

        Raises:
            SourceError: The module does not run on its example, or states other axes.
        """
        stated = getattr(self._named.inner, "axes", None)
        inputs = tuple(self._spec(name, array, stated) for name, array in self._example.items())
        try:
            outputs = self.answer(self._example)
        except SourceError:
            raise
        except Exception as error:
            raise SourceError(f"the module does not run on its example inputs: {reason_of(error)}") from error
        rounds = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in self.parameters())
        self.interface, note = Trial(
            run=self.answer,
            inputs=inputs,
            example=self._example,
            bound=ROUNDED_BOUND if rounds else BOUND,
            fixed={name: array.shape for name, array in outputs.items()},
            max_sizes=max_sizes,
            leave_out=None if stated is None else f"call it otherwise than {BATCH_AXIS} in its attribute axes",
        ).find({})
        return (note,) if note else ()

    def traced(self) -> TracedGraph:
        """Traces the module at the sizes of its example, of which none is 1."""
        interface = self.interface
        wide = {axis: max(2, size) for axis, size in interface.sizes[0].items()}
        at = resized(interface.inputs, interface.example, wide)
        example = tuple(torch.from_numpy(at[spec.name]) for spec in interface.inputs)
        return trace_graph(
            "model", self._named.inner, self._named, interface.inputs, outputs=interface.outputs, example=example
        )

    def _spec(self, name: str, array: NDArray[Any], stated: object) -> TensorSpec:
        axes: Axes = self._axes.get(name, (BATCH_AXIS, *array.shape[1:]) if array.ndim else ())
        if stated is not None:
            if not isinstance(stated, Mapping) or name not in stated:
                raise SourceError(f"its attribute axes must have the axes of {name}: a name or a size for each")
            axes = tuple(stated[name])
        if len(axes) != array.ndim or not all(isinstance(axis, (int, str)) for axis in axes):
            raise SourceError(f"its attribute axes says {axes} of {name}, whose example has {array.ndim} axes")
        return make_spec(name, array.dtype.name, *axes)


def _array(name: str, tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype is torch.bfloat16 or tensor.is_complex():
        raise SourceError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}; inputs and outputs must be of float32"
        )
    array: NDArray[Any] = tensor.detach().numpy()
    return array
