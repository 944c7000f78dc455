"""Log-probabilities against log softmax in float64."""

import numpy as np
import pytest
from sampler_rows import make_sampler, pack, restrict

from headway_server.decoding.interfaces import Ranking
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sampling.softmax import token_log_probabilities


def exact(logits):
    """Returns log softmax (R, V)."""
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=1, keepdims=True))


def likeliest(row, count):
    return np.argsort(-row, kind="stable")[:count].tolist()


def test_log_probabilities_are_the_models_own():
    logits = (np.random.default_rng(4).normal(size=(6, 777)) * 4).astype(np.float32)
    parameters = [
        SamplingParameters(max_new_tokens=1, temperature=t, top_k=k, seed=5, logit_biases=((3, 2.0),))
        for t in (0, 0.5)
        for k in (0, 3, 9)
    ]
    sampler = make_sampler(parameters, 777, with_log_probabilities=True)
    restrict(sampler, 4, pack(np.arange(777) < 50))
    sampled = sampler.sample(logits)
    assert sampled.log_probabilities == pytest.approx(exact(logits)[np.arange(6), sampled.token_ids], abs=1e-6)
    assert sampled.top_tokens == {}


def test_rows_that_ask_get_theirs_and_the_likeliest():
    logits = (np.random.default_rng(4).normal(size=(5, 300)) * 2).astype(np.float32)
    parameters = [
        SamplingParameters(max_new_tokens=1, temperature=1.0, seed=s, num_top_tokens=n)
        for s, n in enumerate([None, 0, 3, None, 20])
    ]
    sampled = make_sampler(parameters, 300).sample(logits)
    wanted = exact(logits)
    assert sampled.log_probabilities[[0, 3]].tolist() == [0, 0]
    for row in (1, 2, 4):
        assert sampled.log_probabilities[row] == pytest.approx(wanted[row, sampled.token_ids[row]], abs=1e-6)
    assert set(sampled.top_tokens) == {2, 4}
    for row, count in ((2, 3), (4, 20)):
        ids, values = zip(*sampled.top_tokens[row], strict=True)
        assert list(ids) == likeliest(logits[row], count)
        assert values == pytest.approx(wanted[row, list(ids)], abs=1e-6)


def test_a_chosen_tokens_log_probability_is_the_same_as_among_the_likeliest():
    logits = np.random.default_rng(5).normal(size=(4, 4000)).astype(np.float32)
    sampled = make_sampler([SamplingParameters(max_new_tokens=1, num_top_tokens=2)] * 4, 4000).sample(logits)
    for row in range(4):
        assert sampled.top_tokens[row][0] == (sampled.token_ids[row], sampled.log_probabilities[row])


def test_given_tokens_have_theirs_wherever_they_rank_and_whatever_may_follow():
    logits = (np.random.default_rng(6).normal(size=(3, 300)) * 2).astype(np.float32)
    scored_ids = (7, 299, 3)
    parameters = [
        SamplingParameters(max_new_tokens=1, num_top_tokens=count, scored_token_ids=ids)
        for count, ids in ((0, scored_ids), (2, scored_ids), (2, ()))
    ]
    sampler = make_sampler([SamplingParameters(max_new_tokens=1), *parameters], 300)
    sampler.masks.slots.move(3, 0)
    restrict(sampler, 1, pack(np.arange(300) == 5))
    sampled = sampler.sample(logits, np.array([1, 2, 0]))
    wanted = exact(logits)
    assert [token for token, _ in sampled.top_tokens[0]] == [*scored_ids]
    assert [token for token, _ in sampled.top_tokens[1]] == [*likeliest(logits[1], 2), *scored_ids]
    assert [token for token, _ in sampled.top_tokens[2]] == likeliest(logits[2], 2)
    for row in range(2):
        values = [value for _, value in sampled.top_tokens[row][-3:]]
        assert values == pytest.approx(wanted[row, list(scored_ids)], abs=1e-6)


def test_no_more_of_the_likeliest_than_there_are_tokens():
    logits = np.array([[1, 3, 2]], np.float32)
    sampled = make_sampler([SamplingParameters(max_new_tokens=1, num_top_tokens=20)], 3).sample(logits)
    assert [token for token, _ in sampled.top_tokens[0]] == [1, 2, 0]


