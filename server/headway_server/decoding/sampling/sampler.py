"""Chooses the next token of every row at once.

Shapes: R rows of a step, n rows of one kind among them, V vocabulary, W = V rounded up to groups, M words of a mask.

For a row with logits x:

1. x is changed, token by token (`logits_processors.py`), in float32 and in this order: the token's logit bias is added;
   if it is in the prompt or in the text so far, x > 0 is divided by the repetition penalty and x <= 0 multiplied with
   it (Keskar et al. 2019, "CTRL", section 4.1, which divides whatever the sign); the frequency penalty times the number
   of times that it is in the text so far is subtracted; if it is there at all, the presence penalty is.
2. Tokens that the row's mask does not allow are left out, and so are those that end the text while it has fewer than
   `min_new_tokens`: their x is minus infinity from now on. If nothing is left, the row is not valid.
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

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.interfaces import Ranking
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sampling.draws import Nucleus, draw_by_trial, draw_top_k, stream_states, uniform
from headway_server.decoding.sampling.logits_processors import LogitEdits, TokenMasks, apply_edits
from headway_server.decoding.sampling.softmax import WeightScratch, block_rows, likeliest


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
    """The likeliest tokens with their log-probabilities, and those that are scored, by row, where they are wanted."""


class Sampler:
    """The sampling parameters of every slot, and the draw."""

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        with_log_probabilities: bool = False,
        suppressed_ids: Sequence[int] = (),
    ) -> None:
        """Prepares for `num_slots` rows.

        Args:
            num_slots: Slots there are.
            vocab_size: V.
            with_log_probabilities: True computes log-probabilities for rows that do not ask for them too, which takes a
                pass over all logits.
            suppressed_ids: Tokens that no row is ever given.
        """
        self.vocab_size = vocab_size
        self._suppressed_ids = np.array(suppressed_ids, np.int64)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float64)
        self._min_p = np.zeros(num_slots, np.float32)
        self._stream = np.zeros(num_slots, np.uint64)
        self._step = np.zeros(num_slots, np.uint64)
        self._with_log_probabilities = with_log_probabilities
        self._num_top = np.full(num_slots, -1, np.int64)  # -1: no log-probabilities are asked for
        self._scored_ids: list[tuple[int, ...]] = [()] * num_slots
        self._edits: list[LogitEdits | None] = [None] * num_slots
        self._masks = TokenMasks(num_slots=num_slots, vocab_size=vocab_size)
        self._scratch = WeightScratch(num_rows=block_rows(num_slots, vocab_size), vocab_size=vocab_size)
        self._edited: NDArray[np.float32] | None = None  # (num_slots, V), made when first needed
        self._is_plain = np.zeros(num_slots, np.bool_)  # the likeliest token that the mask allows is all that is wanted

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
        """Gives a slot the parameters of a sequence that begins in it.

        Args:
            slot: The slot.
            parameters: Of the sequence.
            prompt_ids: (T,) int64 its prompt, for the repetition penalty.
            end_ids: Tokens that may not come before `min_new_tokens` others.
        """
        is_greedy = parameters.top_k == 1
        self._temperature[slot] = 0.0 if is_greedy else parameters.temperature
        self._top_k[slot] = parameters.top_k if parameters.top_k < self.vocab_size else 0
        self._top_p[slot] = parameters.top_p
        self._min_p[slot] = parameters.min_p
        self._num_top[slot] = -1 if parameters.num_top_tokens is None else parameters.num_top_tokens
        self._scored_ids[slot] = parameters.scored_token_ids
        seed, sample = np.array([parameters.seed], np.uint64), np.array([parameters.sample], np.uint64)
        self._stream[slot] = stream_states(seed, sample)[0]
        self._step[slot] = 0
        self._edits[slot] = LogitEdits.of(parameters, prompt_ids=prompt_ids, end_ids=end_ids)
        self._masks.clear(slot)
        self._is_plain[slot] = self._temperature[slot] == 0 and self._edits[slot] is None and self._num_top[slot] < 0

    def mask_row(self, slot: int) -> NDArray[np.int32]:
        """Returns the words (M,) of a slot's mask, to be filled in place and handed to `allow`."""
        return self._masks.row(slot)

    def allow(self, slot: int, mask: NDArray[np.int32] | None) -> None:
        """Sets what a slot's next draw, and no other, may choose.

        Args:
            slot: The slot.
            mask: (M,) int32, M = V / 32 rounded up: token i is allowed if bit i % 32 of word i // 32 is set. None
                allows every token.
        """
        if mask is None:
            self._masks.clear(slot)
        else:
            self._masks.set(slot, mask)

    def move(self, source: int, target: int) -> None:
        """Moves what belongs to slot `source` to slot `target`; `source` must be assigned before it is used again."""
        if source == target:
            return
        for values in (
            self._temperature, self._top_k, self._top_p, self._min_p,
            self._stream, self._step, self._num_top, self._is_plain,
        ):  # fmt: skip
            values[target] = values[source]
        self._scored_ids[target] = self._scored_ids[source]
        self._edits[target] = self._edits[source]
        self._edits[source] = None
        self._masks.move(source, target)

    def sample(
        self, logits: NDArray[np.float32], slots: NDArray[np.intp] | None = None, ranking: Ranking | None = None
    ) -> SampledTokens:
        """Chooses a token for each of some slots, and takes their random streams a step on.

        Args:
            logits: (R, V) float32, contiguous; left as they are.
            slots: (R,) slots that the rows belong to, each once; None: 0 to R - 1.
            ranking: Of these logits, where they were ranked already.
        """
        if slots is None:
            slots = np.arange(len(logits))
        if ranking is not None and ranking.has_any_of(self._suppressed_ids):
            ranking = None
        allowed = logits
        if self._suppressed_ids.size and not (ranking is not None and self._are_plain(slots)):
            allowed = logits.copy()
            allowed[:, self._suppressed_ids] = -np.inf
        return self._sample(allowed, slots, logits, ranking)

    def _are_plain(self, slots: NDArray[np.intp]) -> bool:
        """True if nothing but the likeliest token is wanted of each slot, whatever it is."""
        return bool(self._is_plain[slots].all()) and not self._masks.is_set[slots].any()

    def _sample(
        self, logits: NDArray[np.float32], slots: NDArray[np.intp], given: NDArray[np.float32], ranking: Ranking | None
    ) -> SampledTokens:
        """Samples as `sample` does; log-probabilities are those of the logits that were `given`."""
        if ranking is None:
            best, maximum = _best(logits)  # NaN is the largest of all
        else:
            best = ranking.token_ids[:, 0].copy()
            maximum = np.where(np.isfinite(ranking.normalizers), ranking.logits[:, 0], np.float32(np.nan))
        is_known = ranking is not None or not self._with_log_probabilities
        if is_known and self._are_plain(slots):
            log_probabilities = np.zeros(len(logits))
            if ranking is not None:
                log_probabilities[:] = maximum - ranking.normalizers
            return SampledTokens(best, log_probabilities, np.isfinite(maximum))
        edited = np.array([row for row, slot in enumerate(slots.tolist()) if self._is_edited(slot)], np.intp)
        if edited.size:
            token_ids, is_valid = best.copy(), np.isfinite(maximum)
            plain = np.setdiff1d(np.arange(len(logits)), edited)
            if plain.size:
                token_ids[plain] = self._choose(_rows(logits, plain), slots[plain], best[plain], maximum[plain])
            copy = self._edit(logits, edited, slots[edited])  # (n, V)
            edited_best, edited_maximum = _best(copy)
            token_ids[edited] = self._choose(copy, slots[edited], edited_best, edited_maximum)
            is_valid[edited] &= np.isfinite(edited_maximum)
        else:
            token_ids, is_valid = self._choose(logits, slots, best, maximum), np.isfinite(maximum)
        self._step[slots] += np.uint64(1)
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            if (edits := self._edits[slot]) is not None:
                edits.record(token_id)
        self._masks.clear(slots)
        if given is not logits:
            maximum = given.max(axis=1)
        normalizers = None if ranking is None else ranking.normalizers
        log_probabilities, top_tokens = self._log_probabilities(given, maximum, normalizers, token_ids, slots)
        return SampledTokens(token_ids, log_probabilities, is_valid, top_tokens)

    def _is_edited(self, slot: int) -> bool:
        """Returns True if the logits of the slot's next draw are changed."""
        edits = self._edits[slot]
        return (edits is not None and edits.is_active) or bool(self._masks.is_set[slot])

    def _edit(
        self, logits: NDArray[np.float32], rows: NDArray[np.intp], slots: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        """Returns a copy of some rows (n, V) changed by biases, penalties and masks; it holds until the next call."""
        if self._edited is None:
            self._edited = np.empty((len(self._temperature), self.vocab_size), np.float32)
        copy = self._edited[: len(rows)]
        np.take(logits, rows, axis=0, out=copy, mode="clip")
        edits = [(row, one) for row, slot in enumerate(slots.tolist()) if (one := self._edits[slot]) is not None]
        if edits:
            apply_edits([one for _, one in edits], np.array([row for row, _ in edits], np.intp), copy)
        if (masked := np.flatnonzero(self._masks.is_set[slots])).size:
            self._masks.apply(slots[masked], masked, copy)
        return copy

    def _choose(
        self,
        logits: NDArray[np.float32],
        slots: NDArray[np.intp],
        best: NDArray[np.int64],
        maximum: NDArray[np.float32],
    ) -> NDArray[np.int64]:
        """Returns the tokens (n,) of rows whose likeliest tokens are `best`: drawn if the temperature is not 0."""
        random_rows = np.flatnonzero((self._temperature[slots] > 0) & np.isfinite(maximum))
        if not random_rows.size:
            return best
        token_ids = best.copy()
        has_top_k = self._top_k[slots[random_rows]] > 0
        with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: weights of 0 and 1 are right
            for rows, draw in (random_rows[has_top_k], self._draw_top_k), (random_rows[~has_top_k], self._draw_whole):
                if rows.size:
                    token_ids[rows] = draw(_rows(logits, rows), slots[rows], maximum[rows])
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
                _rows(logits, rows), maximum[rows], self._temperature[slots[rows]]
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
        token_ids: NDArray[np.int64],
        slots: NDArray[np.intp],
    ) -> tuple[NDArray[np.float64], dict[int, list[tuple[int, float]]]]:
        """Returns the log-probabilities (R,) of the tokens, and by row the likeliest ones if they are asked for."""
        log_probabilities = np.zeros(len(logits))
        num_top = self._num_top[slots]
        wanted = np.arange(len(slots)) if self._with_log_probabilities else np.flatnonzero(num_top >= 0)
        if not wanted.size:
            return log_probabilities, {}
        some = _rows(logits, wanted)
        if normalizers is None:
            normalizers = maximum[wanted] + self._scratch.log_totals(some, maximum[wanted])
        else:
            normalizers = normalizers[wanted]
        log_probabilities[wanted] = logits[wanted, token_ids[wanted]] - normalizers
        lists = zip(wanted.tolist(), likeliest(some, normalizers, np.maximum(num_top[wanted], 0)), strict=True)
        found = {row: top_tokens for row, top_tokens in lists if top_tokens}
        for row, normalizer in zip(wanted.tolist(), normalizers, strict=True):  # a float64, and so are its scores
            if scored_ids := self._scored_ids[slots[row]]:
                scores = (logits[row, list(scored_ids)] - normalizer).tolist()
                found[row] = [*found.get(row, ()), *zip(scored_ids, scores, strict=True)]
        return log_probabilities, found


def _best(logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns the token with the largest logit of every row, and that logit; both (R,)."""
    best = logits.argmax(axis=1).astype(np.int64, copy=False)
    maximum: NDArray[np.float32] = logits[np.arange(len(logits)), best]
    return best, maximum


def _rows(values: NDArray[np.float32], rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """Returns some rows, in rising order; without a copy if they are neighbours."""
    first, last = int(rows[0]), int(rows[-1])
    return values[first : last + 1] if last - first + 1 == len(rows) else values[rows]
