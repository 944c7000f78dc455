"""What export does with the models of one task, which everything that is shared asks for.

N examples, R rows, C columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from headway_server.bundles import Task

if TYPE_CHECKING:
    from typing import Any

    from headway_export.agreement import Kind, Rows
    from headway_export.candidate import Candidate
    from headway_export.inputs import Draw, Inputs
    from headway_export.parity import Comparison
    from headway_export.quality import Quality
    from headway_export.reference import Reference
    from headway_export.source import EvaluationData, ExportSource
    from headway_server.batching import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What answers to evaluation data are judged by."""

    name: str
    allowed_loss: float
    """How much worse than fp32 a variant may be: in points, nats, or squared error of numbers of unit variance."""
    higher_is_better: bool = True


class ExportTask(ABC):
    """A task of `table.py`."""

    metrics: ClassVar[tuple[Metric, ...]] = ()
    """The first is that of evaluation data which names none; none: such data is not read."""
    recorded: ClassVar[str] = "logits"
    """The output whose error the manifest records."""

    def __init__(self, task: Task) -> None:
        """Takes the task; a class may be that of several."""
        self.task = task

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.task})"

    # Parity with PyTorch

    @abstractmethod
    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares a variant with PyTorch, over batch sizes and lengths that the trace never saw.

        Raises:
            ParityError: They differ by more than `comparison` allows.
        """

    def makes_probabilities(self, source: ExportSource) -> bool:
        """True if a softmax makes probabilities of the output `logits`."""
        return source.classification is None or source.classification.kind == "single_label"

    def attention_items(self, candidate: Candidate) -> Iterator[list[Tensors]]:
        """Yields batches of inputs of the graph `attention`."""
        raise NotImplementedError(f"{self.task} shows no attention")

    # Agreement with fp32

    def kind(self, source: ExportSource) -> Kind:
        """Says what a row of answers is."""
        several = source.classification is not None and source.classification.kind == "multi_label"
        return "choices" if several else "choice"

    @abstractmethod
    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields a variant's answers, always in the same order."""

    @abstractmethod
    def inputs_of(
        self, source: ExportSource, data: EvaluationData, most: int | None, candidate: Candidate | None
    ) -> Inputs:
        """Returns inputs of evaluation data; the arguments are those of `inputs.of_evaluation`."""

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Draws inputs where there is no evaluation data: those that judge, and those that scales are taken from."""
        raise NotImplementedError(f"{self.task} is exported with evaluation data alone")

    def hold_out(
        self,
        source: ExportSource,  # noqa: ARG002 (some tasks read it)
        data: EvaluationData,  # noqa: ARG002
    ) -> tuple[EvaluationData, EvaluationData] | None:
        """Parts few examples into those that judge and what scales are taken from; None where everything judges."""
        return None

    # Quality

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Measures the metric that evaluation data names."""
        raise NotImplementedError(f"{self.task} has no metric")

    def metric(self, name: str) -> Metric:
        """Returns the metric of a name."""
        return next(metric for metric in self.metrics if metric.name == name)
