"""Chooses the next token of every row at once.

Shapes: R rows of a step, n rows of one kind among them, V vocabulary, C candidates, G groups of tokens.

For a row with logits x, temperature t, top-k k and top-p p:

1. t = 0 (or k = 1): the token with the largest logit; the lowest id among equals.
2. Otherwise tokens have the weights w = exp((x - max x) / t).
3. k > 0: only the k tokens with the largest logits stay; among equals the lower id.
4. p < 1: of these only the smallest set, taken by falling weight, that holds at least p of their total weight.
5. One token is drawn in proportion to the weights that are left, by one number u in [0, 1): with the tokens in a fixed
   order, the first at which the running sum of weights exceeds u times their total. The order is by falling weight
   after 3 or 4, otherwise by (id mod G, id div G), in which sums over a large vocabulary are fast.

A row's outcome depends on its own logits, parameters and random number alone, bit for bit: every operation here is
elementwise or reduces one row. A log-probability is that of the model itself, log softmax(x), untouched by 2 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway_server.engine.candidates import select, top_candidates
from headway_server.engine.random_stream import stream_states, uniform
from headway_server.engine.sequence import SamplingParameters

_NUM_GROUPS = 256


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The outcome of a step."""

    token_ids: NDArray[np.int64]
    """(R,)"""
    log_probabilities: NDArray[np.float64]
    """(R,) zeros where they are not computed."""
    is_valid: NDArray[np.bool_]
    """(R,) False where the logits hold NaN, infinity, or nothing finite: the token means nothing then."""
    top_tokens: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """By row, where they were asked for: the likeliest tokens with their log-probabilities."""