@pytest.mark.parametrize(("num_tokens", "vocab_size"), [(1, 5), (40, 300), (70, 30011)])
@pytest.mark.parametrize("num_top", [0, 4])
def test_tokens_of_a_prompt_have_theirs(num_tokens, vocab_size, num_top):
    rng = np.random.default_rng(num_tokens)
    logits = (rng.normal(size=(num_tokens, vocab_size)) * 3).astype(np.float32)
    token_ids = rng.integers(vocab_size, size=num_tokens)
    log_probabilities, top_tokens = token_log_probabilities(logits, token_ids, num_top)
    wanted = exact(logits)
    assert log_probabilities == pytest.approx(wanted[np.arange(num_tokens), token_ids], abs=1e-5)
    assert len(top_tokens) == num_tokens
    for row in range(num_tokens):
        assert [token for token, _ in top_tokens[row]] == likeliest(logits[row], num_top)
        assert [value for _, value in top_tokens[row]] == pytest.approx(
            wanted[row, likeliest(logits[row], num_top)], abs=1e-5
        )


def test_a_prompt_of_one_token_has_none_to_say():
    log_probabilities, top_tokens = token_log_probabilities(np.zeros((0, 9), np.float32), np.zeros(0, np.int64), 3)
    assert log_probabilities.shape == (0,)
    assert top_tokens == []


def test_rows_that_are_not_finite_have_no_log_probabilities():
    logits = np.random.default_rng(6).normal(size=(4, 50)).astype(np.float32)
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    log_probabilities, top_tokens = token_log_probabilities(logits, np.zeros(4, np.int64), 2)
    assert np.isfinite(log_probabilities).tolist() == [True, False, False, True]
    assert [len(row) for row in top_tokens] == [2, 0, 0, 2]
    parameters = [SamplingParameters(max_new_tokens=1, num_top_tokens=2)] * 4
    sampled = make_sampler(parameters, 50).sample(logits)
    assert set(sampled.top_tokens) == {0, 3}
    assert sampled.is_valid.tolist() == [True, False, False, True]


@pytest.mark.parametrize("suppressed_ids", [(), (299,), (5, 17)])
def test_logits_that_were_ranked_already_give_the_same_tokens_and_log_probabilities(suppressed_ids):
    rng = np.random.default_rng(9)
    logits = np.round(rng.normal(size=(6, 300)) * 3).astype(np.float32)  # many equal ones
    logits[:, 299] = -9
    logits[2, 17] = 99
    order = np.argsort(-logits, axis=1, kind="stable")[:, :1]
    ranking = Ranking(order, np.take_along_axis(logits, order, axis=1), logits[:, 0] - exact(logits)[:, 0])
    greedy = SamplingParameters(max_new_tokens=1)
    drawn = SamplingParameters(max_new_tokens=1, temperature=1.0, seed=3)
    biased = SamplingParameters(max_new_tokens=1, logit_biases=((3, 20.0),), num_top_tokens=2)
    for parameters, is_masked in ([greedy] * 6, False), ([greedy] * 6, True), ([greedy, drawn, biased] * 2, True):
        plain, ranked = (
            make_sampler(parameters, 300, with_log_probabilities=True, suppressed_ids=suppressed_ids) for _ in range(2)
        )
        for sampler in (plain, ranked) if is_masked else ():
            restrict(sampler, 0, pack(np.arange(300) < 40))
        expected, found = plain.sample(logits), ranked.sample(logits, ranking=ranking)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.is_valid.all()
        assert found.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-6)
        assert found.top_tokens.keys() == expected.top_tokens.keys()


def test_greedy_tokens_are_taken_of_a_ranking_in_which_no_suppressed_token_is():
    logits = np.random.default_rng(9).normal(size=(6, 300)).astype(np.float32)
    logits[:, 7] = -9
    best = logits.argmax(axis=1, keepdims=True)
    ranking = Ranking(best, np.take_along_axis(logits, best, axis=1), np.zeros(6))
    greedy = [SamplingParameters(max_new_tokens=1)] * 6
    sampler = make_sampler(greedy, 300, with_log_probabilities=True, suppressed_ids=(7,))
    never_read = np.full_like(logits, np.nan)
    found = sampler.sample(never_read, ranking=ranking)
    assert found.token_ids.tolist() == best[:, 0].tolist()
    assert found.is_valid.all()
