"""Models of named tensors: a file of ONNX, or a module with inputs and outputs of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from headway_export.agreement import Rows
from headway_export.candidate import Candidate
from headway_export.errors import ParityError
from headway_export.inputs import Inputs
from headway_export.parity import Comparison
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.task import ExportTask
from headway_export.tensors import EXPECTED_BOUND, ROW_COUNTS, TensorModule, row_error, tensor_error
from headway_export.tracing import Traceable, TracedModel
from headway_server.batching import Tensors
from headway_server.bundles import BATCH_AXIS, BatchingFigures, Limits, Manifest, TensorSpec
from headway_server.tasks.tensors.graph import TensorGraph, resized


class NamedTensors(ExportTask):
    """A graph as it is, in the types of its file or module."""

    names_columns = False
    is_read = False
    own_kind = "vector"
    takes_fixed_scales = False
    shows_no_attention = "its graph is exported as it is"
    measures_batching = True
    words_of_error = "error"

    def limits(self, module: nn.Module) -> Limits:
        """Those that were given."""
        return Limits(max_axis_sizes=dict(_of(module).interface.max_sizes))

    def trace(self, asked: Traceable) -> TracedModel:
        """Takes the graph of the module."""
        return TracedModel(graphs=(_of(asked.module).traced(),))

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares the graph as it is served with the module, at the sizes that it ran at, and with given outputs."""
        interface, graph = _of(candidate.source.module).interface, _open(candidate)
        comparison.bound = interface.bound
        names = [spec.name for spec in interface.outputs]
        for sizes in interface.sizes:
            item = resized(interface.inputs, interface.example, sizes)
            found, exact = graph.run(graph.collate([item]), names), _of(reference.module).answer(item)
            _compare(comparison, found, exact, interface.bound, f"sizes {sizes}" if sizes else "its only sizes")
            comparison.num_shapes += 1
        if interface.expected:
            found = graph.run(graph.collate([interface.example]), names)
            limit = max(interface.bound, EXPECTED_BOUND)
            _compare(comparison, found, interface.expected, limit, "the examples' outputs")

    def batching(self, candidate: Candidate) -> BatchingFigures | None:
        """Compares the rows of batches with the rows alone, as they are served."""
        interface, graph = _of(candidate.source.module).interface, _open(candidate)
        if not interface.has_batch_axis:
            return None
        names = [spec.name for spec in interface.outputs]
        error = row_error(lambda item: graph.run(graph.collate([item]), names), interface)
        if not error <= interface.bound:
            raise ParityError(
                f"a row in a batch differs from the row alone by {error:.2e} as it is served, bound "
                f"{interface.bound:.0e}; leave the batch axis out with --batch-axis none"
            )
        return BatchingFigures(max_row_error=error, bound=interface.bound, row_counts=ROW_COUNTS)

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """None: there is one variant."""
        raise NotImplementedError(self.task)

    def inputs_of(
        self, source: ExportSource, data: EvaluationData, most: int | None, candidate: Candidate | None
    ) -> Inputs:
        """None: there is no evaluation data."""
        raise NotImplementedError(self.task)

    def more_sections(self, manifest: Manifest) -> list[str]:
        """Lists the tensors, and says how rows were compared."""
        variant = next(iter(manifest.variants.values()))
        graph, figures = variant.graphs["model"], variant.batching
        lines = ["| | tensor | type | axes |", "| --- | --- | --- | --- |"]
        for side, specs in (("input", graph.inputs), ("output", graph.outputs)):
            lines += [f"| {side} | {spec.name} | {spec.dtype} | {_axes(spec)} |" for spec in specs]
        if figures is None:
            text = "Calls run one by one: no axis was found on which they can be joined."
        else:
            text = (
                f"Calls are joined on the axis `{BATCH_AXIS}`. In batches of {', '.join(map(str, figures.row_counts))} "
                f"rows, a row differed from the row alone by at most {figures.max_row_error:.1e} (relative), bound "
                f"{figures.bound:.0e}."
            )
        return ["## Tensors", "\n".join(lines).replace("\\", ""), text]

    def summary(self, manifest: Manifest) -> list[str]:
        """Lists the tensors."""
        graph = next(iter(manifest.variants.values())).graphs["model"]
        sides = (("reads", graph.inputs), ("writes", graph.outputs))
        return [
            f"{verb} {spec.name}: {spec.dtype} [{', '.join(map(str, spec.shape))}]"
            for verb, specs in sides
            for spec in specs
        ]

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Names the limits of axes."""
        sizes = manifest.limits.max_axis_sizes
        return [f"The axis {axis} has at most {size} elements." for axis, size in sizes.items()]


def _of(module: nn.Module) -> TensorModule:
    return cast("TensorModule", module)


def _open(candidate: Candidate) -> TensorGraph:
    return TensorGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs["model"]))


def _axes(spec: TensorSpec) -> str:
    return ", ".join(map(str, spec.shape)) or "none"


def _compare(comparison: Comparison, found: Tensors, expected: Tensors, bound: float, where: str) -> None:
    for name, exact in expected.items():
        error = tensor_error(found[name], exact)
        if not error <= bound:
            raise ParityError(
                f"output {name} {list(found[name].shape)} at {where}: relative difference {error:.2e}, "
                f"bound {bound:.0e}"
            )
        comparison.max_error = max(comparison.max_error, error)
