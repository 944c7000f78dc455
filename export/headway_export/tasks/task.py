"""What export does with the models of one task, which everything that is shared asks for.

N examples, R rows, C columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from onnx_ir.passes import InPlacePass

from headway_export.differences import LEAST_SIZE
from headway_export.errors import SourceError
from headway_export.graphs import AttentionGraph, StatelessAttentionGraph, kernel_problem, returns_attention
from headway_export.requirements import needed_flags
from headway_export.source import read_evaluation
from headway_server.bundles import Tagging, Task, TensorSpec, demanded

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from torch import nn

    from headway_export.agreement import Kind, Rows
    from headway_export.candidate import Candidate
    from headway_export.inputs import Draw, Inputs
    from headway_export.parity import Comparison
    from headway_export.quality import Quality
    from headway_export.reference import Reference
    from headway_export.source import EvaluationData, ExportSource
    from headway_export.tracing import Traceable, TracedModel
    from headway_server.batching import Tensors
    from headway_server.bundles import BatchingFigures, Limits, Manifest
    from headway_training.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What answers to evaluation data are judged by."""

    name: str
    allowed_loss: float
    """How much worse than fp32 a variant may be: in points, nats, or squared error of numbers of unit variance."""
    higher_is_better: bool = True


NOT_LOOKED_AT: Final = "its attention weights cannot be looked at"


