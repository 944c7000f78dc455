"""The likeliest tokens against a stable sort."""

import numpy as np
import pytest

from headway_server.decoding.sampling.likeliest import top_candidates


def test_ties_at_the_border_of_top_k_keep_the_lower_id():
    logits = np.tile(np.array([1, 0, 1, 1], np.float32), (1, 500))
    ids, _ = top_candidates(logits, np.array([7]))
    assert ids.tolist() == [[0, 2, 3, 4, 6, 7, 8]]


@pytest.mark.parametrize("vocab_size", [3, 300, 2000, 20011])
def test_candidates_are_what_a_stable_sort_gives(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(-50, 50, size=(9, vocab_size)).astype(np.float32)  # many ties
    counts = rng.integers(1, min(vocab_size, 100) + 1, size=9)
    ids, values = top_candidates(logits, counts)
    for row in range(9):
        expected = np.argsort(-logits[row], kind="stable")[: counts[row]]
        assert ids[row, : counts[row]].tolist() == expected.tolist()
        assert values[row, : counts[row]].tolist() == logits[row, expected].tolist()
        assert np.isneginf(values[row, counts[row] :]).all()


@pytest.mark.parametrize("vocab_size", [31, 2000])
def test_candidates_of_a_row_that_is_mostly_forbidden_come_first(vocab_size):
    logits = np.full((2, vocab_size), -np.inf, np.float32)
    logits[:, [4, 29]] = [1, 2]
    ids, values = top_candidates(logits, np.array([3, 2]))
    assert ids[:, :2].tolist() == [[29, 4], [29, 4]]
    assert values[:, :2].tolist() == [[2, 1], [2, 1]]
    assert np.isneginf(values[:, 2]).all()
