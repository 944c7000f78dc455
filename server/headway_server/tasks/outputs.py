"""What classifiers answer: labels from the output `logits` of a graph, vectors from its output `embedding`.

C is the number of labels, D the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import ClassificationScheme

LOGITS: Final = "logits"
EMBEDDING: Final = "embedding"


class ScoredLabel(NamedTuple):
    """A label with its probability."""

    label: str
    probability: float
    is_selected: bool
    """True if the label applies."""


class LabelReader:
    """Turns the logits of one item into labels. Safe to use from several threads."""

    def __init__(self, labels: Sequence[str], scheme: ClassificationScheme) -> None:
        """Takes the names of the C outputs, and how logits become probabilities."""
        self._labels = tuple(labels)
        self._scheme = scheme
        self._thresholds = np.asarray(scheme.thresholds or (0.0,) * len(self._labels), np.float32)  # (C,)

    def read(self, logits: NDArray[np.float32], top_k: int, threshold: float | None = None) -> tuple[ScoredLabel, ...]:
        """Returns the most likely labels, the likeliest first, ties in the order of the outputs.

        Args:
            logits: (C,)
            top_k: Labels to return, 1 to C.
            threshold: Probability from which a label applies, in place of the model's; only the likeliest label of a
                single-label model may apply.

        Raises:
            FloatingPointError: A probability is not a number.
        """
        with np.errstate(invalid="ignore"):
            probabilities = to_probabilities(logits, self._scheme)  # (C,)
        if not np.isfinite(probabilities).all():
            raise FloatingPointError("the model's logits make probabilities that are not numbers")
        order = np.argsort(-probabilities, kind="stable")[:top_k]
        chosen = probabilities[order]  # (top_k,)
        selected = chosen >= (self._thresholds[order] if threshold is None else np.float32(threshold))
        if self._scheme.kind == "single_label":
            selected[1:] = False
        names = map(self._labels.__getitem__, order.tolist())
        return tuple(map(ScoredLabel, names, chosen.tolist(), selected.tolist()))

    def __repr__(self) -> str:
        return f"LabelReader({len(self._labels)} labels, {self._scheme.kind})"


def read_vector(embedding: NDArray[np.float32], *, normalize: bool) -> NDArray[np.float32]:
    """Checks an embedding, (D,), and scales it to length 1 if asked; a vector of zeros stays one.

    Raises:
        FloatingPointError: A number of it is not finite.
    """
    if not np.isfinite(embedding).all():
        raise FloatingPointError("the model's embedding holds what is not a number")
    if not normalize:
        return embedding.copy()  # the batch's array, of which it is a part, is not kept for it
    length = np.sqrt(np.square(embedding, dtype=np.float64).sum())
    scaled: NDArray[np.float32] = (embedding / max(length, np.finfo(np.float64).tiny)).astype(np.float32)
    return scaled


def read_embedding(
    row: Mapping[str, NDArray[Any]], kind: Literal["none", "raw", "normalized"]
) -> NDArray[np.float32] | None:
    """Reads the embedding among the outputs of an item, (D,); None where none is wanted. Errors: `read_vector`."""
    return None if kind == "none" else read_vector(row[EMBEDDING], normalize=kind == "normalized")


def to_probabilities(logits: NDArray[np.float32], scheme: ClassificationScheme) -> NDArray[np.float32]:
    """Divides logits, (..., C), by the temperature and makes float32 probabilities of them."""
    scaled = logits.astype(np.float32, copy=False) / np.float32(scheme.temperature)
    return sigmoid(scaled) if scheme.kind == "multi_label" else softmax(scaled)


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns probabilities along the last axis, (..., C), in float32, without overflow whatever the logits."""
    logits = logits.astype(np.float32, copy=False)
    exponentials: NDArray[np.float32] = np.exp(logits - logits.max(axis=-1, keepdims=True))  # (..., C)
    exponentials /= exponentials.sum(axis=-1, keepdims=True, dtype=np.float32)
    return exponentials


def sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns a probability for every logit, in float32, without overflow whatever the logits."""
    half: NDArray[np.float32] = np.tanh(logits.astype(np.float32, copy=False) * np.float32(0.5))
    return (half + np.float32(1.0)) * np.float32(0.5)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns logarithms of probabilities along the last axis, (..., C), in float32; finite where the logits are."""
    shifted = logits.astype(np.float32, copy=False)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)  # (..., C)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float32)
    result: NDArray[np.float32] = shifted - np.log(total)
    return result
