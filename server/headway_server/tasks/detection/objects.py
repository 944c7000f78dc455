"""Objects of a detector's outputs.

Q boxes of an image, C labels, N objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Detection
from headway_server.tasks.outputs import sigmoid, softmax

BOXES: Final = "boxes"
"""Output of a detector: centre, width and height of each box, as shares of the image, (Q, 4)."""


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Objects of an image, the one with the highest score first."""

    scores: NDArray[np.float32]
    """(N,)"""
    labels: NDArray[np.int64]
    """(N,), the number of each object's label."""
    boxes: NDArray[np.float32]
    """(N, 4): left, top, right and bottom in pixels of the image."""

    @classmethod
    def of(
        cls,
        logits: NDArray[np.float32],
        boxes: NDArray[np.float32],
        scheme: Detection,
        *,
        threshold: float,
        size: tuple[int, int],
        chosen: NDArray[np.bool_] | None = None,
    ) -> Objects:
        """Reads objects as `post_process_object_detection` of transformers does, but in the order of their scores.

        Args:
            logits: (Q, C), or with `softmax` (Q, C + 1).
            boxes: (Q, 4), the output `boxes`.
            scheme: Mapping of logits to scores.
            threshold: Objects with a score of at most this are left out.
            size: Width and height of the image, in pixels.
            chosen: (C,), True for labels whose objects are kept; None: all.

        Raises:
            FloatingPointError: A value is not finite.
        """
        if not (np.isfinite(logits).all() and np.isfinite(boxes).all()):
            raise FloatingPointError("the model's objects have values that are not finite")
        if scheme.scores == "softmax":
            probabilities = softmax(logits)[:, :-1]
            labels = probabilities.argmax(axis=-1)  # (Q,)
            places, scores = np.arange(len(labels)), probabilities.max(axis=-1)
        else:
            scores = sigmoid(logits).ravel()  # (Q C,)
            places, labels = np.divmod(np.arange(scores.size), logits.shape[-1])
        kept = np.flatnonzero(scores > np.float32(threshold))
        kept = kept[np.argsort(-scores[kept], kind="stable")][: scheme.max_objects]
        if chosen is not None:
            kept = kept[chosen[labels[kept]]]
        centres, sides = boxes[places[kept], :2], boxes[places[kept], 2:]
        corners = np.concatenate([centres - sides / 2, centres + sides / 2], axis=-1)
        return cls(scores[kept], labels[kept], corners * np.array([*size, *size], np.float32))
