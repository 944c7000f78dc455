"""Named tensors of a model of any kind: which axes its inputs and outputs have, and whether its rows are independent.

A model is only run here, whatever computes it: PyTorch, or ONNX Runtime on somebody's file. Its outputs are declared by
runs at several sizes. An axis that grows with one of the inputs' has its name, and any other that changes a name of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headway_export.differences import relative_errors
from headway_export.errors import SourceError, reason_of
from headway_export.tracing import TracedGraph, make_spec
from headway_server.batching import Tensors
from headway_server.bundles import BATCH_AXIS, TensorSpec
from headway_server.tasks.tensors.graph import batch_axis_of, resized, take_rows

BOUND: Final = 1e-4
"""Largest relative difference of outputs, of a row in a batch from the row alone among others."""
ROUNDED_BOUND: Final = 1e-2
"""The same where a model computes in 16 or 8 bits."""
EXPECTED_BOUND: Final = 1e-3
"""Largest relative difference from outputs that are given: they come from another machine."""
_ROUNDINGS: Final = 8
"""Units in the last place of 1 by which outputs may always differ: a sigmoid or softmax near 0 is no closer."""
ROW_COUNTS: Final = (2, 3, 8)
"""Rows of the batches that are compared with their rows alone."""
_SEED: Final = 0
_FREE: Final = "rows"
"""Name of an axis that was taken for the batch's and is not."""

