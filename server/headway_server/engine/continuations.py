"""What may follow the beams of many sentences, ranked, in one go.

Shapes: B sentences of K beams, R = B K rows, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway_server.engine.beams import BeamSearch, Continuation
from headway_server.engine.candidates import top_candidates
from headway_server.engine.weights import WeightScratch

_BLOCK_TOKENS = 2**18
"""Logits whose exponentials are summed at a time, so that they stay in a core's cache."""


class RankedRows:
    """The likeliest tokens of each row, with their log-probabilities.

    Attributes:
        token_ids: (R, C) int64, by falling log-probability; the lower id first among equals.
        log_probabilities: (R, C) float64, of the model's own distribution; minus infinity for banned tokens.
        normalizers: (R,) float64 log sum exp of the logits; not finite where the logits mean nothing.
        is_valid: Whether all of them are finite.
    """

    def __init__(
        self, logits: NDArray[np.float32], count: int, banned: Iterable[tuple[int, Iterable[int]]], block: WeightScratch
    ) -> None:
        """Ranks the tokens of each row.

        Args:
            logits: (R, V) float32, contiguous; changed where tokens are banned and where rows mean nothing.
            count: C, 1 to V.
            banned: Rows and the tokens that may not follow there.
            block: Room for the weights of some rows.
        """
        maximum = logits.max(axis=1)
        self.normalizers: NDArray[np.float64] = maximum + block.log_totals(logits, maximum)
        self.logits = logits
        invalid = ~np.isfinite(self.normalizers)
        self.is_valid = not invalid.any()
        if not self.is_valid:
            logits[invalid] = 0  # whoever has such a row fails; the others are ranked beside it
        for row, token_ids in banned:
            logits[row, list(token_ids)] = -np.inf
        counts = np.full(len(logits), count, np.int64)
        self.token_ids, values = top_candidates(logits, counts)
        self.log_probabilities: NDArray[np.float64] = values - self.normalizers[:, np.newaxis]

    def log_probability(self, row: int, token_id: int) -> float:
        """Returns that of any token."""
        return float(self.logits[row, token_id] - self.normalizers[row])


def block_scratch(num_rows: int, vocab_size: int) -> WeightScratch:
    """Makes the room that `RankedRows` needs, for as many rows at a time as stay in the cache."""
    return WeightScratch(num_rows=max(1, min(num_rows, _BLOCK_TOKENS // vocab_size)), vocab_size=vocab_size)


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
