"""How far an output is from PyTorch's: no huge number hides the others."""

import numpy as np
import pytest

from headway_export.differences import relative_errors
from headway_export.parity import LOGIT_BOUND, batches

LOGITS = np.array([2.0, -1.0, 0.5, 4.0])


def error_of(found, exact, *, of_softmax=True):
    return float(relative_errors(np.asarray(found), np.asarray(exact), of_softmax=of_softmax))


def test_logits_are_compared_by_their_spread():
    assert error_of(LOGITS + np.array([0.005, 0, 0, 0]), LOGITS) == pytest.approx(0.001)


@pytest.mark.parametrize("masked", [-1e4, -1e9, -3e38, -np.inf])
def test_a_masked_class_hides_no_error_of_the_others(masked):
    exact, found = (np.append(logits, masked) for logits in (LOGITS, LOGITS * 1.01))
    assert error_of(found, exact) == pytest.approx(error_of(LOGITS * 1.01, LOGITS))
    assert error_of(exact, exact) == 0


def test_a_masked_class_may_be_masked_by_any_number_and_must_be_masked():
    exact = np.append(LOGITS, -1e9)
    assert error_of(np.append(LOGITS, -2e9), exact) == 0
    assert error_of(np.append(LOGITS, -np.inf), exact) == 0
    assert error_of(np.append(LOGITS, 0.0), exact) > 1


def test_a_logit_that_is_alone_may_be_rounded():
    exact = np.array([1e6, 0.0, -3.0])
    assert error_of(exact + np.array([0.06, 0.1, 0.1]), exact) < LOGIT_BOUND
    assert error_of([1e6, 1e6, -3.0], exact) > 1


def test_logits_that_are_nearly_equal_are_compared_by_their_size():
    assert error_of([3.001, 3.00201], [3.001, 3.002]) == pytest.approx(1e-5, rel=0.1)


def test_small_logits_are_not_let_off():
    assert error_of(LOGITS * 1.01e-3, LOGITS * 1e-3) == pytest.approx(error_of(LOGITS * 1.01, LOGITS), rel=1e-6)


@pytest.mark.parametrize("huge", [1e9, -1e9])
def test_one_huge_number_of_a_vector_hides_no_error_of_the_others(huge):
    vector = np.random.default_rng(0).normal(size=64)
    exact, found = np.append(vector, huge), np.append(vector * 1.01, huge)
    assert error_of(found, exact, of_softmax=False) > 10 * LOGIT_BOUND
    assert error_of(np.append(vector, huge * (1 + 1e-6)), exact, of_softmax=False) < LOGIT_BOUND


def test_zeros_of_a_sparse_vector_may_be_rounded():
    exact = np.zeros(100)
    exact[:3] = (1.0, -2.0, 0.5)
    assert error_of(exact + 1e-6, exact, of_softmax=False) < LOGIT_BOUND


def test_a_score_near_0_is_held_to_the_bound_itself():
    assert error_of([1e-5], [0.0], of_softmax=False) == pytest.approx(1e-5)
    assert error_of([101.0], [100.0], of_softmax=False) == pytest.approx(0.01)


@pytest.mark.parametrize("of_softmax", [True, False])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_infinitely_far(wrong, of_softmax):
    assert error_of([wrong, 0.0, 1.0], [2.0, 0.0, 1.0], of_softmax=of_softmax) == np.inf


def test_many_rows_are_compared_like_a_few(monkeypatch):
    random = np.random.default_rng(1)
    exact = random.normal(size=(50, 40))
    found = exact + random.normal(size=exact.shape) * 1e-3
    whole = relative_errors(found, exact, of_softmax=True)
    monkeypatch.setattr("headway_export.differences._MOST_COMPARED", 100)
    np.testing.assert_array_equal(relative_errors(found, exact, of_softmax=True), whole)


@pytest.mark.parametrize("limit", [1, 2, 5, 48, 257, 512, 2048])
def test_the_plan_of_lengths_reaches_the_limit_alone_and_in_company(limit):
    alone, few, many = batches(limit)
    assert (len(alone), len(few), len(many)) == (1, 3, 8)
    assert alone == [limit] == [max(few)]
    assert min(few) == 1
    assert all(1 <= length <= limit for length in many)
    if limit > 500:
        assert few == [limit, 1, 500]
        assert max(many) > 256