class Sampler:
    """The sampling parameters of every slot, and the draw."""

    def __init__(self, *, num_slots: int, vocab_size: int, with_log_probabilities: bool = False) -> None:
        """Makes room for `num_slots` rows.

        Args:
            num_slots: Slots there are.
            vocab_size: V.
            with_log_probabilities: Whether log-probabilities are computed; they cost a pass over all logits.
        """
        self.vocab_size = vocab_size
        self._with_log_probabilities = with_log_probabilities
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float64)
        self._stream = np.zeros(num_slots, np.uint64)
        self._step = np.zeros(num_slots, np.uint64)
        self._num_groups = min(_NUM_GROUPS, vocab_size)
        self._scratch: NDArray[np.float32] | None = None  # (num_slots, V rounded up to groups), made when first needed

    def __repr__(self) -> str:
        return f"Sampler({len(self._temperature)} slots, {self.vocab_size} tokens)"

    def assign(
        self,
        slot: int,
        parameters: SamplingParameters,
        *,
        prompt_ids: NDArray[np.int64] | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """Gives a slot the parameters of the sequence that begins in it."""
        is_greedy = parameters.top_k == 1
        self._temperature[slot] = 0.0 if is_greedy else parameters.temperature
        self._top_k[slot] = parameters.top_k if parameters.top_k < self.vocab_size else 0
        self._top_p[slot] = parameters.top_p
        self._stream[slot] = stream_states(
            np.array([parameters.seed], np.uint64), np.array([parameters.sample], np.uint64)
        )[0]
        self._step[slot] = 0

    def mask_row(self, slot: int) -> NDArray[np.int32]:
        """Returns the words of a slot's mask."""
        raise NotImplementedError

    def allow(self, slot: int, mask: NDArray[np.int32] | None) -> None:
        """Sets what a slot's next draw may choose."""
        raise NotImplementedError

    def move(self, source: int, target: int) -> None:
        """Takes what belongs to slot `source` to slot `target`."""
        for values in (self._temperature, self._top_k, self._top_p, self._stream, self._step):
            values[target] = values[source]

    def sample(self, logits: NDArray[np.float32], first_slot: int = 0) -> SampledTokens:
        """Chooses a token for each of the slots from `first_slot`, and takes their random streams a step on.

        Args:
            logits: (R, V) float32, contiguous; left as they are.
            first_slot: Slot of the first row.
        """
        slots = slice(first_slot, first_slot + len(logits))
        maximum = logits.max(axis=1)  # (R,) NaN where a logit is
        is_valid = np.isfinite(maximum)
        token_ids = logits.argmax(axis=1).astype(np.int64, copy=False)
        random_rows = np.flatnonzero((self._temperature[slots] > 0) & is_valid)
        if random_rows.size:
            token_ids[random_rows] = self._draw(logits, maximum, random_rows, first_slot)
        self._step[slots] += np.uint64(1)
        log_probabilities = np.zeros(len(logits))
        if self._with_log_probabilities:
            log_probabilities = self._log_probabilities(logits, maximum, token_ids)
        return SampledTokens(token_ids, log_probabilities, is_valid)

    def _draw(
        self, logits: NDArray[np.float32], maximum: NDArray[np.float32], rows: NDArray[np.intp], first_slot: int
    ) -> NDArray[np.int64]:
        """Draws for the rows whose temperature is not 0."""
        token_ids = np.zeros(len(rows), np.int64)
        is_narrow = self._top_k[rows + first_slot] > 0
        with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: weights of 0 and 1 are right
            if (some := np.flatnonzero(~is_narrow)).size:
                token_ids[some] = self._draw_whole(self._random_rows(logits, maximum, rows[some], first_slot))
            if (some := np.flatnonzero(is_narrow)).size:
                top_k = self._top_k[rows[some] + first_slot]
                token_ids[some] = _draw_narrow(self._random_rows(logits, maximum, rows[some], first_slot), top_k)
        return token_ids

    def _random_rows(
        self, logits: NDArray[np.float32], maximum: NDArray[np.float32], rows: NDArray[np.intp], first_slot: int
    ) -> _RandomRows:
        slots = rows + first_slot
        return _RandomRows(
            logits=logits if len(rows) == len(logits) else logits[rows],  # all of them: no copy
            maximum=maximum[rows],
            temperature=self._temperature[slots],
            top_p=self._top_p[slots],
            numbers=uniform(self._stream[slots], self._step[slots]),
        )

    def _draw_whole(self, rows: _RandomRows) -> NDArray[np.int64]:
        """Draws for rows without top-k."""
        weights = self._weights(rows.logits, rows.maximum, rows.temperature)
        cumulative = np.cumsum(self._grouped(weights).sum(axis=1), axis=1, dtype=np.float64)  # (n, G)
        is_nucleus = rows.top_p < 1
        if is_nucleus.all():
            return _draw_nucleus(rows, weights[:, : self.vocab_size], cumulative[:, -1])
        token_ids = _pick_grouped(self._grouped(weights), cumulative, rows.numbers)
        if (some := np.flatnonzero(is_nucleus)).size:
            token_ids[some] = _draw_nucleus(rows.take(some), weights[some, : self.vocab_size], cumulative[some, -1])
        return token_ids

    def _weights(
        self, logits: NDArray[np.float32], maximum: NDArray[np.float32], temperature: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Returns the weights of all tokens, (n, V rounded up to whole groups), zero past V, until the next call."""
        if self._scratch is None:
            width = -(-self.vocab_size // self._num_groups) * self._num_groups
            self._scratch = np.zeros((len(self._temperature), width), np.float32)
        scratch = self._scratch[: len(logits)]
        weights = scratch[:, : self.vocab_size]  # (n, V)
        np.subtract(logits, maximum[:, np.newaxis], out=weights)
        np.divide(weights, temperature[:, np.newaxis], out=weights)
        np.exp(weights, out=weights)
        return scratch

    def _grouped(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns weights (n, V rounded up) as (n, tokens a group, G)."""
        return weights.reshape(len(weights), -1, self._num_groups)

    def _log_probabilities(
        self, logits: NDArray[np.float32], maximum: NDArray[np.float32], token_ids: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore", under="ignore"):  # an invalid row stays without a meaning
            weights = self._weights(logits, maximum, np.ones(len(logits), np.float32))
            total = self._grouped(weights).sum(axis=1).sum(axis=1, dtype=np.float64)  # (R,)
            chosen = logits[np.arange(len(logits)), token_ids].astype(np.float64)
            log_probabilities: NDArray[np.float64] = chosen - maximum - np.log(total)
        return log_probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class _RandomRows:
    """Rows that are drawn, n of them."""

    logits: NDArray[np.float32]
    """(n, V)"""
    maximum: NDArray[np.float32]
    """(n,) of the logits, like the rest."""
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float64]
    numbers: NDArray[np.float64]
    """In [0, 1)."""

    def take(self, rows: NDArray[np.intp]) -> _RandomRows:
        """Returns some of the rows."""
        return _RandomRows(
            logits=self.logits if len(rows) == len(self.logits) else self.logits[rows],
            maximum=self.maximum[rows],
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            numbers=self.numbers[rows],
        )

    def running_weights(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the running sums (n, C) of the weights of the logits `values` (n, C)."""
        weights = np.exp((values - self.maximum[:, np.newaxis]) / self.temperature[:, np.newaxis])
        return np.cumsum(weights, axis=1, dtype=np.float64)


def _draw_narrow(rows: _RandomRows, top_k: NDArray[np.int64]) -> NDArray[np.int64]:
    """Draws for rows with top-k, whose probabilities are those among the k."""
    ids, values = top_candidates(rows.logits, top_k)
    running = rows.running_weights(values)
    token_ids: NDArray[np.int64] = ids[np.arange(len(ids)), _pick_rank(running, running[:, -1], rows)]
    return token_ids


def _draw_nucleus(rows: _RandomRows, weights: NDArray[np.float32], total: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draws for rows with top-p alone.

    Tokens below (1 - p) / V of the total hold less than 1 - p together, so none of them is needed; half of that leaves
    room for rounding. Of the others only the logits are sorted, which is several times faster than sorting their ids.
    """
    floor = (1 - rows.top_p) * total / (2 * weights.shape[1])
    ids, values = select(rows.logits, weights >= floor[:, np.newaxis].astype(np.float32))
    falling = np.sort(values, axis=1)[:, ::-1]  # (n, C)
    rank = _pick_rank(rows.running_weights(falling), total, rows)
    every = np.arange(len(ids))
    chosen = falling[every, rank][:, np.newaxis]
    num_before = rank - (falling > chosen).sum(axis=1)  # tokens with the very same logit and a lower id
    equal_rows, equal_columns = np.nonzero(values == chosen)
    first = np.searchsorted(equal_rows, every)
    token_ids: NDArray[np.int64] = ids[every, equal_columns[first + num_before]]
    return token_ids


def _pick_grouped(
    weights: NDArray[np.float32], cumulative: NDArray[np.float64], numbers: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Draws from weights (n, tokens a group, G) with the running sums of their groups (n, G): group, then token."""
    rows = np.arange(len(weights))
    target = _target(cumulative[:, -1], numbers)
    group = (cumulative <= target[:, np.newaxis]).sum(axis=1)
    before = np.where(group > 0, cumulative[rows, group - 1], 0.0)
    within = np.cumsum(weights[rows, :, group], axis=1, dtype=np.float64)  # (n, tokens a group)
    # The group's sum was taken in float32, so what is left of the target may be a rounding past `within`.
    left = np.minimum(target - before, np.nextafter(within[:, -1], 0.0))
    member = (within <= left[:, np.newaxis]).sum(axis=1)
    token_ids: NDArray[np.int64] = member * weights.shape[2] + group
    return token_ids


def _pick_rank(running: NDArray[np.float64], total: NDArray[np.float64], rows: _RandomRows) -> NDArray[np.intp]:
    """Draws from candidates by falling weight, whose weights sum up to `running` (n, C); p of `total` (n,) is kept."""
    num_kept = 1 + (running < (rows.top_p * total)[:, np.newaxis]).sum(axis=1)
    last = np.minimum(num_kept, running.shape[1]) - 1
    target = _target(running[np.arange(len(running)), last], rows.numbers)
    rank: NDArray[np.intp] = (running <= target[:, np.newaxis]).sum(axis=1)
    return rank


def _target(mass: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns `numbers` of `mass`, always less than it, so that some running sum exceeds it."""
    target: NDArray[np.float64] = np.minimum(numbers * mass, np.nextafter(mass, 0.0))
    return target


def token_log_probabilities(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64], num_top: int
) -> tuple[NDArray[np.float64], list[list[tuple[int, float]]]]:
    """Returns log-probabilities of tokens."""
    raise NotImplementedError
