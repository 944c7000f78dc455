"""Results of classifiers and embedders: labels from a graph's output `logits`, vectors from `embedding`.

C labels, D width of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Postprocess
from headway_server.bundles import ClassificationScheme, Manifest

LOGITS: Final = "logits"
EMBEDDING: Final = "embedding"
VECTORS: Final = "token_vectors"


class ScoredLabel(NamedTuple):
    """A label with its probability."""

    label: str
    probability: float
    is_selected: bool
    """True if the label applies."""


class LabelReader:
    """Converts the probabilities of one item to labels. Thread-safe."""

    def __init__(self, labels: Sequence[str], scheme: ClassificationScheme) -> None:
        """Takes the names of the C outputs, and the rule by which labels apply."""
        self._labels = tuple(labels)
        self._scheme = scheme
        # As float32, like the probabilities they are compared with.
        self._thresholds = np.asarray(scheme.thresholds or (0.0,) * len(self._labels), np.float32).tolist()

    def read(
        self, probabilities: NDArray[np.float32], top_k: int, threshold: float | None = None
    ) -> tuple[ScoredLabel, ...]:
        """Returns the most likely labels, the likeliest first, ties in the order of the outputs.

        Args:
            probabilities: By `to_probabilities`, (C,).
            top_k: Labels to return, 1 to C.
            threshold: Minimum probability of a label that applies, instead of the model's. Of a single-label model only
            the likeliest label may apply.

        Raises:
            FloatingPointError: A probability is NaN.
        """
        values: list[float] = probabilities.tolist()
        if not math.isfinite(sum(values)):
            raise FloatingPointError("the model's logits make probabilities that are not numbers")
        thresholds = self._thresholds if threshold is None else [float(np.float32(threshold))] * len(values)
        order = sorted(range(len(values)), key=values.__getitem__, reverse=True)[:top_k]
        may_apply = len(order) if self._scheme.kind == "multi_label" else 1
        return tuple(
            ScoredLabel(self._labels[label], values[label], rank < may_apply and values[label] >= thresholds[label])
            for rank, label in enumerate(order)
        )

    def __repr__(self) -> str:
        return f"LabelReader({len(self._labels)} labels, {self._scheme.kind})"


def logits_postprocess(manifest: Manifest) -> Postprocess:
    """Returns the function from a batch's logits to probabilities or scores; see `BatchGraph`."""
    if manifest.scoring is not None:
        return {LOGITS: sigmoid} if manifest.scoring.activation == "sigmoid" else {}
    return {LOGITS: partial(to_probabilities, scheme=manifest.classification or ClassificationScheme())}


def read_vector(embedding: NDArray[np.float32], *, normalize: bool) -> NDArray[np.float32]:
    """Checks an embedding, (D,), and scales it to length 1 if requested; zeros stay zeros.

    Raises:
        FloatingPointError: A value is not finite.
    """
    if not np.isfinite(embedding).all():
        raise FloatingPointError("the model's embedding has values that are not finite")
    if not normalize:
        return embedding.copy()  # frees the array of the whole batch
    length = np.sqrt(np.square(embedding, dtype=np.float64).sum())
    scaled: NDArray[np.float32] = (embedding / max(length, np.finfo(np.float64).tiny)).astype(np.float32)
    return scaled


def read_embedding(
    row: Mapping[str, NDArray[Any]], kind: Literal["none", "raw", "normalized"]
) -> NDArray[np.float32] | None:
    """Reads the embedding of an item, (D,); None if not requested. Errors: `read_vector`."""
    return None if kind == "none" else read_vector(row[EMBEDDING], normalize=kind == "normalized")


def to_probabilities(logits: NDArray[np.float32], scheme: ClassificationScheme) -> NDArray[np.float32]:
    """Converts logits (..., C) to float32 probabilities at the scheme's temperature; NaN stays NaN."""
    with np.errstate(invalid="ignore"):
        scaled = logits.astype(np.float32, copy=False) / np.float32(scheme.temperature)
        return sigmoid(scaled) if scheme.kind == "multi_label" else softmax(scaled)


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns probabilities along the last axis, (..., C), in float32; does not overflow."""
    logits = logits.astype(np.float32, copy=False)
    exponentials: NDArray[np.float32] = np.exp(logits - logits.max(axis=-1, keepdims=True))  # (..., C)
    exponentials /= exponentials.sum(axis=-1, keepdims=True, dtype=np.float32)
    return exponentials


def sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns a probability for every logit, in float32; does not overflow."""
    half: NDArray[np.float32] = np.tanh(logits.astype(np.float32, copy=False) * np.float32(0.5))
    return (half + np.float32(1.0)) * np.float32(0.5)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns log-probabilities along the last axis, (..., C), in float32; finite for finite logits."""
    shifted = logits.astype(np.float32, copy=False)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)  # (..., C)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float32)
    result: NDArray[np.float32] = shifted - np.log(total)
    return result


def cosines(query: NDArray[np.float32], candidates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the cosines (candidates,) of the candidates with a query.

    Args:
        query: (D,), of length one.
        candidates: (candidates, D), each of length one.
    """
    values: NDArray[np.float32] = np.clip(candidates @ query, -1.0, 1.0)
    return values
