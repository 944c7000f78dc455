"""Draws tokens at random among the likeliest: top-k, top-p and min-p; and the random numbers that decide.

Random numbers are a function of a counter, (seed, sample, step), so that sequences share no generator. Each (seed,
sample) starts a SplitMix64 generator (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure
17) at a hashed state; step i is its i-th output, computed without those before it.

How many candidates a row is padded to depends on the rows beside it; the padding has no weight. Running sums over a row
are taken in order, so they do not depend on what follows, not even in the last bit.

Shapes: n rows, C candidates, V vocabulary, W = V rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.sampling.likeliest import candidate_floor, select
from headway_server.decoding.sampling.softmax import below

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_CANDIDATES = 512
"""Likeliest tokens among which a nucleus is looked for before all are sorted."""
_SORTED_TOKENS = 2**18
"""Weights that are sorted at a time, so that they stay in a core's cache."""
_SMALLEST_WEIGHT = np.finfo(np.float32).tiny  # what is below it never changes a sum that begins with 1
_SMALLEST_LOGIT = np.finfo(np.float32).min  # minus infinity, the logit of forbidden tokens, is below it


def stream_states(seeds: NDArray[np.uint64], samples: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the state (n,) at which the stream of each (seed, sample) starts."""
    return _mix(_mix(seeds + _GOLDEN_GAMMA) + _GOLDEN_GAMMA * (samples + np.uint64(1)))


def uniform(states: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns a number in [0, 1) of 53 bits for each stream state (n,) and step (n,), the first step being 0."""
    bits = _mix(states + _GOLDEN_GAMMA * (steps + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, elementwise; products wrap around."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Nucleus:
    """What to draw among, and the number that decides; each (n,)."""

    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    numbers: NDArray[np.float64]
    """In [0, 1)."""

    def take(self, rows: NDArray[np.intp]) -> Nucleus:
        """Returns that of some rows."""
        return Nucleus(top_p=self.top_p[rows], min_p=self.min_p[rows], numbers=self.numbers[rows])

    def draw(self, weights: NDArray[np.float32], totals: NDArray[np.float64] | None = None) -> NDArray[np.int64]:
        """Draws a column (n,) of each row among those that top-p and min-p leave.

        Args:
            weights: (n, C) float32, by falling weight, the first of each row 1.
            totals: (n,) sums that p is a fraction of; None: those of the weights.
        """
        rows = np.arange(len(weights))
        running = np.cumsum(weights, axis=1, dtype=np.float64)  # (n, C)
        num_kept = (weights >= _SMALLEST_WEIGHT).sum(axis=1)
        if totals is None:
            totals = running[rows, num_kept - 1]
        if (self.top_p < 1).any():
            num_less = (running < (self.top_p * totals)[:, np.newaxis]).sum(axis=1)
            num_kept = np.where(self.top_p < 1, np.minimum(num_kept, num_less + 1), num_kept)
        if (self.min_p > 0).any():
            num_kept = np.minimum(num_kept, (weights >= self.min_p[:, np.newaxis]).sum(axis=1))
        mass = running[rows, num_kept - 1]
        target = below(self.numbers * mass, mass)
        columns: NDArray[np.int64] = np.minimum((running <= target[:, np.newaxis]).sum(axis=1), num_kept - 1)
        return columns


def draw_top_k(
    logits: NDArray[np.float32],
    maximum: NDArray[np.float32],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    nucleus: Nucleus,
) -> NDArray[np.int64]:
    """Draws tokens (n,) among the k with the largest logits; p is a fraction of their weights.

    Args:
        logits: (n, V) float32, contiguous, no NaN.
        maximum: (n,) of the logits.
        temperature: (n,) above 0.
        top_k: (n,) 1 to V.
        nucleus: Of these rows.
    """
    largest = int(top_k.max())
    floor = np.maximum(candidate_floor(logits, largest), _SMALLEST_LOGIT)
    ids, values = select(logits, floor, padding=-np.inf)
    falling = _falling(values)[:, :largest]  # (n, C)
    weights = np.exp((falling - maximum[:, np.newaxis]) / temperature[:, np.newaxis])
    weights[np.arange(weights.shape[1]) >= top_k[:, np.newaxis]] = 0
    return ids[np.arange(len(ids)), _columns(values, falling, nucleus.draw(weights))]


def draw_likely(weights: NDArray[np.float32], totals: NDArray[np.float64], nucleus: Nucleus) -> NDArray[np.int64]:
    """Draws tokens (n,) among those of the whole vocabulary that top-p and min-p leave.

    If the likeliest few hundred are enough, as they nearly always are with a trained model, only these are sorted.

    Args:
        weights: (n, W) float32, contiguous, the largest of each row 1.
        totals: (n,) their sums.
        nucleus: Of these rows.
    """
    floor = np.maximum(candidate_floor(weights, min(_FIRST_CANDIDATES, weights.shape[1])), _SMALLEST_WEIGHT)
    ids, values = select(weights, floor, padding=0.0)
    falling = _falling(values)  # (n, C)
    token_ids = ids[np.arange(len(ids)), _columns(values, falling, nucleus.draw(falling, totals))]
    mass = np.cumsum(falling, axis=1, dtype=np.float64)[:, -1]
    holds_nucleus = (nucleus.top_p < 1) & (mass >= nucleus.top_p * totals)
    holds_likely = floor <= np.maximum(nucleus.min_p, _SMALLEST_WEIGHT)
    rest = np.flatnonzero(~(holds_nucleus | holds_likely))
    step = max(_SORTED_TOKENS // weights.shape[1], 1)
    for start in range(0, len(rest), step):
        rows = rest[start : start + step]
        token_ids[rows] = _draw_sorted(weights[rows], totals[rows], nucleus.take(rows))
    return token_ids


def _draw_sorted(weights: NDArray[np.float32], totals: NDArray[np.float64], nucleus: Nucleus) -> NDArray[np.int64]:
    """Does what `draw_likely` does by sorting all weights (n, W)."""
    falling = _falling(weights)  # (n, W)
    return _columns(weights, falling, nucleus.draw(falling, totals))


def _falling(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the values of each row (n, C) from the largest down. Sorting values is several times faster than ids."""
    falling = -values
    falling.sort(axis=1)
    return np.negative(falling, out=falling)


def _columns(values: NDArray[np.float32], falling: NDArray[np.float32], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the column in `values` (n, C) of the `ranks`-th (n,) of `falling`; equal values rank by column."""
    rows = np.arange(len(values))
    chosen = falling[rows, ranks][:, np.newaxis]
    # Counting flags is by far the fastest without an axis.
    num_larger = np.array([np.count_nonzero(flags) for flags in falling > chosen])
    equal = np.flatnonzero(values == chosen)
    row_starts = rows * values.shape[1]
    columns: NDArray[np.int64] = equal[np.searchsorted(equal, row_starts) + ranks - num_larger] - row_starts
    return columns
