"""Base of served models without state: bundle, admission and batcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from headway_server.batching import Batcher, BatchGraph
from headway_server.batching.memory_plan import plan_runs
from headway_server.bundles import Bundle, ClassificationScheme, LateInteraction, Manifest, Precision, Variant
from headway_server.observers import ModelId, Observer
from headway_server.runtime import Runtime, available_bytes, format_size
from headway_server.serving.families import ServedModel
from headway_server.serving.permits import Admission, MeasuredPace
from headway_server.settings import ServerSettings
from headway_server.tasks.inspection.inspector import Inspector
from headway_server.tasks.outputs import EMBEDDING, LOGITS, VECTORS, LabelReader

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessParts:
    """Parts of a stateless model other than its bundle; `load` opens them."""

    precision: Precision
    """Precision of the variant in use."""
    graph: BatchGraph
    """Graph of that variant, warmed up."""
    max_padding: int | None
    """`observer` of `Batcher`."""
    runtime: Runtime
    settings: ServerSettings
    observer: Observer


class StatelessModel(ServedModel):
    """Model whose graph computes each input independently."""

    _noun = "inputs"
    """Noun of the inputs in error messages."""
    _memory_noun = "vectors"
    """Noun of other data in error messages; it is in memory until a call is answered."""

    def __init__(self, bundle: Bundle, parts: StatelessParts, *, budget: int, max_waiting: int) -> None:
        """Assembles a model from its parts.

        Args:
            bundle: The bundle.
            parts: Its parts.
            budget: See `Batcher`.
            max_waiting: Maximum admitted and unanswered inputs.
        """
        manifest, graph, observer = bundle.manifest, parts.graph, parts.observer
        super().__init__(bundle, parts.precision, graph.device)
        self.classification = manifest.classification or ClassificationScheme()
        """Rules from logits to probabilities and labels."""
        self._label_reader = LabelReader(manifest.labels, self.classification)
        max_mib = parts.settings.max_attention_mib
        self._inspector = Inspector(bundle, parts.precision, parts.runtime, max_mib=max_mib, observer=observer)
        self._batcher = Batcher(
            graph,
            budget=budget,
            model=ModelId(name=manifest.name, version=manifest.version),
            session=graph.session,
            max_padding=parts.max_padding,
            observer=observer,
        )
        self.workers.append(self._batcher)
        self.closers.append(self._inspector.close)
        max_bytes = parts.settings.batching.max_waiting_bytes
        self._admission = Admission(
            limit=max_waiting, noun=self._noun, owner=manifest.name, max_bytes=max_bytes, pace=MeasuredPace()
        )
        self._memory = Admission(limit=None, noun=self._memory_noun, owner=manifest.name, max_bytes=max_bytes)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names in the order of the outputs."""
        return self.bundle.manifest.labels

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"{type(self).__name__}({manifest.name}/{manifest.version}, {self.precision}, {self._admission!r})"


def late_interaction(manifest: Manifest) -> LateInteraction | None:
    """Returns how a model compares the vectors of two texts' tokens; None for a model that does not."""
    return None if manifest.scoring is None else manifest.scoring.late_interaction


def expected_outputs(manifest: Manifest, *axes: int) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of an item's outputs: logits or tokens' vectors, with the leading `axes`, and an embedding."""
    expected: dict[str, tuple[int, ...]] = {}
    if (late := late_interaction(manifest)) is not None:
        expected[VECTORS] = (*axes, late.dimension)
    elif manifest.labels or manifest.scoring is not None:
        expected[LOGITS] = (*axes, len(manifest.labels) or 1)
    if manifest.embedding is not None:
        expected[EMBEDDING] = (manifest.embedding.dimension,)
    return expected


def with_memory(
    runtime: Runtime, manifest: Manifest, variant: Variant, *, largest: int, batch: int, unit: str = "tokens"
) -> Runtime:
    """Returns a runtime with as many lanes as fit into memory with the largest inputs.

    Args:
        runtime: With as many as the cores allow.
        manifest: The model.
        variant: The variant that runs.
        largest: Size of the largest input, in `unit`.
        batch: Size of a batch, unless one input is larger.
        unit: Name of the unit for messages.

    Raises:
        MemoryUnavailableError: Not even one does.
    """
    run_bytes = variant.graphs["model"].run_bytes
    if run_bytes is None:
        return runtime
    owner, weights = f"{manifest.name}/{manifest.version}", manifest.weight_bytes(variant)
    sessions = 2 if runtime.num_lanes > 1 else 1
    available = available_bytes(runtime.device)
    plan = plan_runs(
        run_bytes,
        num_lanes=runtime.num_lanes,
        largest=largest,
        batch=batch,
        available=None if available is None else max(0, available - sessions * weights),
        owner=owner,
        unit=unit,
    )
    _log.info("memory", model=owner, weights=f"{sessions} x {format_size(weights)}", runs=str(plan))
    return runtime.with_lanes(plan.num_lanes)
