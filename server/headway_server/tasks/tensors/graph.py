"""A graph of any named tensors, run for the rows of several calls at a time.

The axis `batch` may stand anywhere in an input or an output, or nowhere. Items are joined on it and taken apart again.
Their other axes are equal, and so are their inputs without that axis: nothing is padded. An output without it is the
same for every item.

N rows of an item.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.bundles import BATCH_AXIS, TensorSpec
from headway_server.errors import InvalidInputError
from headway_server.runtime import Session

_MOST_SHARED_BYTES: Final = 2**16
"""Inputs without the batch axis are compared up to this size; items with larger ones run alone."""
_ELEMENT_BYTES: Final = 64
"""Memory of a text, besides its characters."""
_NODE: Final = re.compile(r"while running (\S+) node\. Name:'([^']*)'")
"""The node that failed, in a message of ONNX Runtime."""
_NO_MEMORY: Final = ("Failed to allocate memory", "bad_alloc", "out of memory", "bad allocation")
_MISFITS: Final = ("INVALID_ARGUMENT", "Non-zero status code returned while running")

_log = structlog.get_logger(__name__)


def batch_axis_of(spec: TensorSpec) -> int | None:
    """Returns the index of the axis `batch`; None without it."""
    return spec.shape.index(BATCH_AXIS) if BATCH_AXIS in spec.shape else None


def num_bytes(tensors: Tensors) -> int:
    """Returns the memory of tensors, that of their texts included."""
    return sum(array.nbytes + (_bytes_of_texts(array) if array.dtype == object else 0) for array in tensors.values())


def _bytes_of_texts(array: NDArray[Any]) -> int:
    return int(array.size * _ELEMENT_BYTES + sum(map(len, array.flat)))


def take_rows(specs: Sequence[TensorSpec], tensors: Tensors, start: int, stop: int) -> Tensors:
    """Returns some rows of those of the tensors that are there, without a copy; all of one without the axis `batch`."""
    axes = ((spec.name, batch_axis_of(spec)) for spec in specs if spec.name in tensors)
    return {
        name: tensors[name] if axis is None else tensors[name][(slice(None),) * axis + (slice(start, stop),)]
        for name, axis in axes
    }


def resized(specs: Sequence[TensorSpec], item: Tensors, sizes: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """Returns inputs with other sizes of named axes: their values repeated, or cut."""
    inputs = {}
    for spec in specs:
        array = item[spec.name]
        for number, axis in enumerate(spec.shape):
            if isinstance(axis, str) and axis in sizes:
                array = np.take(array, np.arange(sizes[axis]) % array.shape[number], axis=number)
        inputs[spec.name] = array
    return inputs


class TensorGraph:
    """Joins items, runs them together and takes the outputs apart again. Safe to use from several threads."""

    def __init__(self, session: Session) -> None:
        """Reads the axes of a graph."""
        graph = session.graph
        self.session = session
        self._dtypes = {spec.name: np.dtype("O" if spec.dtype == "string" else spec.dtype) for spec in graph.inputs}
        self._batch_axes = {spec.name: batch_axis_of(spec) for spec in (*graph.inputs, *graph.outputs)}

    @property
    def has_batch_axis(self) -> bool:
        """True if items are joined; False: each runs alone."""
        return any(self._batch_axes[name] is not None for name in self._dtypes)

    def num_rows(self, item: Tensors) -> int:
        """Returns N; 1 without a batch axis."""
        return next(
            (item[name].shape[axis] for name in self._dtypes if (axis := self._batch_axes[name]) is not None), 1
        )

    def rows(self, item: Tensors, start: int, stop: int) -> Tensors:
        """Returns some rows of an item, without a copy."""
        return take_rows(self.session.graph.inputs, item, start, stop)

    def group(self, item: Tensors) -> Hashable:
        """Returns what must be equal of items that run together; a value of its own for one that runs alone."""
        shared = [name for name in self._dtypes if self._batch_axes[name] is None]
        if not self.has_batch_axis or num_bytes({name: item[name] for name in shared}) > _MOST_SHARED_BYTES:
            return object()
        shapes = (
            tuple(size for number, size in enumerate(item[name].shape) if number != self._batch_axes[name])
            for name in self._dtypes
        )
        return *shapes, *(_contents(item[name]) for name in shared)

    def collate(self, items: Sequence[Tensors]) -> dict[str, NDArray[Any]]:
        """Makes the inputs of a run."""
        inputs = {}
        for name, dtype in self._dtypes.items():
            axis, arrays = self._batch_axes[name], [item[name] for item in items]
            joined = arrays[0] if axis is None or len(arrays) == 1 else np.concatenate(arrays, axis=axis)
            inputs[name] = np.ascontiguousarray(joined, dtype).reshape(joined.shape)  # which keeps a scalar one
        return inputs

    def run(self, inputs: Tensors, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Runs the graph for the named outputs.

        Raises:
            InvalidInputError: An operator refuses its inputs.
        """
        try:
            return self.session.run(inputs, outputs)
        except Exception as error:
            message = str(error)
            if any(words in message for words in _NO_MEMORY) or not any(words in message for words in _MISFITS):
                raise
            _log.warning("a graph refused its inputs", file=self.session.graph.file, error=message)
            operator, name = found.groups() if (found := _NODE.search(message)) else ("", "")
            where = f"at its operator {operator}{f' ({name[:64]})' if name else ''}" if operator else "as they are"
            raise InvalidInputError(
                "inputs",
                f"cannot be computed by the graph {where}; check their shapes and values, and how they fit each other",
            ) from error

    def split(self, outputs: Tensors, items: Sequence[Tensors]) -> list[Tensors]:
        """Takes the outputs of a run apart, item by item.

        Raises:
            ValueError: An output has other rows than the items.
        """
        if len(items) == 1:
            return [outputs]
        counts = [self.num_rows(item) for item in items]
        ends = np.cumsum(counts).tolist()
        for name, array in outputs.items():
            if (axis := self._batch_axes[name]) is not None and array.shape[axis] != ends[-1]:
                raise ValueError(f"{name} has {array.shape[axis]} rows of {ends[-1]}")
        return [
            take_rows(self.session.graph.outputs, outputs, end - count, end)
            for count, end in zip(counts, ends, strict=True)
        ]

    def join(self, parts: Sequence[Tensors]) -> Tensors:
        """Joins the outputs of the parts of a call."""
        if len(parts) == 1:
            return parts[0]
        return {
            name: array
            if (axis := self._batch_axes[name]) is None
            else np.concatenate([part[name] for part in parts], axis=axis)
            for name, array in parts[0].items()
        }

    def __repr__(self) -> str:
        return f"TensorGraph({self.session!r})"


def _contents(array: NDArray[Any]) -> Hashable:
    return tuple(array.flat) if array.dtype == object else array.tobytes()
