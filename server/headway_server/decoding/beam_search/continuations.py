"""What may follow the beams of many sentences, ranked, in one go.

Shapes: B sentences of K beams, R = B K rows, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.beam_search.beams import BeamSearch, Continuation
from headway_server.decoding.sampling.ranked_rows import RankedRows


def rank_plain(
    ranked: RankedRows, rows: NDArray[np.int64], log_probabilities: NDArray[np.float64]
) -> list[list[Continuation]]:
    """Ranks the continuations of sentences that have one bank.

    Args:
        ranked: The candidates of each row.
        rows: (B, K) int64 the row of each beam; of places without a beam, any row.
        log_probabilities: (B, K) float64 of each beam so far; minus infinity of places without a beam.

    Returns:
        Of each sentence the best 2 K, as `BeamSearch.advance` wants them.
    """
    num_sentences, num_beams = rows.shape
    width = min(2 * num_beams, ranked.token_ids.shape[1])
    sums = log_probabilities[:, :, np.newaxis] + ranked.log_probabilities[rows, :width]  # (B, K, C)
    flat = sums.reshape(num_sentences, num_beams * width)
    order = np.argsort(-flat, axis=1, kind="stable")[:, : 2 * num_beams]  # stable: the lower beam first among equals
    sums = np.take_along_axis(flat, order, axis=1)
    token_ids = np.take_along_axis(ranked.token_ids[rows, :width].reshape(flat.shape), order, axis=1)
    beams = order // width
    lists = zip(sums.tolist(), beams.tolist(), token_ids.tolist(), strict=True)
    return [
        [Continuation(*row) for row in zip(*columns, strict=True) if row[0] != -np.inf]  # (2 K,) of each
        for columns in lists
    ]


def rank_restricted(ranked: RankedRows, search: BeamSearch, rows: Sequence[int]) -> list[Continuation]:
    """Ranks the continuations of a sentence that has a prefix or required phrases.

    Args:
        ranked: The candidates of each row, `num_candidates` of them at least.
        search: The search.
        rows: The row of each beam.
    """
    continuations: list[Continuation] = []
    for number, (beam, row) in enumerate(zip(search.beams, rows, strict=False)):
        forced = search.forced_token
        candidates = (
            dict(zip(ranked.token_ids[row].tolist(), ranked.log_probabilities[row].tolist(), strict=True))
            if forced is None
            else {}
        )
        for token_id in search.wanted(beam) if forced is None else (forced,):
            candidates[token_id] = ranked.log_probability(row, token_id)
        continuations += [
            Continuation(beam.log_probability + log_probability, number, token_id)
            for token_id, log_probability in candidates.items()
            if log_probability != -np.inf
        ]
    return sorted(continuations, key=lambda it: (-it.log_probability, it.beam, it.token_id))


def num_candidates(search: BeamSearch, num_beams: int) -> int:
    """Returns how many candidates of each row its search may need to see.

    A beam's continuations are in one bank but for the tokens that bring it nearer to a phrase. So among the best 2 K
    and as many more as there are such tokens, there are the best 2 K of that bank.
    """
    wanted = max(len(search.wanted(beam)) for beam in search.beams)
    return 2 * num_beams + wanted
