"""Labels and vectors of what graphs answer."""

import numpy as np
import pytest

from headway_server.bundles import ClassificationScheme
from headway_server.tasks.outputs import LabelReader, log_softmax, read_vector, sigmoid, softmax, to_probabilities

ANY = ClassificationScheme()
SEVERAL = ClassificationScheme(kind="multi_label", thresholds=(0.5, 0.9, 0.1), temperature=2.0)


def read(labels, scheme, logits, top_k, threshold=None):
    probabilities = to_probabilities(np.array(logits, np.float32), scheme)
    return LabelReader(labels, scheme).read(probabilities, top_k, threshold)


def test_probabilities_equal_the_formula_in_double_precision():
    logits = np.random.default_rng(1).normal(0, 5, (6, 9)).astype(np.float32)
    exponentials = np.exp(logits.astype(np.float64))
    expected = exponentials / exponentials.sum(1, keepdims=True)
    np.testing.assert_allclose(softmax(logits), expected, atol=1e-6)
    np.testing.assert_allclose(log_softmax(logits), np.log(expected), atol=1e-5)
    np.testing.assert_allclose(sigmoid(logits), exponentials / (1 + exponentials), atol=1e-6)


def test_large_logits_do_not_overflow_and_the_input_is_left_alone():
    logits = np.array([[1e30, -1e30, 1e30], [1000, 999, -np.inf]], np.float32)
    before = logits.copy()
    probabilities = softmax(logits)
    np.testing.assert_allclose(probabilities, [[0.5, 0, 0.5], [0.7310586, 0.2689414, 0]], atol=1e-6)
    assert probabilities.dtype == np.float32
    np.testing.assert_array_equal(logits, before)


def test_labels_come_largest_first_and_ties_in_the_order_of_the_outputs():
    labels = read("abcd", ANY, [1, 3, 3, 1], 3)
    assert [scored.label for scored in labels] == ["b", "c", "a"]
    assert [scored.is_selected for scored in labels] == [True, False, False]
    assert sum(scored.probability for scored in read("abcd", ANY, [0, 0, 0, 0], 4)) == 1


@pytest.mark.parametrize(
    ("threshold", "selected"), [(None, {"a": True, "b": False, "c": True}), (0.5, {"a": True, "b": True, "c": False})]
)
def test_of_several_labels_those_apply_that_reach_their_threshold(threshold, selected):
    logits = np.array([4.0, 2.0, -1.0], np.float32)  # halved: 0.88, 0.73, 0.38
    labels = read("abc", SEVERAL, logits, 3, threshold)
    assert {scored.label: scored.is_selected for scored in labels} == selected
    np.testing.assert_allclose([scored.probability for scored in labels], 1 / (1 + np.exp(-logits / 2)), rtol=1e-5)


@pytest.mark.parametrize(
    ("threshold", "selected"), [(None, [True, False]), (0.7, [True, False]), (0.75, [False, False])]
)
def test_of_exclusive_labels_the_likeliest_applies_if_it_reaches_the_threshold(threshold, selected):
    labels = read("ab", ANY, [0, 1], 2, threshold)  # 0.27, 0.73
    assert [scored.is_selected for scored in labels] == selected


def test_a_vector_is_scaled_to_length_one_if_asked_and_a_vector_of_zeros_stays_one():
    vector = np.array([3, 4], np.float32)
    np.testing.assert_allclose(read_vector(vector, normalize=True), [0.6, 0.8], rtol=1e-6)
    assert read_vector(vector, normalize=False).tolist() == [3, 4]
    assert read_vector(np.zeros(2, np.float32), normalize=True).tolist() == [0, 0]
    assert read_vector(vector, normalize=True).dtype == np.float32


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_is_an_error(value):
    with pytest.raises(FloatingPointError):
        read("ab", ANY, [1, value], 1)
    with pytest.raises(FloatingPointError):
        read_vector(np.array([1, value], np.float32), normalize=False)
