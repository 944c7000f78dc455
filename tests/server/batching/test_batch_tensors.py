"""Padding and probabilities."""

import numpy as np
import pytest

from headway_server.batching.tensors import pad, softmax, top_k_indices


def test_rows_are_padded_at_their_ends_to_the_longest():
    input_ids, mask = pad([np.array([5]), np.array([6, 7, 8]), np.array([9, 9])], pad_id=1)
    assert input_ids.tolist() == [[5, 1, 1], [6, 7, 8], [9, 9, 1]]
    assert mask.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert (input_ids.dtype, mask.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("seed", range(3))
def test_padding_equals_padding_row_by_row(seed):
    generator = np.random.default_rng(seed)
    rows = [generator.integers(0, 100, generator.integers(1, 30)) for _ in range(20)]
    input_ids, mask = pad(rows, pad_id=0)
    longest = max(map(len, rows))
    assert input_ids.tolist() == [[*row, *[0] * (longest - len(row))] for row in rows]
    assert mask.sum(1).tolist() == [len(row) for row in rows]


def test_probabilities_equal_the_formula_in_double_precision():
    logits = np.random.default_rng(1).normal(0, 5, (6, 9)).astype(np.float32)
    exponentials = np.exp(logits.astype(np.float64))
    np.testing.assert_allclose(softmax(logits), exponentials / exponentials.sum(1, keepdims=True), atol=1e-6)


def test_large_logits_do_not_overflow_and_the_input_is_left_alone():
    logits = np.array([[1e30, -1e30, 1e30], [1000, 999, -np.inf]], np.float32)
    before = logits.copy()
    probabilities = softmax(logits)
    np.testing.assert_allclose(probabilities, [[0.5, 0, 0.5], [0.7310586, 0.2689414, 0]], atol=1e-6)
    assert probabilities.dtype == np.float32
    np.testing.assert_array_equal(logits, before)


def test_top_k_breaks_ties_by_index():
    assert top_k_indices(np.array([0.2, 0.3, 0.3, 0.2], np.float32), 3).tolist() == [1, 2, 0]
