"""What served models without state have in common: a bundle, an admission and a batcher."""

from __future__ import annotations

from collections.abc import Mapping

from headway_server.batching import Batcher, BatchGraph
from headway_server.bundles import Bundle, ClassificationScheme, Manifest, Precision
from headway_server.observers import ModelId, Observer
from headway_server.serving.families import ServedModel
from headway_server.serving.permits import Admission, MeasuredPace
from headway_server.tasks.inspection.inspector import Inspector
from headway_server.tasks.outputs import EMBEDDING, LOGITS, LabelReader


class StatelessModel(ServedModel):
    """A model whose graph answers each input by itself."""

    _noun = "inputs"
    """What it reads, for messages."""
    _held_noun = "vectors"
    """What else is held until a call is answered, for messages."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        graph: BatchGraph,
        *,
        budget: int,
        max_padding: int | None,
        max_waiting: int,
        max_waiting_bytes: int,
        observer: Observer,
        inspector: Inspector,
    ) -> None:
        """Makes a model of its parts; `load` makes the parts.

        Args:
            bundle: The bundle.
            precision: Of the variant that runs.
            graph: Of that variant, warmed up.
            budget: Of the batcher, as `max_padding` and `observer` are.
            max_padding: See `Batcher`.
            max_waiting: Most inputs that are admitted and not yet answered.
            max_waiting_bytes: Likewise, most bytes of them, and of what else is made for calls that last.
            observer: See `Batcher`.
            inspector: Shows what the model attends to.
        """
        manifest = bundle.manifest
        super().__init__(bundle, precision, graph.device)
        self.classification = manifest.classification or ClassificationScheme()
        """How logits become probabilities, and which labels apply."""
        self._label_reader = LabelReader(manifest.labels, self.classification)
        self._inspector = inspector
        self._batcher = Batcher(
            graph,
            budget=budget,
            model=ModelId(name=manifest.name, version=manifest.version),
            session=graph.session,
            max_padding=max_padding,
            observer=observer,
        )
        self.workers.append(self._batcher)
        self.closers.append(inspector.close)
        self._admission = Admission(
            limit=max_waiting,
            noun=self._noun,
            owner=manifest.name,
            max_bytes=max_waiting_bytes,
            pace=MeasuredPace(),
        )
        self._held = Admission(limit=None, noun=self._held_noun, owner=manifest.name, max_bytes=max_waiting_bytes)

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
