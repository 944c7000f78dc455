"""What the activations of int8 products reach in each row, as a variant reads inputs that it is not judged by.

Every text is read alone and whole, a translation with its reference, so that no row is padding.

T tokens, S source tokens.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headway_export.candidate import named_source
from headway_export.errors import SourceError
from headway_export.inputs import Inputs
from headway_export.rewriting import copy_graph, row_maxima_of
from headway_export.tracing import TracedGraph, TracedModel
from headway_server.batching import Tensors
from headway_server.bundles.chain import VERIFIES
from headway_server.bundles.manifest import NUM_LIKELIEST
from headway_server.runtime import sum_exactly
from headway_server.tasks.text.model import text_tensors

RowMaxima = Mapping[str, NDArray[np.float32]]
"""By the name of an activation, what the highest level stands for in each row that was read."""


def row_maxima(traced: TracedModel, inputs: Inputs) -> dict[str, RowMaxima]:
    """Runs the graphs of a variant and returns what their activations reach, by role.

    Args:
        traced: The graphs, after `QuantizeProducts`.
        inputs: What they read.

    Raises:
        SourceError: The model has a state without positions.
    """
    if any(state.update == "replace" for state in traced.state):
        raise SourceError("int8-static: a recurrent decoder has a scale a row alone; leave this precision out")
    recorders = {graph.role: _Recorder(graph) for graph in traced.graphs}
    for text in inputs.texts:
        step = recorders["decoder"].step(text.token_ids)
        if (read := text.source) is not None:
            item = named_source(read)
            if item.keys() == {"input_ids"}:
                item = text_tensors(item["input_ids"])
            encoded = recorders["encoder"].run(_batch_of_one(item))
            step |= encoded
            step["source_mask"] = np.ones((1, next(iter(encoded.values())).shape[2]), np.int64)
        recorders["decoder"].run(step)
    for item in inputs.items:
        recorders["model"].run(_batch_of_one(item))
    return {role: recorder.maxima for role, recorder in recorders.items()}


def noise_growth(maxima: NDArray[np.float32]) -> float:
    """Returns how many times as much noise, in mean square, an activation has with one scale as with a scale a row.

    A row's noise is proportional to its scale; rows of zeros have none.
    """
    rows = maxima[maxima > 0].astype(np.float64)
    return float(np.mean((rows.max() / rows) ** 2)) if len(rows) else 1.0


def _batch_of_one(item: Tensors) -> Tensors:
    return {name: array[np.newaxis] for name, array in item.items()}


class _Recorder:
    """A graph that also gives the maximum of each row of its quantized activations."""

    def __init__(self, graph: TracedGraph) -> None:
        import onnxruntime  # noqa: PLC0415 (chosen by an extra of the server)

        self._graph = graph
        self._rows: defaultdict[str, list[NDArray[np.float32]]] = defaultdict(list)
        model = copy_graph(graph.model)
        maxima = row_maxima_of(model.graph)
        model.graph.outputs.extend(maxima.values())
        self._names = {str(maximum.name): name for name, maximum in maxima.items()}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "graph.onnx")
            ir.save(model, path, external_data="graph.onnx.data")
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            sum_exactly(options)
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    @property
    def maxima(self) -> RowMaxima:
        """Of all rows so far."""
        return {name: np.concatenate(rows) for name, rows in self._rows.items()}

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Tensors:
        """Runs the graph and returns the outputs that it has by itself."""
        read = {spec.name: feeds[spec.name] for spec in self._graph.inputs}
        names = [output.name for output in self._session.get_outputs()]
        outputs = dict(zip(names, self._session.run(names, read), strict=True))
        for name, activation in self._names.items():
            self._rows[activation].append(outputs.pop(name).ravel())
        return outputs

    def step(self, tokens: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Returns inputs of a decoder, whatever it can do besides, that reads a text, (T,), into an empty cache."""
        length = len(tokens)
        positions = np.arange(length)[np.newaxis]
        past = {
            spec.name: np.zeros(
                [1, *(size if isinstance(size, int) else length for size in spec.shape[1:])], spec.dtype
            )
            for spec in self._graph.inputs
            if spec.name.startswith("past_")
        }
        return {
            "input_ids": tokens[np.newaxis],
            "position_ids": positions,
            "logits_positions": positions,
            "seqlens_k": np.array([length - 1], np.int32),
            "total_sequence_length": np.array(length, np.int32),
            NUM_LIKELIEST: np.array([1]),
            VERIFIES: np.zeros(0, np.int64),
            **past,
        }
