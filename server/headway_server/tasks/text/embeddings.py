"""Embeddings: the vectors that a classifier tells labels by.

N is the number of a call's items, D the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.tensors import unit_vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedText:
    """The vector of one text, or of one pair."""

    values: NDArray[np.float32]
    """(D,)"""
    num_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedImage:
    """The vector of one image, and the image's size in pixels."""

    values: NDArray[np.float32]
    """(D,)"""
    width: int
    height: int


def to_vectors(rows: Sequence[NDArray[np.float32]], *, normalize: bool) -> NDArray[np.float32]:
    """Stacks N embeddings, each (D,), and scales them to length 1 if asked: (N, D).

    Raises:
        FloatingPointError: One of their numbers is not finite.
    """
    vectors = np.stack(rows)  # (N, D)
    if not np.isfinite(vectors).all():
        raise FloatingPointError("a model answered embeddings that are not numbers")
    return unit_vectors(vectors) if normalize else vectors
