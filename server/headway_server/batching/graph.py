"""A stateless graph of any named tensors, run for several items at a time.

The manifest names the axes of every tensor (`bundles/manifest.py`). Axis 0 is `batch`. An input may name further axes,
on which its items may differ in size. They are padded to the longest item of the batch, and an output's axis of the
same name is cut to the item's own size. Further axes that only outputs name are handed on as they come.

B is the number of items of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.bundles import BATCH_AXIS
from headway_server.errors import BundleError
from headway_server.runtime import Device, Session

Tensors: TypeAlias = Mapping[str, NDArray[Any]]
"""Arrays by name: of one item without the batch axis, of a batch with it."""

Postprocess: TypeAlias = Mapping[str, Callable[[NDArray[Any]], NDArray[Any]]]
"""Functions by output, applied to a whole batch before it is split; they keep the shape. An operation on a batch takes
hardly longer than on one item."""

_RUN_OVERHEAD_S: Final = 2e-3
"""Fixed cost of a run: starting operators, switching threads, waiting for the GIL."""
_SMALL_RUN_S: Final = 2e-3
"""Processor time of a run on one core below which a graph is small: more cores hardly help, so its runs use one each.

Times are of the thread that runs: other processes would make a graph seem large for as long as it is loaded."""
_TINY_RUN_S: Final = 1e-3
"""Below this run time the call's own overhead exceeds the run, so one core is left free for handling calls
(docs/lanes.md)."""
_LONG_RUN_S: Final = 0.5
"""A first run that takes more is timed well enough: what it does once takes some milliseconds."""
_NUM_TIMED_RUNS: Final = 3

_log = structlog.get_logger(__name__)


class BatchGraph:
    """Pads items, runs them together and takes the outputs apart again. Safe to use from several threads."""

    def __init__(
        self,
        session: Session,
        *,
        padding: Mapping[str, float] | None = None,
        postprocess: Postprocess | None = None,
    ) -> None:
        """Reads the axes of a graph.

        Args:
            session: The graph.
            padding: Padding value by input; default 0.
            postprocess: Postprocessing of outputs.

        Raises:
            BundleError: The first axis of a tensor is not `batch`, or another one is.
        """
        graph = session.graph
        for spec in (*graph.inputs, *graph.outputs):
            if not spec.shape or spec.shape[0] != BATCH_AXIS or BATCH_AXIS in spec.shape[1:]:
                raise BundleError(
                    f"{graph.file}: {spec.name} has the axes {spec.shape}; the first one, and no other, must be "
                    f"{BATCH_AXIS}: export the model again"
                )
        self._session = session
        self._padding = dict(padding or {})
        self._postprocess = dict(postprocess or {})
        self._dtypes = {spec.name: np.dtype(spec.dtype) for spec in graph.inputs}
        self._axes = {spec.name: spec.shape[1:] for spec in (*graph.inputs, *graph.outputs)}
        padded = {axis for spec in graph.inputs for axis in spec.shape[1:] if isinstance(axis, str)}
        self._ragged = {name for name, axes in self._axes.items() if padded & set(axes)}

    @property
    def session(self) -> Session:
        """What runs."""
        return self._session

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self._session.device

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs that an item must have."""
        return tuple(self._dtypes)

    def collate(self, items: Sequence[Tensors]) -> dict[str, NDArray[Any]]:
        """Makes the inputs of the graph from those of B items, padded at their ends where sizes differ.

        Args:
            items: At least one; each has every input of the graph, without the batch axis.
        """
        return {name: self._stack(name, [item[name] for item in items]) for name in self._dtypes}

    def run(self, inputs: Tensors, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Runs the graph for the named outputs."""
        return self._session.run(inputs, outputs)

    def split(self, outputs: Tensors, items: Sequence[Tensors]) -> list[dict[str, NDArray[Any]]]:
        """Takes the outputs of a batch apart: B times the outputs of one item, without the batch axis and padding.

        Raises:
            ValueError: The graph has not answered every item.
        """
        for name, tensor in outputs.items():
            if len(tensor) != len(items):
                raise ValueError(f"{name} has {len(tensor)} rows of {len(items)} items")
        outputs = {
            name: self._postprocess[name](tensor) if name in self._postprocess else tensor
            for name, tensor in outputs.items()
        }
        rows = [{name: tensor[index] for name, tensor in outputs.items()} for index in range(len(items))]
        for name in outputs.keys() & self._ragged:
            for row, item in zip(rows, items, strict=True):
                sizes = self._sizes(item)
                row[name] = row[name][tuple(slice(sizes.get(axis)) for axis in self._axes[name])]
        return rows

    def warm_up(self, item: Tensors, length: int, expected: Mapping[str, tuple[int, ...]]) -> int | None:
        """Runs one item, so that the first call does not pay for it and a bundle that cannot run is known now.

        A small graph on the CPU uses one core a run afterwards. One that takes long is run once, on all cores: a
        second run of SAM ViT-B's encoder takes 20 s of processor time (docs/segmentation.md).

        Args:
            item: Of a usual size.
            length: Its cost in a batch's budget.
            expected: The shapes of an item's outputs, without the batch axis; -1: any size.

        Returns:
            Most padding that an item may bring to a batch, in units of `length`, since more takes longer than a run of
            its own; None: any.

        Raises:
            BundleError: The graph does not run, or has other outputs.
        """
        session, file = self._session, self._session.graph.file
        try:
            inputs, began = self.collate([item]), time.thread_time()
            [found] = self.split(session.run(inputs), [item])
            first_s = time.thread_time() - began
            if session.device == "cpu" and first_s > _LONG_RUN_S:
                max_padding: int | None = most_padding(first_s, length)
                _log_run(session, first_s, max_padding)
            else:
                max_padding = measure_padding(session, inputs, length)
        except Exception as error:  # errors of onnxruntime, and of graphs with other tensors
            raise BundleError(f"{file}: does not run ({error}); export the model again") from error
        for name, shape in expected.items():
            if name not in found or not _fits(found[name].shape, shape):
                has = f"is {found[name].shape}" if name in found else "is missing"
                raise BundleError(
                    f"{file}: {name} {has} of one input, by the manifest it is {shape}; export the model again"
                )
        return max_padding

    def _stack(self, name: str, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        dtype = self._dtypes[name]
        if len(arrays) == 1:
            return arrays[0][np.newaxis].astype(dtype, copy=False)
        if name not in self._ragged:
            return np.stack(arrays).astype(dtype, copy=False)
        longest = map(max, zip(*(array.shape for array in arrays), strict=True))
        stacked = np.full((len(arrays), *longest), self._padding.get(name, 0), dtype)
        for index, array in enumerate(arrays):
            stacked[index][tuple(map(slice, array.shape))] = array
        return stacked

    def _sizes(self, item: Tensors) -> dict[int | str, int]:
        """The sizes of an item on the axes that are padded, by name."""
        return {
            axis: size
            for name in self._dtypes.keys() & self._ragged
            for axis, size in zip(self._axes[name], item[name].shape, strict=True)
            if isinstance(axis, str)
        }

    def __repr__(self) -> str:
        return f"BatchGraph({self._session!r})"


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(most in (-1, size) for size, most in zip(shape, expected, strict=True))


def measure_padding(session: Session, inputs: Tensors, length: int) -> int | None:
    """Measures a graph as `measure_run` does.

    Args:
        session: The graph.
        inputs: Inputs of one item, with the batch axis.
        length: Its cost in a batch's budget.

    Returns:
        As `BatchGraph.warm_up`.
    """
    run_s = measure_run(session, inputs, length)
    return None if run_s is None else most_padding(run_s, length)


def measure_run(session: Session, inputs: Tensors, length: int | None = None) -> float | None:
    """Runs a graph a few times; a small one on the CPU uses one core a run afterwards.

    The smallest leave one core free, unless their number of lanes is set.

    Args:
        session: The graph.
        inputs: Inputs of one item, with the batch axis.
        length: Its cost in a batch's budget, for the log; None: it is not padded.

    Returns:
        Processor time of a run on one core, in seconds; None on CUDA.
    """
    run_s = _time_on_one_core(session, inputs)
    if run_s is None:
        return None
    if session.num_lanes > 1 and run_s < _SMALL_RUN_S:
        leaves_one = run_s < _TINY_RUN_S and not session.lanes_are_set
        session.use_one_core(session.num_lanes - leaves_one)
    _log_run(session, run_s, None if length is None else most_padding(run_s, length))
    return run_s


def _log_run(session: Session, run_s: float, max_padding: int | None) -> None:
    """Logs what a graph was measured to be, and the settings that follow."""
    padding = {} if max_padding is None else {"max_padding": max_padding}
    _log.info("lanes", file=session.graph.file, run_ms=round(1e3 * run_s, 2), lanes=session.num_lanes, **padding)


def most_padding(run_s: float, length: int) -> int:
    """Returns the padding that takes as long as a run of its own, where an item of `length` takes `run_s` seconds."""
    return round(_RUN_OVERHEAD_S * length / run_s)


def _time_on_one_core(session: Session, inputs: Tensors) -> float | None:
    """Returns the least processor time of a run in seconds; None on CUDA."""
    if session.device == "cuda":
        return None
    began = time.thread_time()
    session.run(inputs, on_one_core=True)
    if (first_s := time.thread_time() - began) > _LONG_RUN_S:
        return first_s
    times_s = []
    for _ in range(_NUM_TIMED_RUNS):
        began = time.thread_time()
        session.run(inputs, on_one_core=True)
        times_s.append(time.thread_time() - began)
    return min(times_s)
