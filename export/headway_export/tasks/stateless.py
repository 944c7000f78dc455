"""Models without state, whose one graph answers an input at once, and what classifiers among them are bad at.

N examples, C labels, T tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import nn

from headway_export.agreement import Rows
from headway_export.candidate import NUM_ROWS, Candidate, run_batch
from headway_export.errors import SourceError
from headway_export.graphs import StatelessGraph
from headway_export.inputs import NUM_ITEMS, NUM_VECTORS, Inputs, affordable, places
from headway_export.quality import NUM_EXAMPLES, Quality, figure_of, quoted
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.task import ExportTask
from headway_export.tracing import Traceable, TracedModel, trace_graph
from headway_server.batching import Tensors
from headway_server.bundles import CalibrationFigures, ClassificationScheme, Space, Task
from headway_server.tasks.outputs import log_softmax
from headway_training.calibration import NUM_BINS, calibration_metrics, to_probabilities

_POSITIONS_AT_A_TIME = 1 << 12


class Stateless(ExportTask):
    """A graph `model` of inputs of one kind."""

    num_items: ClassVar[tuple[int, int]] = NUM_ITEMS
    """The least and the most inputs that judge."""

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces the graph."""
        inputs = self.attention_inputs(asked)
        graph, longest = StatelessGraph(asked.served), self.longest_text(asked.module)
        return TracedModel(graphs=(trace_graph("model", asked.module, graph, inputs, longest=longest),))

    @abstractmethod
    def items(self, source: ExportSource, data: EvaluationData) -> Sequence[Tensors]:
        """Makes the graph's inputs of examples."""

    @abstractmethod
    def positions(self, source: ExportSource) -> float:
        """Returns how many positions an input has, about."""

    def num_inputs(self, source: ExportSource) -> int:
        """Returns how many inputs judge."""
        return affordable(source, self.positions(source), *self.num_items)

    def inputs_of(
        self, source: ExportSource, data: EvaluationData, most: int | None, candidate: Candidate | None
    ) -> Inputs:
        """Returns inputs of the graph."""
        rows = data.take(places(len(data), most or self.num_inputs(source)))
        return Inputs(dataset=data.dataset, items=tuple(self.items(source, rows)))

    @abstractmethod
    def logits(self, candidate: Candidate, data: EvaluationData) -> NDArray[np.float32]:
        """Logits of the examples, (N, C)."""

    def num_positions(self, length: int) -> int:
        """Returns about how many positions a graph computes of an input whose last axis has a length."""
        return length

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields the logits or the embeddings of inputs, those of similar length run together."""
        source, graph = candidate.source, candidate.open_stateless()
        name = self.output_of(source)
        lengths = [max(array.shape[-1] for array in item.values()) for item in inputs.items]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        scheme = source.classification or ClassificationScheme()
        is_choice = self.kind(source) == "choice"
        while order:
            costs = [self.num_positions(lengths[place]) for place in order[:NUM_ROWS]]
            count = max(1, sum(number * cost <= _POSITIONS_AT_A_TIME for number, cost in enumerate(costs, 1)))
            batch, order = order[:count], order[count:]
            for place, found in zip(batch, run_batch(graph, [inputs.items[place] for place in batch]), strict=True):
                rows = np.atleast_2d(found[name]).astype(np.float32)  # (1, C), or (T, C) of tokens
                rows = rows / np.float32(scheme.temperature) if name == "logits" else rows
                positions = np.arange(len(rows)) if len(rows) > 1 else np.array([lengths[place] - 1])
                yield Rows(log_softmax(rows) if is_choice else rows, positions, place)

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Measures how a classifier does, and its calibration."""
        measured = _micro_f1 if data.metric == "micro_f1" else _accuracy
        return measured(candidate, data, self.logits(candidate, data))


class Embedding(Stateless):
    """A model of vectors."""

    recorded = "embedding"
    own_kind = "vector"
    num_items = NUM_VECTORS

    def parts_of_factory(self, factory: str, module: nn.Module) -> dict[str, Any]:
        """Reads the space that a module says its vectors are in."""
        return {"space": _read_space(module, factory, self.task)}


