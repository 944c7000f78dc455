"""Makes a classifier's probabilities agree with how often it is right, and chooses the thresholds of its decisions.

Temperature scaling (Guo et al. 2017, section 4.2): logits are divided by one number before the softmax, or before the
sigmoids if several labels may apply. It is fitted on validation data by the negative log-likelihood; rankings stay.

Expected calibration error (Guo et al. 2017, equation 3): predictions are put into 15 bins of equal width by their
confidence; the error is the mean, over the predictions, of the distance between a bin's mean confidence and the share
of its predictions that are right. With a single label, the likeliest label of an example is a prediction. With several,
every pair of example and label is one, with the label's probability, and is right if the label applies.

N examples, C labels, P predictions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, softmax

NUM_BINS = 15
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
"""Bounds of the fit: if every validation example is right, likelihood has no best temperature."""
DEFAULT_THRESHOLD = 0.5
MIN_EXAMPLES = 5
"""Fewest validation examples with a label, and fewest without it, for its threshold to be fitted."""
_BISECTIONS = 60


def to_probabilities(logits: ArrayLike, *, multi_label: bool = False) -> NDArray[np.float64]:
    """Softmax of logits along the last axis, (N, C), or the sigmoid of each if several labels may apply."""
    values = np.asarray(logits, np.float64)
    probabilities: NDArray[np.float64] = expit(values) if multi_label else softmax(values, axis=-1)
    return probabilities


def fit_temperature(logits: ArrayLike, targets: ArrayLike, *, multi_label: bool = False) -> float:
    """Fits the temperature that makes the targets likeliest.

    The negative log-likelihood is convex in 1 / temperature; its derivative, the mean difference between expected and
    observed logits, is bisected.

    Args:
        logits: (N, C).
        targets: The label of each example, (N,); for several labels, 1 where one applies and 0 elsewhere, (N, C).
        multi_label: Whether several labels may apply.

    Returns:
        A number from `MIN_TEMPERATURE` to `MAX_TEMPERATURE`.
    """
    values = np.asarray(logits, np.float64)
    truth = np.asarray(targets) if multi_label else np.eye(values.shape[-1])[np.asarray(targets)]  # (N, C)
    low, high = np.log(1 / MAX_TEMPERATURE), np.log(1 / MIN_TEMPERATURE)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        probabilities = to_probabilities(values * np.exp(middle), multi_label=multi_label)
        slope = float(np.mean((probabilities - truth) * values))
        low, high = (middle, high) if slope < 0 else (low, middle)
    return float(np.exp(-(low + high) / 2))


def expected_calibration_error(confidences: ArrayLike, right: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """Returns the expected calibration error, 0 to 1, over bins of equal width, each open below and closed above.

    Args:
        confidences: Of the predictions, 0 to 1, (P,).
        right: Whether each is right, (P,).
        num_bins: Number of bins.
    """
    confidence, is_right = np.asarray(confidences, np.float64), np.asarray(right, np.float64)
    bins = np.clip(np.ceil(confidence * num_bins).astype(np.int64) - 1, 0, num_bins - 1)  # (P,)
    gaps = np.bincount(bins, confidence - is_right, num_bins)  # a bin's sum of differences
    return float(np.abs(gaps).sum() / len(confidence))


def choose_thresholds(probabilities: ArrayLike, targets: ArrayLike) -> tuple[float, ...]:
    """Chooses for each label the probability from which it applies: the one with the highest F1.

    Thresholds lie halfway between neighbouring probabilities; of equally good ones, the nearest to 0.5 is taken. A
    label that fewer than `MIN_EXAMPLES` examples have, or lack, keeps 0.5.

    Args:
        probabilities: Calibrated, of validation data, (N, C).
        targets: 1 where a label applies and 0 elsewhere, (N, C).
    """
    columns = zip(np.asarray(probabilities, np.float64).T, np.asarray(targets).T == 1, strict=True)
    return tuple(_best_threshold(column, truth) for column, truth in columns)


def _best_threshold(probabilities: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """Chooses the threshold of one label from (N,) probabilities and (N,) truths."""
    num_true = int(truth.sum())
    if min(num_true, len(truth) - num_true) < MIN_EXAMPLES:
        return DEFAULT_THRESHOLD
    order = np.argsort(-probabilities, kind="stable")
    sorted_probabilities = probabilities[order]
    hits = np.cumsum(truth[order])  # right ones among the first 1, 2, ..., N
    f1 = 2 * hits / (np.arange(1, len(truth) + 1) + num_true)
    after = np.append(sorted_probabilities[1:], 0.0)
    cuts = np.flatnonzero(sorted_probabilities > after)  # a threshold cannot part equal probabilities
    if not len(cuts):  # all are 0
        return DEFAULT_THRESHOLD
    thresholds = (sorted_probabilities[cuts] + after[cuts]) / 2
    best = thresholds[f1[cuts] >= f1[cuts].max() - 1e-12]
    return float(min(best, key=lambda threshold: abs(threshold - DEFAULT_THRESHOLD)))


def calibration_metrics(
    logits: ArrayLike, targets: ArrayLike, temperature: float, *, multi_label: bool = False
) -> dict[str, float]:
    """Measures the expected calibration error with and without the temperature.

    Args:
        logits: Of test data, (N, C).
        targets: As `fit_temperature` takes them.
        temperature: Fitted on validation data.
        multi_label: Whether several labels may apply.

    Returns:
        `expected_calibration_error`, and `expected_calibration_error_uncalibrated`; 0 to 1.
    """
    truth = np.asarray(targets)

    def error(divisor: float) -> float:
        probabilities = to_probabilities(np.asarray(logits, np.float64) / divisor, multi_label=multi_label)
        if multi_label:
            return expected_calibration_error(probabilities.ravel(), truth.ravel() == 1)
        return expected_calibration_error(probabilities.max(axis=-1), probabilities.argmax(axis=-1) == truth)

    return {
        "expected_calibration_error": error(temperature),
        "expected_calibration_error_uncalibrated": error(1.0),
    }