class ExportTask(ABC):
    """A task of `table.py`."""

    metrics: ClassVar[tuple[Metric, ...]] = ()
    """The first is that of evaluation data which names none; none: such data is not read."""
    recorded: ClassVar[str] = "logits"
    """The output that is judged, of most sources (`output_of`)."""
    names_columns: ClassVar[bool] = True
    """True if each of its columns is a label, a token or a number of a vector, which the exporter counts."""
    is_read: ClassVar[bool] = True
    """True if its models are read from checkpoints and factories; False: by commands of their own."""
    is_of_the_kit: ClassVar[bool] = False
    """True if factories make none."""
    optional_flags: ClassVar[tuple[str, ...]] = ()
    """What a model of a factory takes besides the flags that its bundle needs (`requirements.py`)."""
    protocols: ClassVar[tuple[type, ...]] = ()
    """Of which a module follows one; none: it is called, and needs no more than what is told of a call."""
    own_kind: ClassVar[Kind | None] = None
    """What a row of answers is; None: a choice, or several where the source says so."""
    needs_evaluation: ClassVar[bool] = False
    """True if nothing is proved without evaluation data."""
    has_cache: ClassVar[bool] = False
    """True if a decoder keeps keys and values."""
    takes_int4: ClassVar[bool] = False
    takes_fixed_scales: ClassVar[bool] = True
    """True if there is an int8-static."""
    only_in_fp32: ClassVar[str | None] = None
    """Why there is no other precision; None: there are others."""
    shows_no_attention: ClassVar[str | None] = None
    """Why there is no graph of attention weights; None: there may be one."""
    attends_by_operator: ClassVar[bool] = True
    """True if int8 variants gain by the operator for the CPU that attends to whole inputs."""
    attention_graph: ClassVar[type[AttentionGraph]] = StatelessAttentionGraph
    """Where there is one."""
    more_outputs: ClassVar[type[InPlacePass] | None] = None
    """What lets a decoder for the CPU give more than was traced."""
    inspection: ClassVar[str] = "inspect-text TEXT"
    """Command that shows what a model attends to."""
    measures_batching: ClassVar[bool] = False
    """True if the rows of a batch are compared with the rows alone (`batching`)."""
    is_evaluated_served: ClassVar[bool] = True
    """True if `headway-train evaluate` measures the metric on a server."""
    words_of_error: ClassVar[str] = "logit error"
    """What the card and the command call the error of an export."""
    words_of_names: ClassVar[str] = "Labels"
    """What the card calls the manifest's labels."""
    words_of_total: ClassVar[str] = "Prompt and continuation together have"
    """What `limits.max_total_tokens` limits."""

    def __init__(self, task: Task) -> None:
        """Takes the task; a class may be that of several."""
        self.task = task

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.task})"

    @property
    def flags(self) -> tuple[str, ...]:
        """All that it takes."""
        return needed_flags(self.task) + self.optional_flags

    # What is exported

    @abstractmethod
    def limits(self, module: nn.Module) -> Limits:
        """Reads the lengths that a module states.

        Raises:
            AttributeError, TypeError: It does not state them.
        """

    def check_labels(self, labels: Sequence[str], tagging: Tagging | None = None) -> None:  # noqa: B027 (most: none)
        """Checks the labels of a classifier.

        Raises:
            SourceError: They are none.
        """

    def check_source(self, source: ExportSource) -> None:  # noqa: B027
        """Checks what is exported.

        Raises:
            SourceError: Something is missing.
        """

    def parts_of_checkpoint(self, path: Path, module: nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:
        """Reads fields of `ExportSource` that a checkpoint of the task has; of all: evaluation data.

        Raises:
            SourceError: They cannot be read.
        """
        data = checkpoint.evaluation
        if data is None:
            return {}
        return {"evaluation": read_evaluation(path / data.file, self.task, data.dataset, len(checkpoint.labels))}

    def parts_of_factory(self, factory: str, module: nn.Module) -> dict[str, Any]:
        """Reads such fields of a module from outside the kit; errors are those of `parts_of_checkpoint`."""
        return {}

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads fields of `EvaluationData` (docs/checkpoint.md), and `metric`, where it is another than the first.

        Raises:
            KeyError, OSError, ValueError: The file does not hold them.
        """
        raise NotImplementedError(f"{self.task} has no metric")

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Returns fields of the manifest that its models alone have."""
        return {}

    # Graphs

    def longest_text(self, module: nn.Module) -> int:
        """Returns the most tokens of a text that attend to each other in one run; 0 of other inputs."""
        return 0

    @abstractmethod
    def trace(self, asked: Traceable) -> TracedModel:
        """Traces the graphs that serve.

        Raises:
            SourceError: The module does not follow the protocol.
            TraceError: PyTorch cannot trace it.
        """

    def check_attention(self, module: nn.Module) -> None:
        """Checks that a module's layers can be made to show what they attend to.

        Raises:
            SourceError: They cannot.
        """
        if (problem := kernel_problem(module)) is not None and not returns_attention(module):
            raise SourceError(
                f"{type(module).__name__}: {problem}; the attention of its encoder is computed by a function kernel of "
                "query, key and value: give it one (docs/bring-your-own.md), or leave out --attention"
            )

    def attention_inputs(self, asked: Traceable) -> list[TensorSpec]:
        """Declares what that graph reads."""
        raise NotImplementedError(f"{self.task} shows no attention")

    # Parity with PyTorch

    @abstractmethod
    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares a variant with PyTorch, over batch sizes and lengths that the trace never saw.

        Raises:
            ParityError: They differ by more than `comparison` allows.
        """

    def batching(self, candidate: Candidate) -> BatchingFigures | None:
        """Compares the rows of a batch with the rows alone; None where calls are not joined by an axis of the manifest.

        Raises:
            ParityError: They differ.
        """
        return None

    def attention_items(self, candidate: Candidate) -> Iterator[list[Tensors]]:
        """Yields batches of inputs of the graph `attention`."""
        raise NotImplementedError(f"{self.task} shows no attention")

    # Agreement with fp32

    def kind(self, source: ExportSource) -> Kind:
        """Says what a row of answers is."""
        several = source.classification is not None and source.classification.kind == "multi_label"
        return self.own_kind or ("choices" if several else "choice")

    def has_softmax(self, source: ExportSource) -> bool:
        """True if a softmax makes probabilities of the output `logits`."""
        return self.kind(source) == "choice"

    def least_size(self, source: ExportSource) -> float:
        """Returns the least size that differences of other outputs are divided by."""
        return LEAST_SIZE

    def output_of(self, source: ExportSource) -> str:
        """Returns the name of the output that is judged, whose error the manifest records."""
        return self.recorded

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

    def hold_out(self, source: ExportSource, data: EvaluationData) -> tuple[EvaluationData, EvaluationData] | None:
        """Parts few examples into those that judge and what scales are taken from; None where everything judges."""
        return None

    # Quality

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Measures the metric that evaluation data names."""
        raise NotImplementedError(f"{self.task} has no metric")

    def metric(self, name: str) -> Metric:
        """Returns the metric of a name."""
        return next(metric for metric in self.metrics if metric.name == name)

    # The card

    def names(self, manifest: Manifest) -> Sequence[str]:
        """Returns what the card names of the labels."""
        return manifest.labels

    def image_limits(self, manifest: Manifest) -> list[str]:
        """Says what becomes of images, a sentence each; for a model that has their preprocessing."""
        image = demanded(manifest.image_preprocessing)
        if image.has_cells or image.resize == "patches":
            side = image.multiple
            return [
                f"An image keeps its proportions, and becomes at most {image.most_cells:,} squares of {side} x {side}."
            ]
        if image.fills_square:
            return [f"Every image is resized to a longer side of {image.width} pixels and padded to a square."]
        if image.resize == "inside":
            return [f"Every image is resized to fit into {image.height} x {image.width} pixels, and centred on black."]
        return [f"Every image is resized to {image.height} x {image.width} pixels."]

    def more_sections(self, manifest: Manifest) -> list[str]:
        """Returns paragraphs before the limits."""
        return []

    def summary(self, manifest: Manifest) -> list[str]:
        """Returns lines that the command prints below its table."""
        return []

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says what else is limited."""
        return []


class TaskOfOnePrecision(ExportTask):
    """A task of audio exported in fp32 alone and without a metric, so nothing is judged (`only_in_fp32` says why)."""

    own_kind = "vector"
    names_columns = False
    is_read = False
    is_of_the_kit = True
    is_evaluated_served = False
    takes_fixed_scales = False
    shows_no_attention = NOT_LOOKED_AT

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Not asked for: there is one precision."""
        raise NotImplementedError(f"{self.task} has one precision")

    def inputs_of(
        self, source: ExportSource, data: EvaluationData, most: int | None, candidate: Candidate | None
    ) -> Inputs:
        """Not asked for: no metric is measured."""
        raise NotImplementedError(f"{self.task} has no metric")
