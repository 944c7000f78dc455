"""Draws at random among tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.sampling.likeliest import candidate_floor, select, true_positions
from headway_server.decoding.sampling.softmax import below

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, elementwise; products wrap around."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def stream_states(seeds: NDArray[np.uint64], samples: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the state (n,) at which the stream of each (seed, sample) starts."""
    return _mix(_mix(seeds + _GOLDEN_GAMMA) + _GOLDEN_GAMMA * (samples + np.uint64(1)))


def uniform(states: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns a number in [0, 1) of 53 bits for each stream state (n,) and step (n,), the first step being 0."""
    bits = _mix(states + _GOLDEN_GAMMA * (steps + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


_BLOCK = 256
_FIRST_CANDIDATES = 512
"""Likeliest tokens among which a nucleus is looked for before all are sorted."""
_SORTED_TOKENS = 2**18
"""Weights that are sorted at a time, so that they stay in the processor's cache and take no new memory."""
_SMALLEST_WEIGHT = np.finfo(np.float32).tiny  # what is below it never changes a sum that begins with 1
_SMALLEST_LOGIT = np.finfo(np.float32).min  # minus infinity is below it: tokens that are forbidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """What is drawn among, and the number that decides; each (n,)."""

    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    numbers: NDArray[np.float64]
    """In [0, 1)."""

    def take(self, rows: NDArray[np.intp]) -> Restriction:
        """Returns that of some rows."""
        return Restriction(top_p=self.top_p[rows], min_p=self.min_p[rows], numbers=self.numbers[rows])


class FallingWeights:
    """Weights by falling size, with running sums in two steps: of blocks, and within the one that matters.

    How many candidates there are depends on the neighbours of a row; those past its own have no weight. So nothing
    here may depend on how many of these follow, not even by a rounding.

    Attributes:
        totals: (n,) sums of the weights.
    """

    def __init__(self, weights: NDArray[np.float32]) -> None:
        """Sums up blocks.

        Args:
            weights: (n, C) float32, falling, the first of each row 1.
        """
        num_rows, num_candidates = weights.shape
        self._width = min(_BLOCK, num_candidates)
        spare = -num_candidates % self._width
        padded = np.pad(weights, ((0, 0), (0, spare))) if spare else weights
        self._rows = np.arange(num_rows)
        self._blocks = padded.reshape(num_rows, -1, self._width)  # (n, C / B, B)
        self._only_block = np.cumsum(weights, axis=1, dtype=np.float64) if num_candidates == self._width else None
        self._running = (  # (n, C / B)
            self._only_block[:, -1:]
            if self._only_block is not None
            else np.cumsum(self._blocks.sum(axis=2, dtype=np.float64), axis=1)
        )
        self._num_blocks = np.full(num_rows, self._running.shape[1])  # with weights in them, once that is known
        self._num_weights = self._num_at_least(np.full(num_rows, _SMALLEST_WEIGHT))
        self._num_blocks = (self._num_weights - 1) // self._width + 1
        self.totals = self._sum_of_first(self._num_weights)

    def __repr__(self) -> str:
        return f"FallingWeights({len(self._rows)} rows, {self._num_weights.max()} weights)"

    def draw(self, restriction: Restriction, totals: NDArray[np.float64]) -> NDArray[np.int64]:
        """Draws places (n,) among those that the restriction leaves; `totals` (n,) is what p is a share of."""
        num_kept, mass = self._num_weights, self.totals
        if (restriction.top_p < 1).any() or (restriction.min_p > 0).any():
            num_kept = np.minimum(num_kept, self._num_by_top_p(restriction.top_p, totals))
            num_kept = np.minimum(num_kept, self._num_at_least(restriction.min_p))
            mass = self._sum_of_first(num_kept)
        target = below(restriction.numbers * mass, mass)
        block = np.minimum((self._running <= target[:, np.newaxis]).sum(axis=1), (num_kept - 1) // self._width)
        before, within = self._within(block)
        # The block's sum was taken in another order, so what is left of the target may be a rounding past `within`.
        left = below(target - before, within[:, -1])
        member = (within <= left[:, np.newaxis]).sum(axis=1)
        places: NDArray[np.int64] = np.minimum(block * self._width + member, num_kept - 1)
        return places

    def _num_by_top_p(self, top_p: NDArray[np.float64], totals: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns how many of the likeliest (n,) hold p of `totals`; one more than all where p is 1."""
        bound = top_p * totals
        block = np.minimum((self._running < bound[:, np.newaxis]).sum(axis=1), self._num_blocks - 1)
        before, within = self._within(block)
        num_less = block * self._width + (before[:, np.newaxis] + within < bound[:, np.newaxis]).sum(axis=1)
        return np.where(top_p < 1, num_less, self._num_weights) + 1

    def _num_at_least(self, floor: NDArray[np.float32]) -> NDArray[np.int64]:
        """Returns how many weights (n,) are not less than `floor` (n,), which is at most 1."""
        floor = floor[:, np.newaxis]
        block = np.minimum((self._blocks[:, :, -1] >= floor).sum(axis=1), self._num_blocks - 1)
        number: NDArray[np.int64] = block * self._width + (self._blocks[self._rows, block] >= floor).sum(axis=1)
        return number

    def _sum_of_first(self, count: NDArray[np.int64]) -> NDArray[np.float64]:
        block, member = np.divmod(count - 1, self._width)
        before, within = self._within(block)
        total: NDArray[np.float64] = before + within[self._rows, member]
        return total

    def _within(self, block: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the sum (n,) before a block of each row, and the running sums (n, B) in it."""
        if self._only_block is not None:
            return np.zeros(len(block)), self._only_block
        before = np.where(block > 0, self._running[self._rows, block - 1], 0.0)
        return before, np.cumsum(self._blocks[self._rows, block], axis=1, dtype=np.float64)


def draw_top_k(
    logits: NDArray[np.float32],
    maximum: NDArray[np.float32],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    restriction: Restriction,
) -> NDArray[np.int64]:
    """Draws tokens (n,) among the k with the largest logits; p is a share of their weights.

    Args:
        logits: (n, V) float32, contiguous, no NaN.
        maximum: (n,) of the logits.
        temperature: (n,) above 0.
        top_k: (n,) 1 to V.
        restriction: Of these rows.
    """
    largest = int(top_k.max())
    floor = np.maximum(candidate_floor(logits, largest), _SMALLEST_LOGIT)
    ids, values = select(logits, floor, padding=-np.inf)
    falling = _fall(values)[:, :largest]  # (n, C)
    weights = np.exp((falling - maximum[:, np.newaxis]) / temperature[:, np.newaxis])
    weights[np.arange(weights.shape[1]) >= top_k[:, np.newaxis]] = 0
    sums = FallingWeights(weights)
    columns = _columns(values, falling, sums.draw(restriction, sums.totals))
    return ids[np.arange(len(ids)), columns]


def draw_likely(
    weights: NDArray[np.float32], totals: NDArray[np.float64], restriction: Restriction
) -> NDArray[np.int64]:
    """Draws tokens (n,) among the likeliest that top-p and min-p leave, all tokens being there to begin with.

    Where the first few hundred are enough, which is nearly always so with a trained model, only these are sorted.

    Args:
        weights: (n, W) float32, contiguous, the largest of each row 1.
        totals: (n,) their sums.
        restriction: Of these rows.
    """
    floor = np.maximum(candidate_floor(weights, min(_FIRST_CANDIDATES, weights.shape[1])), _SMALLEST_WEIGHT)
    ids, values = select(weights, floor, padding=0.0)
    falling = _fall(values)  # (n, C)
    sums = FallingWeights(falling)
    token_ids = ids[np.arange(len(ids)), _columns(values, falling, sums.draw(restriction, totals))]
    holds_nucleus = (restriction.top_p < 1) & (sums.totals >= restriction.top_p * totals)
    holds_likely = floor <= np.maximum(restriction.min_p, _SMALLEST_WEIGHT)
    rest = np.flatnonzero(~(holds_nucleus | holds_likely))
    step = max(_SORTED_TOKENS // weights.shape[1], 1)
    for start in range(0, len(rest), step):
        rows = rest[start : start + step]
        token_ids[rows] = _draw_sorted(weights[rows], totals[rows], restriction.take(rows))
    return token_ids


def _draw_sorted(
    weights: NDArray[np.float32], totals: NDArray[np.float64], restriction: Restriction
) -> NDArray[np.int64]:
    """Does what `draw_likely` does by sorting all weights (n, W)."""
    falling = _fall(weights)  # (n, W)
    return _columns(weights, falling, FallingWeights(falling).draw(restriction, totals))


def _fall(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns values (n, C) by falling size. Values alone are sorted several times faster than places."""
    falling = -values
    falling.sort(axis=1)
    return np.negative(falling, out=falling)


def _columns(values: NDArray[np.float32], falling: NDArray[np.float32], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns where in `values` (n, C) the `ranks`-th (n,) of `falling` is, equal values having the order of places."""
    rows = np.arange(len(values))
    chosen = falling[rows, ranks][:, np.newaxis]
    # Counting flags is fastest without an axis, by far.
    num_larger = np.array([np.count_nonzero(flags) for flags in falling > chosen])
    equal = true_positions(values == chosen)
    row_starts = rows * values.shape[1]
    columns: NDArray[np.int64] = equal[np.searchsorted(equal, row_starts) + ranks - num_larger] - row_starts
    return columns
