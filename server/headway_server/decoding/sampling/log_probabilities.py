"""The model's own log-probabilities, log softmax(logits), before anything is done to the logits.

Shapes: n rows, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.sampling.candidates import top_candidates
from headway_server.decoding.sampling.weights import WeightScratch

_BLOCK_TOKENS = 2**20
"""Logits that are worked on at a time, so that a long prompt takes no more memory than a short one."""


def token_log_probabilities(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64], num_top: int
) -> tuple[NDArray[np.float64], list[list[tuple[int, float]]]]:
    """Returns how likely given tokens were, and which were the likeliest.

    Args:
        logits: (T, V) float32, contiguous.
        token_ids: (T,) int64, one of each row.
        num_top: Likeliest tokens wanted of each row; of a smaller vocabulary, all.

    Returns:
        Natural logarithms of their probabilities (T,), NaN in rows that are not finite; and for each row the `num_top`
        likeliest tokens with theirs, the likeliest first, the lower id among equals.
    """
    log_probabilities = np.zeros(len(logits))
    top_tokens: list[list[tuple[int, float]]] = []
    if not len(logits):
        return log_probabilities, top_tokens
    step = max(_BLOCK_TOKENS // logits.shape[1], 1)
    scratch = WeightScratch(num_rows=min(step, len(logits)), vocab_size=logits.shape[1])
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        maximum = logits[rows].max(axis=1)
        normalizers = maximum + scratch.log_totals(logits[rows], maximum)
        chosen = np.take_along_axis(logits[rows], token_ids[rows, np.newaxis], axis=1)[:, 0]
        log_probabilities[rows] = chosen - normalizers
        top_tokens += likeliest(logits[rows], normalizers, np.full(len(maximum), num_top))
    return log_probabilities, top_tokens


def likeliest(
    logits: NDArray[np.float32], normalizers: NDArray[np.float64], counts: NDArray[np.int64]
) -> list[list[tuple[int, float]]]:
    """Returns the likeliest `counts` (n,) tokens of each row with their log-probabilities, `logits - normalizers`.

    Args:
        logits: (n, V) float32, contiguous.
        normalizers: (n,) log sum exp of the logits; NaN in rows without a meaning, which get none.
        counts: (n,) at least 0; more than V is V.
    """
    counts = np.where(np.isfinite(normalizers), np.minimum(counts, logits.shape[1]), 0)
    top_tokens: list[list[tuple[int, float]]] = [[] for _ in range(len(logits))]
    wanted = np.flatnonzero(counts)
    if not wanted.size:
        return top_tokens
    some = logits if len(wanted) == len(logits) else logits[wanted]
    ids, values = top_candidates(some, counts[wanted])  # (n, C)
    log_probabilities = values - normalizers[wanted, np.newaxis]
    lists = zip(ids.tolist(), log_probabilities.tolist(), strict=True)
    for row, (row_ids, row_values) in zip(wanted.tolist(), lists, strict=True):
        top_tokens[row] = list(zip(row_ids, row_values, strict=True))[: counts[row]]
    return top_tokens
