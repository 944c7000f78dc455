"""The law L(N, D) = E + A / N^alpha + B / D^beta, and how it is fitted (Hoffmann et al. 2022, section 3.3).

P points.

Deviation from the paper: the starts of L-BFGS are a grid of exponents and of shares that the three terms have of the
mean loss, at the middle of the points, not a grid of A, B and E themselves, and the best of them are followed. There
the constants are hardly correlated, so that few starts are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from headway_training.checkpoint import Record

NUM_CONSTANTS = 5
HUBER_DELTA = 1e-3
"""Residual of the logarithm beyond which it counts linearly, as in the paper."""
_EXPONENTS = (0.1, 0.3, 0.6, 1.0)
_MOST_EXPONENT = 3.0
_SHARES = (0.1, 0.5, 0.9)
"""Of E in the loss, and of the term of N in the rest."""
_MOST_STARTS = 24
"""Of the grid, the best are followed."""
_WIDEST_LOG = 30.0
"""Logarithm of a term's share of the loss is held within this of 0."""

Floats = NDArray[np.float64]


class ScalingLaw(Record):
    """The five constants: losses in nats, as they were measured."""

    irreducible: float
    """E, the loss that no size and no amount of data goes below."""
    size_factor: float
    """A."""
    size_exponent: float
    """alpha."""
    data_factor: float
    """B."""
    data_exponent: float
    """beta."""

    def loss(self, num_parameters: float, num_tokens: float) -> float:
        """The loss of N parameters that have read D tokens."""
        of_size = self.size_factor / num_parameters**self.size_exponent
        of_data = self.data_factor / num_tokens**self.data_exponent
        total: float = self.irreducible + of_size + of_data
        return total

    def describe(self) -> str:
        """The law with its constants."""
        return (
            f"L = {self.irreducible:.4g} + {self.size_factor:.4g} / N^{self.size_exponent:.3f} "
            f"+ {self.data_factor:.4g} / D^{self.data_exponent:.3f}"
        )


def fit_law(points: Sequence[tuple[float, float, float]]) -> ScalingLaw:
    """Fits the law: the least Huber loss of the logarithms' residuals, by L-BFGS from the best starts of a grid.

    With fewer than five points, or points of one size or one amount of data, one of several laws that fit is returned.

    Args:
        points: Parameters N, tokens D and loss L of each run, all above 0.
    """
    sizes, amounts, losses = np.log(np.asarray(points, dtype=np.float64)).T  # (P) each
    middle_size, middle_amount, middle_loss = float(sizes.mean()), float(amounts.mean()), float(losses.mean())
    sizes, amounts, losses = sizes - middle_size, amounts - middle_amount, losses - middle_loss

    def objective(constants: Floats) -> tuple[float, Floats]:
        """Huber loss, in units of its delta squared, and its gradient (5)."""
        floor, size, data, alpha, beta = constants
        terms = np.stack((np.full_like(sizes, floor), size - alpha * sizes, data - beta * amounts))  # (3, P)
        highest = terms.max(axis=0)
        shares = np.exp(terms - highest)  # (3, P)
        total = shares.sum(axis=0)
        residuals = (highest + np.log(total) - losses) / HUBER_DELTA  # (P)
        clipped = np.clip(residuals, -1, 1)  # Huber's derivative
        value = float((clipped * (residuals - clipped / 2)).sum())
        weights = shares / total * clipped / HUBER_DELTA  # (3, P)
        slopes = (-(weights[1] * sizes).sum(), -(weights[2] * amounts).sum())
        return value, np.array([*weights.sum(axis=1), *slopes])

    log_share = (-_WIDEST_LOG, _WIDEST_LOG)
    exponent = (0.0, _MOST_EXPONENT)
    # E is below every loss that was measured.
    bounds = [(-_WIDEST_LOG, float(losses.min())), log_share, log_share, exponent, exponent]
    starts = []
    for of_floor, of_size, alpha, beta in product(_SHARES, _SHARES, _EXPONENTS, _EXPONENTS):
        shares = np.log([of_floor, (1 - of_floor) * of_size, (1 - of_floor) * (1 - of_size)])
        starts.append(np.array([min(shares[0], bounds[0][1]), *shares[1:], alpha, beta]))
    starts.sort(key=lambda start: objective(start)[0])
    options = {"maxiter": 2000, "ftol": 1e-12, "gtol": 1e-9}
    found = [
        minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        for start in starts[:_MOST_STARTS]
    ]
    floor, size, data, alpha, beta = (float(value) for value in min(found, key=lambda one: float(one.fun)).x)
    return ScalingLaw(
        irreducible=float(np.exp(floor + middle_loss)),
        size_factor=float(np.exp(size + middle_loss + alpha * middle_size)),
        size_exponent=alpha,
        data_factor=float(np.exp(data + middle_loss + beta * middle_amount)),
        data_exponent=beta,
    )
