"""What stateless models have in common as they are served: one batcher, one admission, named labels.

C is the number of labels, N that of a call's items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.admission import Admission
from headway_server.batching.batcher import BatchedResults, Batcher
from headway_server.batching.tensors import top_k_indices
from headway_server.bundles import Bundle, ClassificationScheme, Precision
from headway_server.runtime import Device

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimings:
    """Where the time of a call went, in seconds."""

    queue_s: float
    preprocessing_s: float
    inference_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredLabel:
    """A label with its probability."""

    label: str
    probability: float
    is_selected: bool
    """Whether the label applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification(Generic[Result]):
    """The answer to a call: one result an input, in order."""

    results: list[Result]
    timings: CallTimings


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

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits, at most `timeout_s`, for what was taken."""
        await self._admission.drain(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether calls are answered: from `start` to `close`."""
        return self._batcher.is_alive

    def close(self) -> None:
        """Stops the batcher; what still waits fails."""
        self._batcher.close()

    def _top_labels(
        self, results: Sequence[NDArray[np.float32]], top_k: int, threshold: float | None = None
    ) -> list[tuple[ScoredLabel, ...]]:
        """Names the `top_k` largest of N items' probabilities, each (C,), and says which labels apply.

        Args:
            results: The probabilities.
            top_k: Labels to name.
            threshold: Probability from which a label applies, in place of the bundle's.
        """
        rows = np.stack(results)  # (N, C)
        if not np.isfinite(rows).all():
            raise FloatingPointError(f"{self!r} answered probabilities that are not numbers")
        indices = top_k_indices(rows, top_k)  # (N, k)
        scores = np.take_along_axis(rows, indices, axis=-1)  # (N, k)
        selected = np.take_along_axis(self._select(rows, threshold), indices, axis=-1)  # (N, k)
        return [
            tuple(
                ScoredLabel(label=self.labels[i], probability=p, is_selected=applies)
                for i, p, applies in zip(*row, strict=True)
            )
            for row in zip(indices.tolist(), scores.tolist(), selected.tolist(), strict=True)
        ]

    def _select(self, rows: NDArray[np.float32], threshold: float | None) -> NDArray[np.bool_]:
        """Tells which labels apply, (N, C), from their probabilities, (N, C)."""
        if self.classification.kind == "multi_label":
            thresholds = self.classification.thresholds if threshold is None else (threshold,)
            return rows >= np.asarray(thresholds, np.float32)
        selected = np.zeros(rows.shape, np.bool_)
        best = top_k_indices(rows, 1)  # (N, 1)
        reached = np.take_along_axis(rows, best, axis=-1) >= np.float32(threshold or 0)
        np.put_along_axis(selected, best, reached, axis=-1)
        return selected

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"{type(self).__name__}({manifest.name}/{manifest.version}, {self.precision}, {self._admission!r})"


def call_timings(batched: BatchedResults, preprocessing_s: float) -> CallTimings:
    """Tells where the time of a call went that was prepared in `preprocessing_s` seconds and then batched."""
    return CallTimings(queue_s=batched.queue_s, preprocessing_s=preprocessing_s, inference_s=batched.inference_s)
