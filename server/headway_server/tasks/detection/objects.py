"""Objects of a detector's outputs.

Q boxes of an image, C labels, T tokens of a text of all labels, N objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Detection, LabelPrompt
from headway_server.tasks.outputs import sigmoid, softmax

BOXES: Final = "boxes"
"""Output of a detector: centre, width and height of each box, as shares of the image, (Q, 4)."""
LABEL_QUERIES: Final = "label_queries"
"""Output of a detector of the caller's labels: what labels' embeddings are multiplied with, (Q, D)."""
LOGIT_OFFSETS: Final = "logit_offsets"
"""Output of such a detector: what is added to the products of a box, (Q,)."""
FEATURES: Final = "features"
"""Output of a detector of joined labels: maps of features in a row, (N, D), which its decoder reads."""
MAP_SIZES: Final = "map_sizes"
"""Output of such a detector: rows and columns of each map, (M, 2)."""
TOKEN_LOGITS: Final = "token_logits"  # noqa: S105 (the name of a tensor)
"""Output of such a decoder: a logit for each box and token of the labels' text, (Q, T)."""
MAX_SUPPRESSED: Final = 1000
"""Objects of an image that non-maximum suppression looks at, those of the highest scores: 10 ms."""


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
        nms_threshold: float | None = None,
    ) -> Objects:
        """Reads objects as `post_process_object_detection` of transformers does, but in the order of their scores.

        Args:
            logits: (Q, C), or with `softmax` (Q, C + 1).
            boxes: (Q, 4), the output `boxes`.
            scheme: Mapping of logits to scores.
            threshold: Objects with a score of at most this are left out.
            size: Width and height of the image, in pixels.
            chosen: (C,), True for labels whose objects are kept; None: all.
            nms_threshold: Intersection over union above which the worse of two objects of a label is left out; None:
                none is.

        Raises:
            FloatingPointError: A value is not finite.
        """
        if not (np.isfinite(logits).all() and np.isfinite(boxes).all()):
            raise FloatingPointError("the model's objects have values that are not finite")
        if scheme.scores == "softmax":
            probabilities = softmax(logits)[:, :-1]
            labels = probabilities.argmax(axis=-1)  # (Q,)
            places, scores = np.arange(len(labels)), probabilities.max(axis=-1)
        elif scheme.scores == "best_sigmoid":
            labels = logits.argmax(axis=-1)  # (Q,)
            places, scores = np.arange(len(labels)), sigmoid(logits.max(axis=-1))
        else:
            scores = sigmoid(logits).ravel()  # (Q C,)
            places, labels = np.divmod(np.arange(scores.size), logits.shape[-1])
        kept = np.flatnonzero(scores > np.float32(threshold))
        most = scheme.max_objects if nms_threshold is None else MAX_SUPPRESSED
        kept = kept[np.argsort(-scores[kept], kind="stable")][:most]
        centres, sides = boxes[places[kept], :2], boxes[places[kept], 2:]
        corners = np.concatenate([centres - sides / 2, centres + sides / 2], axis=-1)  # (N, 4)
        if nms_threshold is not None:
            best = suppress(corners, labels[kept], nms_threshold)[: scheme.max_objects]
            kept, corners = kept[best], corners[best]
        if chosen is not None:
            of_labels = chosen[labels[kept]]
            kept, corners = kept[of_labels], corners[of_labels]
        return cls(scores[kept], labels[kept], corners * np.array([*size, *size], np.float32))


def join_labels(labels: Sequence[NDArray[np.int64]], prompt: LabelPrompt) -> NDArray[np.int64]:
    """Returns the text of labels, (T,), of the tokens of each."""
    parts = [part for label in labels for part in (label, [prompt.separator])]
    return np.concatenate([[prompt.begin], *parts, [prompt.end]]).astype(np.int64)


def label_logits(token_logits: NDArray[np.float32], lengths: Sequence[int]) -> NDArray[np.float32]:
    """Reads logits of labels, (Q, C), of those of the tokens of their text, (Q, T).

    The logit of a label is the largest one of its tokens. The best label of a box has the largest one of all tokens,
    separators included: that is the score of a box in `post_process_grounded_object_detection` of transformers.

    Args:
        token_logits: Of a text of `join_labels`.
        lengths: Tokens of each label.
    """
    ends = np.cumsum(lengths) + np.arange(1, len(lengths) + 1)  # behind the first token, and a separator a label
    starts = ends - np.asarray(lengths)
    bounds = np.stack([starts, ends], axis=1).ravel()  # of labels and of the separators behind them, in turn
    logits: NDArray[np.float32] = np.maximum.reduceat(token_logits, bounds, axis=1)[:, ::2]
    best = logits.argmax(axis=1)
    logits[np.arange(len(logits)), best] = token_logits.max(axis=1)
    return logits


def suppress(boxes: NDArray[np.float32], labels: NDArray[np.int64], threshold: float) -> NDArray[np.int64]:
    """Returns the rows that non-maximum suppression keeps: those that no kept better one of their label overlaps.

    Args:
        boxes: (N, 4): left, top, right and bottom, the object with the highest score first.
        labels: (N,).
        threshold: Intersection over union above which two objects overlap.
    """
    areas = np.maximum(boxes[:, 2:] - boxes[:, :2], 0).prod(axis=-1)  # (N,)
    is_kept = np.ones(len(boxes), np.bool_)
    for row in range(len(boxes)):
        if not is_kept[row]:
            continue
        rest = row + 1 + np.flatnonzero(is_kept[row + 1 :] & (labels[row + 1 :] == labels[row]))
        sides = np.minimum(boxes[row, 2:], boxes[rest, 2:]) - np.maximum(boxes[row, :2], boxes[rest, :2])
        common = np.maximum(sides, 0).prod(axis=-1)
        is_kept[rest[common > threshold * (areas[row] + areas[rest] - common)]] = False
    return np.flatnonzero(is_kept)
