"""Chooses the next token of every row at once.

Shapes: R rows of a step, n rows of one kind among them, V vocabulary, W = V rounded up to groups.

For a row with logits x:

1. x is changed, token by token (`logits_processors.py`), in float32 and in this order: the token's logit bias is added;
   if it is in the prompt or in the text so far, x > 0 is divided by the repetition penalty and x <= 0 multiplied with
   it (Keskar et al. 2019, "CTRL", section 4.1, which divides whatever the sign); the frequency penalty times the number
   of times that it is in the text so far is subtracted; if it is there at all, the presence penalty is.
2. Tokens that the slot's mask does not allow (`masks.py`) are left out: their x is minus infinity from now on. If
   nothing is left, the row is not valid.
3. Temperature t = 0 (or k = 1): the token with the largest x; the lowest id among equals.
4. Otherwise tokens have the weights w = exp((x - max x) / t), so that the likeliest has 1.
5. Top-k, k > 0: only the k tokens with the largest x stay; among equals the lower id.
6. Top-p, p < 1: of these only the nucleus stays, the smallest set, taken by falling weight, that has at least p of
   their total weight.
7. Min-p, m > 0: of these only tokens with w >= m stay, that is with m times the probability of the likeliest one.
8. One token is drawn in proportion to the weights that are left, by one number u in [0, 1): with the tokens in a fixed
   order, the first at which the running sum of weights exceeds u times their total. The order is by falling x after
   5, otherwise by (id mod G, id div G) with G = 256, in which sums over a large vocabulary are fast. After 6 or 7
   alone a token is drawn among all, and again by a further number if it is not left: if 7 left it out among those with
   w >= m, else among those before it by falling weight (among equals the lower id first).

vLLM, transformers and llama.cpp add biases before penalties too, and transformers has the same order of 4 to 7. vLLM
has min-p before top-k and top-p, which changes what p is a fraction of.

A row's outcome depends on its own logits, parameters, text and random number alone, bit for bit: every operation is
elementwise or reduces one row. Log-probabilities are the model's own, log softmax(x) before 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.interfaces import Ranking
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sampling.draws import Nucleus, draw_by_trial, draw_top_k, stream_states, uniform
from headway_server.decoding.sampling.logits_processors import LogitEdits, apply_edits
from headway_server.decoding.sampling.masks import TokenMasks
from headway_server.decoding.sampling.softmax import WeightScratch, block_rows, likeliest, take_rows


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The outcome of a step."""

    token_ids: NDArray[np.int64]
    """(R,)"""
    log_probabilities: NDArray[np.float64]
    """(R,) zero in rows where it is not computed."""
    is_valid: NDArray[np.bool_]
    """(R,) False if the logits have NaN or infinity, or allow no token; the token means nothing then."""
    top_tokens: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Requested likeliest and scored tokens with their log-probabilities, by row."""


class TokenSampler:
    """Sampler with the sampling parameters of every slot.

    Attributes:
        masks: Token masks of each slot, for one step.
    """

    def __init__(self, masks: TokenMasks, *, with_log_probabilities: bool = False) -> None:
        """Prepares for the slots of `masks`.

        Args:
            masks: Token masks of each slot.
            with_log_probabilities: True computes log-probabilities for rows that do not ask for them too, which takes a
                pass over all logits.
        """
        slots = masks.slots
        self.masks = masks
        self._slots = slots
        self._vocab_size = masks.vocab_size
        self._temperature = slots.array(np.float32)
        self._top_k = slots.array(np.int64)
        self._top_p = slots.array(np.float64, 1)
        self._min_p = slots.array(np.float32)
        self._stream = slots.array(np.uint64)
        self._step = slots.array(np.uint64)
        self._with_log_probabilities = with_log_probabilities
        self._num_top = slots.array(np.int64, -1)  # -1: no log-probabilities
        self._scored_ids: list[tuple[int, ...] | None] = slots.objects()
        self._edits: list[LogitEdits | None] = slots.objects()
        self._is_greedy = slots.array(np.bool_)  # the likeliest token that may follow is taken; logits are not changed
        self._scratch = WeightScratch(
            num_rows=block_rows(slots.num_slots, self._vocab_size), vocab_size=self._vocab_size
        )
        self._edited: NDArray[np.float32] | None = None  # (num_slots, V), made when first needed

    def __repr__(self) -> str:
        return f"TokenSampler({self._slots.num_slots} slots, {self._vocab_size} tokens)"

    def assign(self, slot: int, parameters: SamplingParameters, *, prompt_ids: NDArray[np.int64] | None = None) -> None:
        """Gives a slot the parameters of a sequence that begins in it.

        Args:
            slot: The slot.
            parameters: Parameters of the sequence.
            prompt_ids: (T,) int64 its prompt, for the repetition penalty.
        """
        self._temperature[slot] = 0.0 if parameters.top_k == 1 else parameters.temperature
        self._top_k[slot] = parameters.top_k if parameters.top_k < self._vocab_size else 0
        self._top_p[slot] = parameters.top_p
        self._min_p[slot] = parameters.min_p
        self._num_top[slot] = -1 if parameters.num_top_tokens is None else parameters.num_top_tokens
        self._scored_ids[slot] = parameters.scored_token_ids
        seed, sample = np.array([parameters.seed], np.uint64), np.array([parameters.sample], np.uint64)
        self._stream[slot] = stream_states(seed, sample)[0]
        self._step[slot] = 0
        self._edits[slot] = LogitEdits.of(parameters, prompt_ids=prompt_ids)
        self._is_greedy[slot] = self._temperature[slot] == 0 and self._edits[slot] is None
        self.masks.clear(slot)

    def sample(
        self, logits: NDArray[np.float32], slots: NDArray[np.intp] | None = None, ranking: Ranking | None = None
    ) -> SampledTokens:
        """Chooses a token for each of some slots, and takes their random streams a step on.

        Args:
            logits: (R, V) float32, contiguous; left as they are. Where the likeliest tokens are all that is wanted, and
                `ranking` has them, they are not read.
            slots: (R,) slots that the rows belong to, each once; None: 0 to R - 1.
            ranking: Ranking of these logits, if already computed.
        """
        if slots is None:
            slots = np.arange(len(logits))
        if ranking is None:
            best, maximum = _best(logits)  # NaN is the largest of all
        else:
            best = ranking.token_ids[:, 0]
            maximum = np.where(np.isfinite(ranking.normalizers), ranking.logits[:, 0], np.float32(np.nan))
        token_ids, is_valid = best.copy(), np.isfinite(maximum)
        chosen = maximum  # logits of the tokens
        rows = np.flatnonzero(~(self._is_greedy[slots] & self.masks.allows(slots, best)))  # that may get another one
        if rows.size:
            token_ids[rows], is_allowed = self._draw(logits, rows, slots[rows], best[rows], maximum[rows])
            is_valid[rows] &= is_allowed
            chosen = maximum.copy()
            chosen[rows] = logits[rows, token_ids[rows]]
        self.masks.clear(slots)
        normalizers = None if ranking is None else ranking.normalizers
        log_probabilities, top_tokens = self._log_probabilities(logits, maximum, normalizers, chosen, slots)
        return SampledTokens(token_ids, log_probabilities, is_valid, top_tokens)

    def _draw(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.intp],
        slots: NDArray[np.intp],
        best: NDArray[np.int64],
        maximum: NDArray[np.float32],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Chooses the tokens of some rows of `logits`, whose likeliest tokens are `best`.

        Logits are copied where biases, penalties or masks change them.

        Returns:
            The tokens (n,), and True (n,) where any token may follow.
        """
        token_ids, is_allowed = best.copy(), np.ones(len(rows), np.bool_)
        is_changed = self.masks.restricts[slots]
        is_changed |= [(edits := self._edits[slot]) is not None and edits.is_active for slot in slots.tolist()]
        if (same := np.flatnonzero(~is_changed)).size:
            token_ids[same] = self._choose(take_rows(logits, rows[same]), slots[same], best[same], maximum[same])
        if (changed := np.flatnonzero(is_changed)).size:
            copy = self._edit(logits, rows[changed], slots[changed])  # (n, V)
            copy_best, copy_maximum = _best(copy)
            token_ids[changed] = self._choose(copy, slots[changed], copy_best, copy_maximum)
            is_allowed[changed] = np.isfinite(copy_maximum)
        self._step[slots] += np.uint64(1)
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            if (edits := self._edits[slot]) is not None:
                edits.record(token_id)
        return token_ids, is_allowed

    def _edit(
        self, logits: NDArray[np.float32], rows: NDArray[np.intp], slots: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        """Returns a copy of some rows (n, V) changed by biases, penalties and masks, valid until the next call."""
        if self._edited is None:
            self._edited = np.empty((self._slots.num_slots, self._vocab_size), np.float32)
        copy = self._edited[: len(rows)]
        copy[:] = take_rows(logits, rows)
        edits = [(row, one) for row, slot in enumerate(slots.tolist()) if (one := self._edits[slot]) is not None]
        if edits:
            apply_edits([one for _, one in edits], np.array([row for row, _ in edits], np.intp), copy)
        if (restricted := np.flatnonzero(self.masks.restricts[slots])).size:
            self.masks.apply(slots[restricted], restricted, copy)
        return copy

    def _choose(
        self,
        logits: NDArray[np.float32],
        slots: NDArray[np.intp],
        best: NDArray[np.int64],
        maximum: NDArray[np.float32],
    ) -> NDArray[np.int64]:
        """Returns the tokens (n,) of rows with likeliest tokens `best`: sampled unless the temperature is 0."""
        random_rows = np.flatnonzero((self._temperature[slots] > 0) & np.isfinite(maximum))
        if not random_rows.size:
            return best
        token_ids = best.copy()
        has_top_k = self._top_k[slots[random_rows]] > 0
        with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: weights of 0 and 1 are right
            for rows, draw in (random_rows[has_top_k], self._draw_top_k), (random_rows[~has_top_k], self._draw_whole):
                if rows.size:
                    token_ids[rows] = draw(take_rows(logits, rows), slots[rows], maximum[rows])
        return token_ids

    def _draw_top_k(
        self, logits: NDArray[np.float32], slots: NDArray[np.intp], maximum: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        return draw_top_k(logits, maximum, self._temperature[slots], self._top_k[slots], self._nucleus(slots))

    def _draw_whole(
        self, logits: NDArray[np.float32], slots: NDArray[np.intp], maximum: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        """Draws for rows without top-k."""
        token_ids, nucleus = np.empty(len(logits), np.int64), self._nucleus(slots)
        for start in range(0, len(logits), self._scratch.num_rows):
            rows = np.arange(start, min(start + self._scratch.num_rows, len(logits)))
            weights = self._scratch.weights(
                take_rows(logits, rows), maximum[rows], self._temperature[slots[rows]]
            )  # (n, W)
            token_ids[rows] = draw_by_trial(self._scratch, weights, nucleus.take(rows))
        return token_ids

    def _nucleus(self, slots: NDArray[np.intp]) -> Nucleus:
        numbers = uniform(self._stream[slots], self._step[slots])
        return Nucleus(top_p=self._top_p[slots], min_p=self._min_p[slots], numbers=numbers)

    def _log_probabilities(
        self,
        logits: NDArray[np.float32],
        maximum: NDArray[np.float32],
        normalizers: NDArray[np.float64] | None,
        chosen: NDArray[np.float32],
        slots: NDArray[np.intp],
    ) -> tuple[NDArray[np.float64], dict[int, list[tuple[int, float]]]]:
        """Returns the log-probabilities (R,) of tokens with logits `chosen`, and by row the likeliest if requested."""
        log_probabilities = np.zeros(len(logits))
        if normalizers is not None:
            log_probabilities[:] = chosen - normalizers
        elif self._with_log_probabilities:
            normalizers = maximum + self._scratch.log_totals(logits, maximum)
            log_probabilities[:] = chosen - normalizers
        num_top = self._num_top[slots]
        wanted = np.flatnonzero(num_top >= 0)
        if not wanted.size:
            return log_probabilities, {}
        some = take_rows(logits, wanted)
        if normalizers is None:
            found = maximum[wanted] + self._scratch.log_totals(some, maximum[wanted])
            log_probabilities[wanted] = chosen[wanted] - found
        else:
            found = normalizers[wanted]
        lists = zip(wanted.tolist(), likeliest(some, found, num_top[wanted]), strict=True)
        tops = {row: top_tokens for row, top_tokens in lists if top_tokens}
        for row, normalizer in zip(wanted.tolist(), found, strict=True):  # a float64, and so are its scores
            if scored_ids := self._scored_ids[slots[row]]:
                scores = (logits[row, list(scored_ids)] - normalizer).tolist()
                tops[row] = [*tops.get(row, ()), *zip(scored_ids, scores, strict=True)]
        return log_probabilities, tops


def _best(logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns the token with the largest logit of every row, and that logit; both (R,)."""
    best = logits.argmax(axis=1).astype(np.int64, copy=False)
    maximum: NDArray[np.float32] = logits[np.arange(len(logits)), best]
    return best, maximum
