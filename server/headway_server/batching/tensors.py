"""Arrays of batches: padding on the way in, probabilities on the way out.

B is the number of items, T the tokens of the longest text, C the classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pad(sequences: Sequence[NDArray[np.int64]], pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pads sequences at their ends to the longest.

    Args:
        sequences: B arrays of (T_i,), at least one.
        pad_id: What stands in the places without a token.

    Returns:
        The ids and the mask, 1 at tokens and 0 at padding; int64 (B, T).
    """
    lengths = np.fromiter((len(sequence) for sequence in sequences), np.int64, len(sequences))  # (B,)
    mask = np.arange(lengths.max()) < lengths[:, None]  # (B, T)
    input_ids = np.full(mask.shape, pad_id, np.int64)  # (B, T)
    input_ids[mask] = np.concatenate(sequences)  # row by row, as the tokens are
    return input_ids, mask.astype(np.int64)


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns probabilities along the last axis, (B, C), in float32, without overflow whatever the logits."""
    logits = logits.astype(np.float32, copy=False)
    exponentials: NDArray[np.float32] = np.exp(logits - logits.max(axis=-1, keepdims=True))  # (B, C)
    exponentials /= exponentials.sum(axis=-1, keepdims=True, dtype=np.float32)
    return exponentials


def sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns a probability for every logit, (B, C), in float32, without overflow whatever the logits."""
    half: NDArray[np.float32] = np.tanh(logits.astype(np.float32, copy=False) * np.float32(0.5))
    return (half + np.float32(1.0)) * np.float32(0.5)


def unit_vectors(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales vectors, (N, D), to length 1; a vector of zeros stays one."""
    lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=-1, keepdims=True))  # (N, 1)
    scaled: NDArray[np.float32] = (vectors / np.maximum(lengths, np.finfo(np.float64).tiny)).astype(np.float32)
    return scaled


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns logarithms of probabilities along the last axis, (..., C), in float32; finite where the logits are."""
    shifted = logits.astype(np.float32, copy=False)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)  # (..., C)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float32)
    result: NDArray[np.float32] = shifted - np.log(total)
    return result


def top_k_indices(probabilities: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Returns the indices of the `k` largest values, largest first, ties by index: (C,) to (k,)."""
    return np.argsort(-probabilities, kind="stable")[:k]
