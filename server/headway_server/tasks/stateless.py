"""What served models without state have in common: a bundle, an admission and a batcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway_server.batching import Batcher, BatchGraph
from headway_server.bundles import Bundle, ClassificationScheme, Manifest, Precision
from headway_server.observers import ModelId, Observer
from headway_server.runtime import Runtime
from headway_server.serving.families import ServedModel
from headway_server.serving.permits import Admission, MeasuredPace
from headway_server.settings import ServerSettings
from headway_server.tasks.inspection.inspector import Inspector
from headway_server.tasks.outputs import EMBEDDING, LOGITS, LabelReader


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessParts:
    """What a stateless model is made of, beside its bundle; `load` opens them."""

    precision: Precision
    """Of the variant that runs."""
    graph: BatchGraph
    """Of that variant, warmed up."""
    max_padding: int | None
    """See `Batcher`, as `observer`."""
    runtime: Runtime
    settings: ServerSettings
    observer: Observer


class StatelessModel(ServedModel):
    """A model whose graph answers each input by itself."""

    _noun = "inputs"
    """What it reads, for messages."""
    _held_noun = "vectors"
    """What else is held until a call is answered, for messages."""

    def __init__(self, bundle: Bundle, parts: StatelessParts, *, budget: int, max_waiting: int) -> None:
        """Makes a model of its parts.

        Args:
            bundle: The bundle.
            parts: Its parts.
            budget: See `Batcher`.
            max_waiting: Most inputs that are admitted and not yet answered.
        """
        manifest, graph, observer = bundle.manifest, parts.graph, parts.observer
        super().__init__(bundle, parts.precision, graph.device)
        self.classification = manifest.classification or ClassificationScheme()
        """How logits become probabilities, and which labels apply."""
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
        self._held = Admission(limit=None, noun=self._held_noun, owner=manifest.name, max_bytes=max_bytes)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names in the order of the outputs."""
        return self.bundle.manifest.labels

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"{type(self).__name__}({manifest.name}/{manifest.version}, {self.precision}, {self._admission!r})"


def expected_outputs(manifest: Manifest, *axes: int) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of an item's outputs: its logits, at each place of `axes`, and an embedding."""
    expected: dict[str, tuple[int, ...]] = {}
    if manifest.labels or manifest.scoring is not None:
        expected[LOGITS] = (*axes, len(manifest.labels) or 1)
    if manifest.embedding is not None:
        expected[EMBEDDING] = (manifest.embedding.dimension,)
    return expected