def _read_space(module: nn.Module, factory: str, task: Task) -> Space | None:
    """Returns the space that a module says its vectors are in; None where it says nothing.

    Raises:
        SourceError: What it says is none, or its vectors have no pooling's name.
    """
    if not isinstance(getattr(module, "pooling", None), str):
        raise SourceError(
            f"--model {factory}: has no attribute pooling, a name for the manifest; {task} needs it "
            "(docs/bring-your-own.md)"
        )
    stated = getattr(module, "space", None)
    if stated is None or callable(stated):  # a method or a layer of that name is a helper
        return None
    try:
        return Space.model_validate(stated)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise SourceError(f"--model {factory}: its space is wrong ({what}); see docs/bring-your-own.md") from error


# Classifiers


def _accuracy(candidate: Candidate, data: EvaluationData, logits: NDArray[np.float32]) -> Quality:
    scheme = candidate.source.classification or ClassificationScheme()
    return Quality(
        figure=figure_of(data, float((logits.argmax(axis=-1) == data.labels).mean() * 100)),
        weak_points=weak_classes(logits / scheme.temperature, data.labels, candidate.source.labels, data.texts),
        calibration=_calibration(logits, data, scheme),
    )


def _micro_f1(candidate: Candidate, data: EvaluationData, logits: NDArray[np.float32]) -> Quality:
    from sklearn.metrics import f1_score

    scheme = candidate.source.classification or ClassificationScheme()
    selected = to_probabilities(logits / scheme.temperature, multi_label=True) >= np.asarray(
        scheme.thresholds or (0.5,)
    )  # (N, C)
    value = f1_score(data.labels.ravel(), selected.astype(int).ravel(), zero_division=0)
    by_label = {
        label: 100 * f1_score(truth, chosen, zero_division=0)
        for label, truth, chosen in zip(candidate.source.labels, data.labels.T, selected.astype(int).T, strict=True)
        if truth.any()
    }
    hardest = sorted(by_label, key=by_label.__getitem__)[:NUM_EXAMPLES]
    return Quality(
        figure=figure_of(data, 100 * float(value)),
        weak_points=(f"Lowest F1: {'; '.join(f'{label} {by_label[label]:.1f} %' for label in hardest)}.",),
        calibration=_calibration(logits, data, scheme),
    )


def _calibration(logits: NDArray[np.float32], data: EvaluationData, scheme: ClassificationScheme) -> CalibrationFigures:
    metrics = calibration_metrics(logits, data.labels, scheme.temperature, multi_label=scheme.kind == "multi_label")
    return CalibrationFigures(
        expected_calibration_error=metrics["expected_calibration_error"],
        uncalibrated=metrics["expected_calibration_error_uncalibrated"],
        bin_count=NUM_BINS,
    )


def weak_classes(
    logits: NDArray[np.float32], labels: NDArray[np.int64], names: Sequence[str], texts: Sequence[str] = ()
) -> tuple[str, ...]:
    """The most frequent confusions, the class that is found least often, and the surest mistakes.

    Args:
        logits: (N, C), divided by the temperature.
        labels: (N,), the right classes.
        names: Of the classes.
        texts: What was classified; without them, mistakes are named by their numbers.
    """
    from sklearn.metrics import confusion_matrix, recall_score

    predicted = logits.argmax(axis=-1)  # (N,)
    wrong = np.flatnonzero(predicted != labels)
    if not len(wrong):
        return ()
    classes = range(len(names))
    recalls = recall_score(labels, predicted, labels=classes, average=None, zero_division=np.nan)  # (C,)
    confusions = confusion_matrix(labels, predicted, labels=classes)  # (C, C): the right class, the predicted one
    np.fill_diagonal(confusions, 0)
    most = np.argsort(-confusions, axis=None, kind="stable")[: min(NUM_EXAMPLES, np.count_nonzero(confusions))]
    pairs = np.stack(np.unravel_index(most, confusions.shape), axis=-1).tolist()
    probabilities = to_probabilities(logits).max(axis=-1)  # (N,), of the predicted class
    surest = wrong[np.argsort(-probabilities[wrong], kind="stable")][:NUM_EXAMPLES]
    taken = (f"{names[right]} for {names[other]} ({confusions[right, other]})" for right, other in pairs)
    hardest = int(np.nanargmin(recalls))
    return (
        f"Most frequent confusions: {', '.join(taken)}.",
        f"Found least often: {names[hardest]}, {100 * recalls[hardest]:.1f} % of its examples.",
        *(
            f"{quoted(texts[index]) if texts else f'Example {index + 1}'}: predicted {names[predicted[index]]} with "
            f"probability {probabilities[index]:.2f}; it is {names[labels[index]]}."
            for index in surest
        ),
    )