Run: TypeAlias = Callable[[Tensors], Tensors]
Sizes: TypeAlias = dict[str, int]
"""Sizes of named axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What a model of tensors reads and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    example: Tensors
    """An example of its inputs."""
    sizes: tuple[Sizes, ...]
    """Sizes that it ran at, those of the example first."""
    bound: float
    expected: Tensors = field(default_factory=dict)
    """Outputs of the example that were given."""
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    """Limits of named axes."""

    @property
    def has_batch_axis(self) -> bool:
        """True if rows of several calls may share a run."""
        return any(batch_axis_of(spec) is not None for spec in self.inputs)

    def rows(self, num_rows: int) -> Tensors:
        """Returns inputs of a batch: rows of the example, and further ones drawn from them."""
        return _drawn(self.inputs, self.example, num_rows)


class TensorModule(nn.Module):
    """A model that is exported as one of tensors."""

    interface: Interface

    def answer(self, inputs: Tensors) -> Tensors:
        """Computes the outputs by name; this is what an export is held against."""
        raise NotImplementedError

    def traced(self) -> TracedGraph:
        """Returns the graph that serves."""
        raise NotImplementedError


def sizes_of(specs: Sequence[TensorSpec], inputs: Tensors) -> Sizes:
    """Returns the sizes of the named axes of inputs.

    Raises:
        SourceError: An input does not have its axes, or two axes of one name differ in size.
    """
    sizes: Sizes = {}
    for spec in specs:
        shape = inputs[spec.name].shape
        if len(shape) != len(spec.shape):
            raise SourceError(f"{spec.name}: has {len(shape)} axes, {list(shape)}; the model reads {list(spec.shape)}")
        for number, (size, axis) in enumerate(zip(shape, spec.shape, strict=True)):
            wanted = axis if isinstance(axis, int) else sizes.setdefault(axis, size)
            if size != wanted or not size:
                name = "" if isinstance(axis, int) else f" ({axis})"
                raise SourceError(f"{spec.name}: has size {size} on axis {number}{name}; must be {wanted or 'above 0'}")
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model that is run to find its interface."""

    run: Run
    inputs: tuple[TensorSpec, ...]
    """An axis `batch` may be among theirs."""
    example: Tensors
    """Inputs that it runs on."""
    bound: float
    """Largest relative difference of a row."""
    fixed: Mapping[str, Sequence[int | None]]
    """Sizes of the outputs' axes that are known to be fixed, by output; None: unknown."""
    max_sizes: Mapping[str, int]
    """Limits of named axes."""
    leave_out: str | None = None
    """What a user does who has named the batch axis, and whose rows depend on each other; None: nobody has named it."""

    def find(self, expected: Tensors) -> tuple[Interface, str]:
        """Finds the axes of the outputs, and tries whether the rows of a batch are independent.

        Args:
            expected: Outputs of the example, where they are given.

        Returns:
            The interface, and a note where an axis is not the batch's after all.

        Raises:
            SourceError: The model does not run at the sizes it should, or rows depend on each other where the user says
                that they do not.
        """
        base = sizes_of(self.inputs, self.example)
        self._check_limits(base)
        found, problem = self._try_batch(base) if BATCH_AXIS in base else (None, "")
        if problem and self.leave_out is not None:
            raise SourceError(f"the batch axis: {problem}; {self.leave_out}")
        if found is None:
            one_by_one = replace(self, inputs=tuple(map(_freed, self.inputs)))
            found = one_by_one.declared({_FREE if axis == BATCH_AXIS else axis: size for axis, size in base.items()})
        if self.max_sizes:
            most = {**found.sizes[0], **self.max_sizes}
            try:
                self.run(resized(found.inputs, self.example, most))
            except Exception as error:
                raise SourceError(f"--max-size: the model does not run at these sizes ({reason_of(error)})") from error
            found = replace(found, sizes=(*found.sizes, most))
        note = f"calls run one by one: {problem}" if problem else ""
        return replace(found, expected=expected, max_sizes=self.max_sizes), note

    def _check_limits(self, base: Sizes) -> None:
        known = base.keys() - {BATCH_AXIS}
        for name, most in self.max_sizes.items():
            if name not in known:
                names = ", ".join(sorted(known)) or "none"
                raise SourceError(f"--max-size {name}: the inputs have no such dynamic axis; they have {names}")
            if base[name] > most:
                raise SourceError(f"--max-size {name}={most}: the example has size {base[name]}; give a larger limit")

    def _try_batch(self, base: Sizes) -> tuple[Interface | None, str]:
        """Returns the interface with a batch axis, or why there is none."""
        try:
            found = self.declared(base | {BATCH_AXIS: min(ROW_COUNTS)})
            error = row_error(self.run, found)
        except Exception as failure:  # whatever runs the model raises
            return None, f"it does not run for several rows ({reason_of(failure)})"
        if error <= self.bound:
            return found, ""
        return (
            None,
            f"a row in a batch differs from the row alone by {error:.1e} (relative), the limit is {self.bound:.0e}",
        )

    def declared(self, base: Sizes) -> Interface:
        """Runs the model, with each named axis once at another size, and declares its outputs.

        Raises:
            SourceError: An output has another number of axes from run to run.
        """
        runs = [_Ran(axis=None, sizes=base, outputs=self.run(_drawn_at(self.inputs, self.example, base)))]
        for number, axis in enumerate(base):
            other = base | {axis: _other_size(base[axis], number, self.max_sizes.get(axis))}
            if other == base:
                continue
            try:
                runs.append(_Ran(axis=axis, sizes=other, outputs=self.run(_drawn_at(self.inputs, self.example, other))))
            except Exception:  # such a model runs at some sizes only, multiples of 32 for instance
                if axis == BATCH_AXIS:
                    raise
        outputs = []
        for name, array in runs[0].outputs.items():
            if len({ran.outputs[name].ndim for ran in runs}) != 1:
                raise SourceError(f"{name}: has {array.ndim} axes in one run and another number in others")
            axes = [_axis_of(name, number, runs, self.fixed[name][number]) for number in range(array.ndim)]
            if axes.count(BATCH_AXIS) > 1:
                raise SourceError(f"{name}: two of its axes grow with the batch")
            outputs.append(make_spec(name, "string" if array.dtype == object else array.dtype.name, *axes))
        return Interface(
            inputs=self.inputs,
            outputs=tuple(outputs),
            example=self.example,
            sizes=tuple(ran.sizes for ran in runs),
            bound=self.bound,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """A run of a model."""

    axis: str | None
    """The axis that had another size; None: the first run."""
    sizes: Sizes
    outputs: Tensors


def _freed(spec: TensorSpec) -> TensorSpec:
    return make_spec(spec.name, spec.dtype, *(_FREE if axis == BATCH_AXIS else axis for axis in spec.shape))


def _axis_of(name: str, number: int, runs: Sequence[_Ran], fixed: int | None) -> int | str:
    """Returns the size or the name of an axis of an output; `fixed` is its size where that is known."""
    first, *others = runs
    own_name, size = f"{name}_{number}", first.outputs[name].shape[number]
    changed = [ran for ran in others if ran.outputs[name].shape[number] != size]
    if not changed:
        return own_name if fixed is None else fixed
    axis, grown = changed[0].axis, changed[0].outputs[name].shape[number]
    if len(changed) > 1 or axis is None or (size, grown) != (first.sizes[axis], changed[0].sizes[axis]):
        return own_name
    return axis


def _other_size(size: int, number: int, most: int | None) -> int:
    """Returns another size of an axis, each axis with another difference, or the same if there is none."""
    wanted = size + 1 + number
    return wanted if most is None or wanted <= most else max(1, size - 1 - number)


def _drawn_at(inputs: Sequence[TensorSpec], example: Tensors, sizes: Sizes) -> Tensors:
    at = resized(inputs, example, {axis: size for axis, size in sizes.items() if axis != BATCH_AXIS})
    return _drawn(inputs, at, sizes[BATCH_AXIS]) if BATCH_AXIS in sizes else at


def _drawn(inputs: Sequence[TensorSpec], example: Tensors, num_rows: int) -> Tensors:
    """Returns inputs of so many rows: those of the example, and further ones with the values of a row in other places.

    Equal rows would hide that rows depend on each other.
    """
    random = np.random.default_rng(_SEED)
    drawn = dict(example)
    for spec in inputs:
        axis = batch_axis_of(spec)
        if axis is None:
            continue
        array = np.moveaxis(example[spec.name], axis, 0)
        rows = [array[number % len(array)] for number in range(num_rows)]
        for number in range(len(array), num_rows):
            row = random.permuted(rows[number].reshape(-1)).reshape(rows[number].shape)
            if row.dtype.kind == "f":
                row = (row * random.uniform(0.5, 1.5, row.shape)).astype(array.dtype)
            rows[number] = row
        stacked = np.empty((num_rows, *array.shape[1:]), array.dtype)
        for number, row in enumerate(rows):
            stacked[number] = row
        drawn[spec.name] = np.ascontiguousarray(np.moveaxis(stacked, 0, axis))
    return drawn


def row_error(run: Run, interface: Interface, counts: Sequence[int] = ROW_COUNTS) -> float:
    """Returns the largest relative difference of a row in a batch from the row alone; inf where shapes differ.

    An output without a batch axis must be the same for every row and every batch.
    """
    batch = interface.rows(max(counts))
    alone = [run(take_rows(interface.inputs, batch, number, number + 1)) for number in range(max(counts))]
    worst = 0.0
    for count in counts:
        together = run(take_rows(interface.inputs, batch, 0, count))
        for number in range(count):
            found = take_rows(interface.outputs, together, number, number + 1)
            worst = max(worst, *(tensor_error(found[name], exact) for name, exact in alone[number].items()))
    return worst


def tensor_error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Returns the largest relative difference of two tensors; inf where their shapes or texts differ.

    Small numbers are compared as if they were of the size of which `BOUND` is the rounding around 1, 1e-2 in 32 bits:
    kernels compute them from numbers around 1. Numbers that are not finite must stand in the same places.
    """
    if found.shape != expected.shape or found.dtype.kind != expected.dtype.kind:
        return np.inf
    if not expected.size:
        return 0.0
    if expected.dtype.kind in "OUb":
        return 0.0 if np.array_equal(found, expected) else np.inf
    is_finite = np.isfinite(expected)
    if not np.array_equal(np.where(is_finite, 0, found), np.where(is_finite, 0, expected), equal_nan=True):
        return float(np.inf)
    one, other = (np.atleast_1d(np.where(is_finite, side, 0)) for side in (found, expected))
    precision = np.finfo(np.float64 if expected.dtype == np.float64 else np.float32)
    least_size = _ROUNDINGS * float(precision.eps) / BOUND
    return float(relative_errors(one, other, of_softmax=False, least_size=least_size).max(initial=0.0))
