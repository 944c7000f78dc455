"""Temperatures, calibration errors and thresholds, held against plain ways to find the same."""

import math

import numpy as np
import pytest

from headway_training.calibration import (
    DEFAULT_THRESHOLD,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    calibration_metrics,
    choose_thresholds,
    expected_calibration_error,
    fit_temperature,
    to_probabilities,
)


def softmax(logits) -> np.ndarray:
    return to_probabilities(logits)


def sigmoid(logits) -> np.ndarray:
    return to_probabilities(logits, multi_label=True)


def drawn(generator: np.random.Generator, temperature: float, count: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels that follow their softmax at a temperature."""
    logits = generator.normal(size=(count, 4)) * 3
    chances = softmax(logits / temperature)
    return logits, np.array([generator.choice(4, p=row) for row in chances])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_that_labels_were_drawn_at_is_found(temperature):
    logits, labels = drawn(np.random.default_rng(0), temperature)
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.08)


def test_the_fitted_temperature_has_the_least_negative_log_likelihood_of_a_fine_grid():
    logits, labels = drawn(np.random.default_rng(1), 1.7, count=300)

    def loss(temperature: float) -> float:
        return float(-np.log(softmax(logits / temperature)[np.arange(300), labels]).mean())

    fitted = fit_temperature(logits, labels)
    assert loss(fitted) <= min(loss(t) for t in np.geomspace(MIN_TEMPERATURE, MAX_TEMPERATURE, 2000))


def test_one_temperature_is_fitted_to_all_decisions_of_several_labels():
    generator = np.random.default_rng(2)
    logits = generator.normal(size=(3000, 3)) * 2
    truth = (generator.random((3000, 3)) < sigmoid(logits / 2)).astype(int)
    fitted = fit_temperature(logits, truth, multi_label=True)
    assert fitted == pytest.approx(2, rel=0.08)

    def loss(temperature: float) -> float:
        chances = sigmoid(logits / temperature)
        return float(-np.where(truth == 1, np.log(chances), np.log1p(-chances)).mean())

    assert loss(fitted) <= min(loss(t) for t in np.geomspace(0.5, 5, 500))


def test_where_every_answer_is_right_the_temperature_stays_within_its_bounds():
    logits = np.eye(3)[[0, 1, 2, 0]] * 5
    assert MIN_TEMPERATURE <= fit_temperature(logits, [0, 1, 2, 0]) < 0.2
    assert fit_temperature(-logits, [0, 1, 2, 0]) == pytest.approx(MAX_TEMPERATURE)


def naive_error(confidences: np.ndarray, right: np.ndarray) -> float:
    """Bin by bin, as the definition says it."""
    total = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        inside = [i for i, c in enumerate(confidences) if low < c <= high or (number == 0 and c == 0)]
        if inside:
            gap = abs(np.mean(confidences[inside]) - np.mean(right[inside]))
            total += len(inside) / len(confidences) * gap
    return total


def test_the_calibration_error_is_that_of_its_definition():
    generator = np.random.default_rng(3)
    for _ in range(20):
        confidences = np.round(generator.random(200), 3)
        right = generator.random(200) < generator.random()
        assert expected_calibration_error(confidences, right) == pytest.approx(naive_error(confidences, right))
    assert expected_calibration_error([1.0, 0.0], [True, False]) == 0
    assert expected_calibration_error([0.9, 0.9], [False, False]) == pytest.approx(0.9)


def test_calibration_is_measured_with_and_without_the_temperature():
    logits, labels = drawn(np.random.default_rng(4), 3.0)
    metrics = calibration_metrics(logits, labels, fit_temperature(logits, labels))
    assert metrics["expected_calibration_error"] < 0.03
    assert metrics["expected_calibration_error_uncalibrated"] > 0.15
    right = softmax(logits).argmax(axis=-1) == labels
    expected = naive_error(softmax(logits).max(axis=-1), right)
    assert metrics["expected_calibration_error_uncalibrated"] == pytest.approx(expected)


def f1(probabilities: np.ndarray, truth: np.ndarray, threshold: float) -> float:
    selected = probabilities >= threshold
    return 2 * float((selected & truth).sum()) / max(1, int(selected.sum() + truth.sum()))


def test_no_threshold_has_a_higher_f1_than_the_chosen_one():
    generator = np.random.default_rng(5)
    for _ in range(30):
        truth = generator.random((60, 2)) < 0.3
        probabilities = np.round(np.clip(generator.normal(0.3 + 0.3 * truth, 0.2), 0, 1), 2)
        for label, threshold in enumerate(choose_thresholds(probabilities, truth)):
            best = max(f1(probabilities[:, label], truth[:, label], t) for t in np.linspace(0.005, 1, 200))
            assert f1(probabilities[:, label], truth[:, label], threshold) == pytest.approx(best)


def test_of_equally_good_thresholds_the_nearest_to_a_half_is_taken():
    probabilities = np.array([0.1] * 10 + [0.2] * 10 + [0.9] * 10)[:, None]
    truth = np.array([0] * 20 + [1] * 10)[:, None]
    assert choose_thresholds(probabilities, truth) == (pytest.approx(0.55),)


def test_a_label_that_is_too_rare_to_tell_keeps_a_half():
    generator = np.random.default_rng(6)
    probabilities = generator.random((50, 3))
    truth = np.zeros((50, 3), int)
    truth[:4, 0] = 1  # too few that have it
    truth[:46, 1] = 1  # too few that do not
    truth[:25, 2] = 1
    first, second, third = choose_thresholds(probabilities, truth)
    assert first == second == DEFAULT_THRESHOLD
    assert third != DEFAULT_THRESHOLD
    assert choose_thresholds(np.zeros((20, 1)), np.ones((20, 1)) * (np.arange(20) < 10)[:, None]) == (0.5,)


def test_probabilities_do_not_overflow():
    assert sigmoid([1e4, -1e4, 0.0]).tolist() == [1.0, 0.0, 0.5]
    assert not math.isnan(softmax([[1e6, -1e6]]).sum())
