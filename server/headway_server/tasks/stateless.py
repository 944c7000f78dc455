"""What stateless models have in common as they are served: one batcher, one admission, named labels.

C is the number of labels, N that of a call's items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.batcher import Batcher
from headway_server.batching.tensors import top_k_indices
from headway_server.bundles import Bundle, ClassificationScheme, Precision
from headway_server.runtime import Device
from headway_server.serving.permits import Admission


class ScoredLabel(NamedTuple):
    """A label with its probability."""

    label: str
    probability: float
    is_selected: bool
    """Whether the label applies."""


class StatelessModel:
    """What the models here have in common: one batcher, one admission, labels."""

    def __init__(
        self, bundle: Bundle, precision: Precision, device: Device, batcher: Batcher[Any], admission: Admission
    ) -> None:
        self.bundle = bundle
        self.precision = precision
        self.device: Device = device
        self.classification = bundle.manifest.classification or ClassificationScheme()
        """How logits become probabilities, and which labels apply."""
        self._batcher = batcher
        self._admission = admission

    @property
    def labels(self) -> tuple[str, ...]:
        """Names in the order of the outputs."""
        return self.bundle.manifest.labels

    def start(self) -> None:
        """Starts the batcher; called with the event loop running."""
        self._batcher.start()

    @property
    def is_alive(self) -> bool:
        """Whether calls are answered: from `start` to `close`."""
        return self._batcher.is_alive

    def stalled_s(self) -> float:
        """Returns for how many seconds the oldest running batch has been running; 0.0 where none is."""
        return 0.0

    def close(self) -> bool:
        """Stops the batcher; what still waits fails. True if its threads have ended."""
        self._batcher.close()
        return True

    def _top_labels(
        self, results: Sequence[NDArray[np.float32]], top_k: int, threshold: float | None = None
    ) -> list[tuple[ScoredLabel, ...]]:
        """Names the `top_k` largest of N items' probabilities, each (C,), and says which labels apply.

        Args:
            results: The probabilities.
            top_k: Labels to name.
            threshold: Probability from which a label applies, in place of the bundle's.
        """
        labels, thresholds = self.labels, self._thresholds(threshold)
        named = []
        for row in results:
            scores = row.tolist()
            if not math.isfinite(sum(scores)):
                raise FloatingPointError(f"{self!r} answered probabilities that are not numbers")
            indices = top_k_indices(row, top_k).tolist()
            applying = indices if self.classification.kind == "multi_label" else indices[:1]
            selected = {index for index in applying if scores[index] >= thresholds[index]}
            named.append(tuple(ScoredLabel(labels[index], scores[index], index in selected) for index in indices))
        return named

    def _thresholds(self, threshold: float | None) -> Sequence[float]:
        """The probabilities from which labels apply, each the nearest of those that a float32 can hold."""
        own = self.classification.thresholds or (0.0,) * len(self.labels)
        thresholds = own if threshold is None else (threshold,) * len(own)
        rounded: list[float] = np.asarray(thresholds, np.float32).tolist()
        return rounded

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"{type(self).__name__}({manifest.name}/{manifest.version}, {self.precision}, {self._admission!r})"
