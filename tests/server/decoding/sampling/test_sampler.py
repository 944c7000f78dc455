"""The sampler against a naive one and against itself in other company, and its extremes."""

import numpy as np
import pytest
from naive_decoding import naive_token
from sampler_rows import make_parameters, make_sampler

from headway_server.decoding.parameters import SamplingParameters

VOCAB_SIZES = [5, 65, 256, 1000, 5003]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_mixed_batch_equals_the_naive_sampler_row_by_row(vocab_size):
    rng = np.random.default_rng(vocab_size)
    parameters = [make_parameters(rng, vocab_size, with_edits=False) for _ in range(24)]
    sampler = make_sampler(parameters, vocab_size)
    for step in range(4):
        logits = (rng.normal(size=(24, vocab_size)) * 3).astype(np.float32)
        expected = [naive_token(row, one, step) for row, one in zip(logits, parameters, strict=True)]
        assert sampler.sample(logits).token_ids.tolist() == expected


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_row_chooses_the_same_alone_and_in_a_batch(vocab_size):
    rng = np.random.default_rng(vocab_size + 1)
    parameters = [make_parameters(rng, vocab_size, with_edits=False) for _ in range(16)]
    logits = (rng.normal(size=(16, vocab_size)) * 3).astype(np.float32)
    together = make_sampler(parameters, vocab_size, with_log_probabilities=True).sample(logits)
    for row, one in enumerate(parameters):
        alone = make_sampler([one], vocab_size, with_log_probabilities=True).sample(logits[row : row + 1])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.log_probabilities[0] == together.log_probabilities[row]


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.array([[0, 3, 3, 1, 3]], np.float32)
    assert make_sampler([SamplingParameters(max_new_tokens=1)], 5).sample(logits).token_ids[0] == 1


def test_logits_are_left_as_they_are():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    before = logits.copy()
    parameters = [
        SamplingParameters(max_new_tokens=1, temperature=1.0, top_p=p, top_k=k) for p, k in [(1, 0), (0.5, 9), (0.5, 0)]
    ]
    make_sampler(parameters, 50, with_log_probabilities=True).sample(logits)
    assert np.array_equal(logits, before)


def test_a_row_that_is_not_finite_is_marked_and_leaves_its_neighbours_alone():
    logits = np.random.default_rng(5).normal(size=(4, 600)).astype(np.float32)
    parameters = [SamplingParameters(max_new_tokens=1, temperature=1.0, top_k=4, seed=i) for i in range(4)]
    whole = make_sampler(parameters, 600, with_log_probabilities=True).sample(logits)
    logits[1, 17] = np.nan
    logits[2] = -np.inf
    broken = make_sampler(parameters, 600, with_log_probabilities=True).sample(logits)
    assert broken.is_valid.tolist() == [True, False, False, True]
    assert broken.token_ids[[0, 3]].tolist() == whole.token_ids[[0, 3]].tolist()
    assert broken.log_probabilities[[0, 3]].tolist() == whole.log_probabilities[[0, 3]].tolist()


def test_a_tiny_temperature_is_greedy():
    logits = np.random.default_rng(6).normal(size=(2, 300)).astype(np.float32)
    parameters = [SamplingParameters(max_new_tokens=1, temperature=1e-38, top_k=k, seed=1) for k in (0, 5)]
    assert make_sampler(parameters, 300).sample(logits).token_ids.tolist() == logits.argmax(axis=1).tolist()


def test_masked_tokens_are_never_drawn():
    logits = np.full((200, 400), -np.inf, np.float32)
    logits[:, [3, 399]] = 1.0
    parameters = [
        SamplingParameters(max_new_tokens=1, temperature=2.0, top_k=k, seed=s) for s in range(100) for k in (0, 50)
    ]
    assert set(make_sampler(parameters, 400).sample(logits).token_ids.tolist()) == {3, 399}


def test_a_moved_slot_goes_on_with_its_own_stream():
    logits = np.random.default_rng(7).normal(size=(3, 500)).astype(np.float32)
    parameters = [SamplingParameters(max_new_tokens=1, temperature=1.0, seed=s) for s in range(3)]
    staying, moving = make_sampler(parameters, 500), make_sampler(parameters, 500)
    staying.sample(logits)
    moving.sample(logits)
    moving.masks.slots.move(2, 0)
    assert moving.sample(logits[2:]).token_ids[0] == staying.sample(logits).token_ids[2]


@pytest.mark.parametrize(
    "restriction", [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.5, "min_p": 1.0}]
)
@pytest.mark.parametrize("vocab_size", [7, 700, 20011])
def test_one_finite_logit_is_chosen_and_a_tiny_temperature_is_greedy(restriction, vocab_size):
    parameters = [
        SamplingParameters(max_new_tokens=1, temperature=t, seed=s, **restriction)
        for s in range(2)
        for t in (1e-6, 1.0)
    ]
    logits = np.full((4, vocab_size), -np.inf, np.float32)
    logits[:, vocab_size - 2] = [-1e30, 5, 0, 3e38]
    assert make_sampler(parameters, vocab_size).sample(logits).token_ids.tolist() == [vocab_size - 2] * 4
    logits = np.random.default_rng(6).normal(size=(4, vocab_size)).astype(np.float32)
    token_ids = make_sampler(parameters, vocab_size).sample(logits).token_ids
    assert token_ids[::2].tolist() == logits[::2].argmax(axis=1).tolist()


@pytest.mark.parametrize("restriction", [{}, {"top_k": 9}, {"top_p": 0.999999}, {"min_p": 1.0}])
def test_equal_logits_are_drawn_alike_over_the_whole_vocabulary(restriction):
    parameters = [SamplingParameters(max_new_tokens=1, temperature=1.0, seed=s, **restriction) for s in range(300)]
    token_ids = make_sampler(parameters, 3000).sample(np.zeros((300, 3000), np.float32)).token_ids
    assert token_ids.max() < (9 if "top_k" in restriction else 3000)
    assert len(set(token_ids.tolist())) > (5 if "top_k" in restriction else 250)


def test_min_p_is_a_share_of_the_likeliest_after_temperature():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)).repeat(400, axis=0)
    for temperature, kept in ((1.0, {0, 1}), (2.0, {0, 1, 2})):  # 0.3 and 0.15 of 0.5, and the roots of these
        parameters = [
            SamplingParameters(max_new_tokens=1, temperature=temperature, min_p=0.4, seed=s) for s in range(400)
        ]
        assert set(make_sampler(parameters, 4).sample(logits).token_ids.tolist()) == kept
