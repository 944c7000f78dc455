"""Answers named tensors with named tensors, by a graph of any kind.

N rows of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Self

import numpy as np

from headway_server.batching import Batcher, Tensors, measure_run
from headway_server.batching.settings import MAX_ROWS
from headway_server.bundles import BATCH_AXIS, EXAMPLES_FILE, Bundle, Precision, TensorSpec
from headway_server.errors import BundleError, InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.preprocessing.pool import text_pool
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.calls import current_caller
from headway_server.serving.families import ServedModel
from headway_server.serving.permits import Admission, MeasuredPace
from headway_server.settings import ServerSettings
from headway_server.tasks.tensors.graph import TensorGraph, num_bytes, resized

_FEW_BYTES: Final = 2**20
"""Maximum bytes of outputs joined on the event loop, a copy of less than a millisecond."""


class TensorModel(ServedModel):
    """A graph of named tensors. Calls share its runs if it has an axis `batch`."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        graph: TensorGraph,
        *,
        num_batch_rows: int,
        settings: ServerSettings,
        observer: Observer,
    ) -> None:
        """Assembles a model from its parts.

        Args:
            bundle: The bundle.
            precision: Precision of the variant in use.
            graph: Graph of that variant, warmed up.
            num_batch_rows: Maximum rows of a run.
            settings: Settings of the server.
            observer: `observer` of `Batcher`.
        """
        manifest = bundle.manifest
        super().__init__(bundle, precision, graph.session.device)
        self._graph = graph
        self._num_batch_rows = num_batch_rows
        self.inputs: tuple[TensorSpec, ...] = graph.session.graph.inputs
        self.outputs: tuple[TensorSpec, ...] = graph.session.graph.outputs
        self._batcher = Batcher(
            graph,
            budget=num_batch_rows,
            model=ModelId(name=manifest.name, version=manifest.version),
            session=graph.session,
            observer=observer,
        )
        self.workers.append(self._batcher)
        self._admission = Admission(
            limit=settings.batching.max_waiting_rows,
            noun="rows",
            owner=manifest.name,
            max_bytes=settings.batching.max_waiting_bytes,
            pace=MeasuredPace(),
        )

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the requested variant, or the best one for the runtime, and runs its largest batch once.

        The memory of a run is known then, as far as the graph's axes are bounded.

        Raises:
            BundleError: The graph cannot be loaded, or does not run on the bundle's examples.
            RuntimeUnavailableError: The bundle does not have the variant.
        """
        manifest = bundle.manifest
        precision, variant = runtime.choose_variant(manifest, settings.precision)
        graph = TensorGraph(runtime.open(bundle, variant.graphs["model"]))
        most = settings.batching
        try:
            example = read_examples(bundle, graph)
            run_s = measure_run(graph.session, graph.collate([example]))
            num_rows = most.batch_rows(run_s) if graph.has_batch_axis else 1
            largest = resized(
                graph.session.graph.inputs, example, {**manifest.limits.max_axis_sizes, BATCH_AXIS: num_rows}
            )
            graph.session.run(graph.collate([largest]))
        except Exception as error:  # errors of onnxruntime, and of graphs with other tensors
            raise BundleError(
                f"{bundle.path}: its graph does not run on {EXAMPLES_FILE} ({error}); export the model again"
            ) from error
        return cls(bundle, precision, graph, num_batch_rows=num_rows, settings=settings, observer=observer)

    async def infer(self, inputs: Tensors, *, outputs: Sequence[str], deadline: float | None) -> Answer[Tensors]:
        """Computes outputs of the graph.

        Args:
            inputs: Every input of the graph, by name, in its own dtype; texts as `str` in arrays of dtype object.
            outputs: Names of the wanted outputs, at least one.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Returns:
            The outputs by name, the only result.

        Raises:
            RequestError: An input is missing or has a wrong shape, the graph cannot take the inputs, the queue is full,
                the deadline passed, the server is draining.
        """
        self._check(inputs)
        num_rows, caller = self._graph.num_rows(inputs), current_caller()
        starts = range(0, num_rows, self._num_batch_rows)
        items = [inputs] if len(starts) == 1 else [self._graph.rows(inputs, at, at + starts.step) for at in starts]
        counts = [self._graph.num_rows(item) for item in items]
        with self._admission.admit(num_rows, num_bytes(inputs), deadline=deadline, caller=caller):
            batched = await self._batcher.submit(
                items,
                [1] * len(items),
                outputs=outputs,
                read=lambda row, _: row,
                deadline=deadline,
                caller=caller,
                counts=counts,
                groups=[self._graph.group(inputs)] * len(items),
            )
            found = await self._joined(batched.results)
        timings = CallTimings.of(batched.runs, preprocessing_s=0.0, num_inputs=num_rows)
        return Answer(results=[found], timings=timings)

    async def _joined(self, parts: list[Tensors]) -> Tensors:
        size = sum(array.nbytes for part in parts for array in part.values())
        if len(parts) == 1 or size <= _FEW_BYTES:
            return self._graph.join(parts)
        return await asyncio.get_running_loop().run_in_executor(text_pool(), self._graph.join, parts)

    def _check(self, inputs: Tensors) -> None:
        """Checks shapes against the graph.

        Raises:
            InvalidInputError: An input is missing, or an axis has a wrong size.
        """
        sizes: dict[str, tuple[int, str]] = {}  # of named axes, with the first place that has each
        for spec in self.inputs:
            if spec.name not in inputs:
                raise InvalidInputError("inputs", f"lack {spec.name}; the model reads {_names(self.inputs)}")
            shape = inputs[spec.name].shape
            if len(shape) != len(spec.shape):
                raise InvalidInputError(
                    spec.name, f"has {len(shape)} axes, {list(shape)}; must have {len(spec.shape)}, {_shown(spec)}"
                )
            for number, (size, axis) in enumerate(zip(shape, spec.shape, strict=True)):
                where = f"axis {number} of {spec.name}"
                if isinstance(axis, int):
                    if size != axis:
                        raise InvalidInputError(spec.name, f"has size {size} on axis {number}; must be {axis}")
                    continue
                self._check_size(spec, number, axis, size)
                first, place = sizes.setdefault(axis, (size, where))
                if size != first:
                    raise InvalidInputError(
                        spec.name,
                        f"has size {size} on axis {number} ({axis}), and {place} has {first}; they must be equal",
                    )

    def _check_size(self, spec: TensorSpec, number: int, axis: str, size: int) -> None:
        if not size:
            raise InvalidInputError(spec.name, f"has size 0 on axis {number} ({axis}); must be at least 1")
        most = MAX_ROWS if axis == BATCH_AXIS else self.bundle.manifest.limits.max_axis_sizes.get(axis)
        if most is not None and size > most:
            advice = "; send more in several calls" if axis == BATCH_AXIS else ""
            raise InvalidInputError(
                spec.name, f"has size {size} on axis {number} ({axis}); the limit is {most}{advice}"
            )

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"TensorModel({manifest.name}/{manifest.version}, {self.precision}, {self._admission!r})"


def read_examples(bundle: Bundle, graph: TensorGraph) -> Tensors:
    """Reads the example inputs of a bundle.

    Raises:
        OSError, ValueError: They cannot be read, or are those of another graph.
    """
    with np.load(bundle.file(EXAMPLES_FILE), allow_pickle=False) as arrays:
        found = {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in arrays.items()}
    names = [spec.name for spec in graph.session.graph.inputs]
    if found.keys() != set(names):
        raise ValueError(f"{EXAMPLES_FILE} has {', '.join(found)}; the graph reads {', '.join(names)}")
    return found


def _names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


def _shown(spec: TensorSpec) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"
