"""Draws tokens at random among the likeliest: top-k, top-p and min-p; and the random numbers that decide.

Random numbers are a function of a counter, (seed, sample, step), so that sequences share no generator. Each (seed,
sample) starts a SplitMix64 generator (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure
17) at a hashed state. Step i is its i-th output, computed without the earlier ones. Where a step needs further numbers,
its bits and their count are hashed.

How many candidates a row is padded to depends on the rows beside it; the padding has no weight. Running sums over a row
are taken in order, so they do not depend on what follows, not even in the last bit.

Shapes: n rows, C candidates, V vocabulary, W = V rounded up.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.sampling.likeliest import candidate_floor, select
from headway_server.decoding.sampling.softmax import WeightScratch, below

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SMALLEST_WEIGHT = np.finfo(np.float32).tiny  # smaller weights never change a sum that begins with 1


def stream_states(seeds: NDArray[np.uint64], samples: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the state (n,) at which the stream of each (seed, sample) starts."""
    return _mix(_mix(seeds + _GOLDEN_GAMMA) + _GOLDEN_GAMMA * (samples + np.uint64(1)))


def uniform(states: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns a number in [0, 1) of 53 bits for each stream state (n,) and step (n,), the first step being 0."""
    bits = _mix(states + _GOLDEN_GAMMA * (steps + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def further(numbers: NDArray[np.float64], trial: int) -> NDArray[np.float64]:
    """Returns the `trial`-th further number (n,) of steps whose first ones are `numbers`; trials count from 1."""
    bits = (numbers * 2.0**53).astype(np.uint64)
    return uniform(_mix(bits + _GOLDEN_GAMMA), np.full(len(bits), trial, np.uint64))


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, elementwise; products wrap around."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Nucleus:
    """Parameters of a draw and its random number; each (n,)."""

    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    numbers: NDArray[np.float64]
    """In [0, 1)."""

    def take(self, rows: NDArray[np.intp]) -> Nucleus:
        """Returns that of some rows."""
        return Nucleus(top_p=self.top_p[rows], min_p=self.min_p[rows], numbers=self.numbers[rows])

    def draw(self, weights: NDArray[np.float32]) -> NDArray[np.int64]:
        """Draws a column (n,) of each row within top-p and min-p.

        Args:
            weights: (n, C) float32, by falling weight, the first of each row 1.
        """
        rows = np.arange(len(weights))
        running = np.cumsum(weights, axis=1, dtype=np.float64)  # (n, C)
        num_candidates = (weights >= _SMALLEST_WEIGHT).sum(axis=1)
        if (self.top_p < 1).any():
            num_less = (running < (self.top_p * running[rows, num_candidates - 1])[:, np.newaxis]).sum(axis=1)
            num_candidates = np.where(self.top_p < 1, np.minimum(num_candidates, num_less + 1), num_candidates)
        if (self.min_p > 0).any():
            num_candidates = np.minimum(num_candidates, (weights >= self.min_p[:, np.newaxis]).sum(axis=1))
        mass = running[rows, num_candidates - 1]
        target = below(self.numbers * mass, mass)
        columns: NDArray[np.int64] = np.minimum((running <= target[:, np.newaxis]).sum(axis=1), num_candidates - 1)
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
    ids, values = select(logits, candidate_floor(logits, largest), padding=-np.inf)
    falling = _falling(values)[:, :largest]  # (n, C)
    weights = np.exp((falling - maximum[:, np.newaxis]) / temperature[:, np.newaxis])
    weights[np.arange(weights.shape[1]) >= top_k[:, np.newaxis]] = 0
    return ids[np.arange(len(ids)), _columns(values, falling, nucleus.draw(weights))]


def draw_by_trial(scratch: WeightScratch, weights: NDArray[np.float32], nucleus: Nucleus) -> NDArray[np.int64]:
    """Draws tokens (n,) among those of the whole vocabulary that top-p and min-p leave, without sorting them.

    A token is drawn among all and kept if min-p leaves it and those before it by falling weight have less than p of
    the weights. Otherwise the tokens that fail with it are dropped, and another is drawn among the rest. What top-p
    and min-p leave is never dropped, so each token is drawn in proportion to its weight. If they leave a share s of
    the weights, a row takes at most 1 + ln(1 / s) draws on average.

    Args:
        scratch: Sums and draws.
        weights: (n, W) float32, contiguous, the largest of each row 1.
        nucleus: Of these rows.
    """
    running = scratch.running_sums(weights)  # (n, G)
    bounds = nucleus.top_p * running[:, -1]
    token_ids = scratch.pick(weights, running, nucleus.numbers)
    rows, left = np.arange(len(weights)), weights  # that are not settled, and the weights of the tokens in question
    for trial in itertools.count(1):
        chosen = left[np.arange(len(rows)), token_ids[rows]]
        is_likely = chosen >= nucleus.min_p[rows]
        doubtful = np.flatnonzero(~is_likely | (nucleus.top_p[rows] < 1))
        if not doubtful.size:
            break
        if len(doubtful) < len(rows):
            rows, left, chosen, is_likely = rows[doubtful], left[doubtful], chosen[doubtful], is_likely[doubtful]
        floor = np.where(is_likely, chosen, np.nextafter(nucleus.min_p[rows], np.float32(0)))
        is_left = left > floor[:, np.newaxis]
        for row in np.flatnonzero(is_likely).tolist():  # equals with lower ids come before
            token_id = token_ids[rows[row]]
            np.greater_equal(left[row, :token_id], floor[row], out=is_left[row, :token_id])
        factors = is_left.astype(np.float32)  # flags themselves would take twice as long
        left = np.multiply(left, factors, out=factors)
        sums = scratch.running_sums(left)  # (n, G)
        again = np.flatnonzero(~is_likely | (sums[:, -1] >= bounds[rows]))
        if not again.size:
            break
        rows, left, sums = rows[again], left[again], sums[again]
        token_ids[rows] = scratch.pick(left, sums, further(nucleus.numbers[rows], trial))
    return token_ids


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
