"""Softmax of whole rows: weights, their sums, log-probabilities, and the likeliest tokens with theirs.

Log-probabilities are the model's own, log softmax(logits), before anything is done to the logits. Every operation
concerns one row, so a row's result does not depend on the rest of the batch, to the last bit.

Shapes: n rows, R rows of a step, T tokens of a prompt, V vocabulary, C candidates of a row, W = V rounded up to whole
groups, G groups: token i is in group i mod G.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.interfaces import Ranking
from headway_server.decoding.sampling.likeliest import top_candidates
from headway_server.decoding.sampling.masks import TokenMasks

MAX_GROUPS = 256

_BLOCK_LOGITS = 2**18
"""Logits of rows that are worked on at a time, so that they stay in a core's cache: 1 MiB, and as much of weights."""
_MODERATE = np.float32(60)
"""Magnitude of a row's largest logit below which its exponentials are summed without shifting, which saves a pass. Sums
of millions stay within float32, and none that matters beside the largest is lost."""


class WeightScratch:
    """Memory for the weights of some rows, used again and again."""

    def __init__(self, *, num_rows: int, vocab_size: int) -> None:
        """Allocates the memory when it is first needed.

        Args:
            num_rows: Rows that there is memory for.
            vocab_size: V.
        """
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_groups = min(MAX_GROUPS, vocab_size)
        self._weights: NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        return f"WeightScratch({self.num_rows} rows, {self.vocab_size} tokens)"

    def weights(
        self,
        logits: NDArray[np.float32],
        maximum: NDArray[np.float32],
        temperature: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Returns exp((logits - maximum) / temperature), (n, W), zero past V, valid until the next call.

        Args:
            logits: (n, V) float32, at most `num_rows` rows.
            maximum: (n,) of the logits.
            temperature: (n,) above 0; None is 1.
        """
        if self._weights is None:
            width = -(-self.vocab_size // self.num_groups) * self.num_groups
            self._weights = np.zeros((self.num_rows, width), np.float32)
        padded = self._weights[: len(logits)]
        weights = padded[:, : self.vocab_size]  # (n, V)
        if maximum.any():
            np.subtract(logits, maximum[:, np.newaxis], out=weights)
            logits = weights
        if temperature is not None and (temperature != 1).any():
            np.divide(logits, temperature[:, np.newaxis], out=weights)
            logits = weights
        np.exp(logits, out=weights)
        return padded

    def running_sums(self, weights: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the running sums (n, G) of the groups of `weights` (n, W); the last one is the total."""
        sums = self._grouped(weights).sum(axis=1)
        return np.cumsum(sums, axis=1, dtype=np.float64)

    def log_totals(self, logits: NDArray[np.float32], maximum: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns log sum exp(logits - maximum), (n,), for any number of rows; NaN where logits are not finite."""
        totals = np.zeros(len(logits))
        with np.errstate(invalid="ignore", under="ignore"):
            shift = np.where(np.abs(maximum) < _MODERATE, np.float32(0), maximum)  # by each row's own maximum
            for start in range(0, len(logits), self.num_rows):
                rows = slice(start, start + self.num_rows)
                totals[rows] = self.weights(logits[rows], shift[rows]).sum(axis=1)
            return np.log(totals) + shift - maximum

    def pick(
        self, weights: NDArray[np.float32], running: NDArray[np.float64], numbers: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Draws a token of each row in proportion to its weights: first the group, then the token in it.

        Args:
            weights: (n, W) float32.
            running: (n, G) their `running_sums`.
            numbers: (n,) in [0, 1).
        """
        rows = np.arange(len(weights))
        target = below(numbers * running[:, -1], running[:, -1])
        group = (running <= target[:, np.newaxis]).sum(axis=1)
        before = np.where(group > 0, running[rows, group - 1], 0.0)
        within = np.cumsum(self._grouped(weights)[rows, :, group], axis=1, dtype=np.float64)  # (n, tokens a group)
        # The group's sum is in float32, so the rest of the target may exceed `within` by a rounding error.
        left = below(target - before, within[:, -1])
        member = (within <= left[:, np.newaxis]).sum(axis=1)
        token_ids: NDArray[np.int64] = member * self.num_groups + group
        return token_ids

    def _grouped(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns weights (n, W) as (n, tokens a group, G)."""
        return weights.reshape(len(weights), -1, self.num_groups)


def below(target: NDArray[np.float64], mass: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns `target`, made less than `mass`, so that a running sum that ends with `mass` exceeds it somewhere."""
    limited: NDArray[np.float64] = np.minimum(target, np.nextafter(mass, 0.0))
    return limited


@dataclass(frozen=True, slots=True)
class RankedRows:
    """Token masks of each row."""

    token_ids: NDArray[np.int64]
    """(R, C), by falling log-probability; the lower id first among equals."""
    log_probabilities: NDArray[np.float64]
    """(R, C) of the model's own distribution; minus infinity past the tokens that may follow."""
    normalizers: NDArray[np.float64]
    """(R,) log sum exp of the logits; not finite if the logits are not."""
    logits: NDArray[np.float32]
    """(R, V) that were ranked; minus infinity, in some rows, for tokens that may not follow."""

    def log_probability(self, row: int, token_id: int) -> float:
        """Returns that of any token that may follow."""
        return float(self.logits[row, token_id] - self.normalizers[row])


class RowRanker:
    """Finds the likeliest tokens that may follow in every row, and their log-probabilities."""

    def __init__(self, masks: TokenMasks) -> None:
        """Takes the token masks of the slots."""
        self._masks = masks
        num_rows = block_rows(masks.slots.num_slots, masks.vocab_size)
        self._scratch = WeightScratch(num_rows=num_rows, vocab_size=masks.vocab_size)

    def __repr__(self) -> str:
        return f"RowRanker({self._scratch!r})"

    def rank(
        self, logits: NDArray[np.float32], count: int, slots: NDArray[np.intp], ranking: Ranking | None = None
    ) -> RankedRows:
        """Ranks the tokens of each row.

        Args:
            logits: (R, V) float32, contiguous; may be changed.
            count: C, 1 to V.
            slots: (R,) the slots of the rows.
            ranking: Of these logits, where they were ranked already, of C tokens. It is used for rows in which all of
                them may follow.
        """
        if ranking is None:
            rows = np.arange(len(logits))
            token_ids = np.empty((len(logits), count), np.int64)
            values = np.empty((len(logits), count), np.float32)
            normalizers = np.empty(len(logits))
        else:
            rows = np.flatnonzero(~self._masks.allows(slots, ranking.token_ids).all(axis=1))
            token_ids, values, normalizers = ranking.token_ids, ranking.logits, ranking.normalizers
            if rows.size:
                token_ids, values = token_ids.copy(), values.copy()
            is_ranked = [self._rank_few(slots[row], logits[row], token_ids[row], values[row]) for row in rows]
            rows = rows[~np.array(is_ranked, np.bool_)]
        with np.errstate(invalid="ignore", under="ignore"):
            for start in range(0, len(rows), self._scratch.num_rows):
                some = rows[start : start + self._scratch.num_rows]
                block = take_rows(logits, some)
                if ranking is None:
                    maximum = block.max(axis=1)
                    normalizers[some] = maximum + self._scratch.log_totals(block, maximum)
                if (restricted := some[self._masks.restricts[slots[some]]]).size:
                    self._masks.apply(slots[restricted], restricted, logits)
                    block = take_rows(logits, some)
                if not np.isfinite(normalizers[some]).all():  # such a row may have NaN, which cannot be ranked
                    block = np.nan_to_num(block, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
                token_ids[some], values[some] = top_candidates(block, np.full(len(block), count))
            log_probabilities = values - normalizers[:, np.newaxis]
        return RankedRows(token_ids, log_probabilities, normalizers, logits)

    def _rank_few(
        self, slot: int, logits: NDArray[np.float32], token_ids: NDArray[np.int64], values: NDArray[np.float32]
    ) -> bool:
        """Ranks a row (V,) in which few tokens may follow, into (C,) each; returns False if they may be many."""
        found = self._masks.few(slot)
        if found is None:
            return False
        found = found[np.argsort(-logits[found], kind="stable")][: len(token_ids)]
        token_ids[: len(found)] = found
        values[: len(found)], values[len(found) :] = logits[found], -np.inf
        return True


def token_log_probabilities(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64], num_top: int
) -> tuple[NDArray[np.float64], list[list[tuple[int, float]]]]:
    """Returns how likely given tokens were, and which were the likeliest.

    Args:
        logits: (T, V) float32, contiguous.
        token_ids: (T,) int64, one of each row.
        num_top: Likeliest tokens wanted of each row; all of them if there are fewer.

    Returns:
        Natural logarithms of their probabilities (T,), NaN in rows that are not finite; and for each row the `num_top`
        likeliest tokens with theirs, the likeliest first, the lower id among equals.
    """
    log_probabilities = np.zeros(len(logits))
    top_tokens: list[list[tuple[int, float]]] = []
    if not len(logits):
        return log_probabilities, top_tokens
    step = block_rows(len(logits), logits.shape[1])
    scratch = WeightScratch(num_rows=step, vocab_size=logits.shape[1])
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
        normalizers: (n,) log sum exp of the logits; rows where it is not finite get no tokens.
        counts: (n,) at least 0; more than V is V. Tokens without any probability are left out.
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
        pairs = zip(row_ids[: counts[row]], row_values, strict=False)
        top_tokens[row] = [(token_id, value) for token_id, value in pairs if value > -np.inf]
    return top_tokens


def block_rows(num_rows: int, vocab_size: int) -> int:
    """Returns the number of rows processed at a time."""
    return max(1, min(num_rows, _BLOCK_LOGITS // vocab_size))


def take_rows(values: NDArray[np.float32], rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """Returns some rows, in rising order; without a copy if they are neighbours."""
    first, last = int(rows[0]), int(rows[-1])
    return values[first : last + 1] if last - first + 1 == len(rows) else values[rows]
