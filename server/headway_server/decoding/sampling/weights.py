"""Softmax weights of whole rows, and sums over them.

Shapes: n rows, V vocabulary, W = V rounded up to whole groups, G groups: token i is in group i mod G.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_GROUPS = 256


class WeightScratch:
    """Room for the weights of some rows, used again and again."""

    def __init__(self, *, num_rows: int, vocab_size: int) -> None:
        """Makes the room when it is first needed.

        Args:
            num_rows: Rows that it holds.
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
        """Returns exp((logits - maximum) / temperature), (n, W), zero past V; it holds until the next call.

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
        np.subtract(logits, maximum[:, np.newaxis], out=weights)
        if temperature is not None and (temperature != 1).any():
            np.divide(weights, temperature[:, np.newaxis], out=weights)
        np.exp(weights, out=weights)
        return padded

    def running_sums(self, weights: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the running sums (n, G) of the groups of `weights` (n, W); the last one is the total."""
        sums = self._grouped(weights).sum(axis=1)
        return np.cumsum(sums, axis=1, dtype=np.float64)

    def log_totals(self, logits: NDArray[np.float32], maximum: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns log sum exp(logits - maximum), (n,), for any number of rows; NaN where logits are not finite."""
        totals = np.zeros(len(logits))
        with np.errstate(invalid="ignore", under="ignore"):
            for start in range(0, len(logits), self.num_rows):
                rows = slice(start, start + self.num_rows)
                totals[rows] = self.running_sums(self.weights(logits[rows], maximum[rows]))[:, -1]
            return np.log(totals)

    def pick(
        self, weights: NDArray[np.float32], running: NDArray[np.float64], numbers: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Draws a token of each row in proportion to its weights: first the group, then the token in it.

        Args:
            weights: (n, W) float32.
            running: (n, G) what `running_sums` says of them.
            numbers: (n,) in [0, 1).
        """
        rows = np.arange(len(weights))
        target = below(numbers * running[:, -1], running[:, -1])
        group = (running <= target[:, np.newaxis]).sum(axis=1)
        before = np.where(group > 0, running[rows, group - 1], 0.0)
        within = np.cumsum(self._grouped(weights)[rows, :, group], axis=1, dtype=np.float64)  # (n, tokens a group)
        # The group's sum was taken in float32, so what is left of the target may be a rounding past `within`.
        left = below(target - before, within[:, -1])
        member = (within <= left[:, np.newaxis]).sum(axis=1)
        token_ids: NDArray[np.int64] = member * self.num_groups + group
        return token_ids

    def _grouped(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns weights (n, W) as (n, tokens a group, G)."""
        return weights.reshape(len(weights), -1, self.num_groups)


def below(target: NDArray[np.float64], mass: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns `target`, made less than `mass`, so that some running sum that ends with `mass` exceeds it."""
    limited: NDArray[np.float64] = np.minimum(target, np.nextafter(mass, 0.0))
    return limited
