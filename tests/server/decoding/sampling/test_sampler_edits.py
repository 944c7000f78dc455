"""Biases, penalties, masks and the shortest text, one at a time."""

import numpy as np
import pytest
from sampler_rows import make_sampler, new_sampler, pack, restrict

from headway_server.decoding.parameters import SamplingParameters


def greedy(logits, *, num_steps=1, prompt_ids=None, **parameters):
    """Returns the tokens that one greedy row chooses from the same logits again and again."""
    logits = np.array([logits], np.float32)
    sampler = new_sampler(1, logits.shape[1])
    prompt = None if prompt_ids is None else np.array(prompt_ids)
    sampler.assign(0, SamplingParameters(max_new_tokens=99, **parameters), prompt_ids=prompt)
    return [int(sampler.sample(logits).token_ids[0]) for _ in range(num_steps)]


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones():
    assert greedy([3, 2, -5], prompt_ids=[0], repetition_penalty=1.4) == [0]
    assert greedy([3, 2, -5], prompt_ids=[0], repetition_penalty=1.6) == [1]
    assert greedy([-1, -1.5, -5], prompt_ids=[0, 0], repetition_penalty=1.4) == [0]
    assert greedy([-1, -1.5, -5], prompt_ids=[0, 0], repetition_penalty=1.6) == [1]
    assert greedy([3, 2, -5], prompt_ids=[1], repetition_penalty=0.5) == [1]


def test_a_repetition_penalty_counts_a_token_of_prompt_and_text_once():
    assert greedy([4, 3, -9], prompt_ids=[0], repetition_penalty=1.3, num_steps=4) == [0, 0, 0, 0]
    assert greedy([4, 3, -9], repetition_penalty=1.5, num_steps=4) == [0, 1, 0, 0]


def test_a_presence_penalty_is_for_the_text_alone_and_once():
    assert greedy([4, 3, 2.5], prompt_ids=[0, 0], presence_penalty=1.2, num_steps=4) == [0, 1, 0, 0]


def test_a_frequency_penalty_grows_with_every_time():
    assert greedy([4, 3, -9], prompt_ids=[0, 0, 0], frequency_penalty=0.4, num_steps=6) == [0, 0, 0, 1, 0, 1]


def test_biases_demand_and_forbid():
    assert greedy([4, 3, 2], logit_biases=((2, 100.0),), num_steps=2) == [2, 2]
    assert greedy([4, 3, 2], logit_biases=((0, -100.0), (1, -100.0))) == [2]


def test_biases_come_before_penalties():
    # 2 + 3 = 5 is divided by 2; were it 2 / 2 + 3 = 4, it would win.
    assert greedy([3, 2, -9], prompt_ids=[1], repetition_penalty=2.0, logit_biases=((1, 3.0),)) == [0]


def test_many_different_tokens_are_remembered():
    logits = np.arange(1000, 0, -1)
    assert greedy(logits, presence_penalty=2000.0, num_steps=1000) == list(range(1000))


def test_penalties_move_with_their_slot_and_end_with_it():
    logits = np.array([[5, 4, 3]], np.float32)
    sampler = new_sampler(2, 3)
    sampler.assign(1, SamplingParameters(max_new_tokens=9, presence_penalty=1.5))
    assert sampler.sample(logits, np.array([1])).token_ids[0] == 0
    sampler.masks.slots.move(1, 0)
    sampler.masks.slots.move(0, 0)
    assert sampler.sample(logits, np.array([0])).token_ids[0] == 1
    sampler.assign(0, SamplingParameters(max_new_tokens=9, presence_penalty=1.5))
    assert sampler.sample(logits, np.array([0])).token_ids[0] == 0


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_a_mask_with_one_token_leaves_that_one(vocab_size):
    logits = np.random.default_rng(vocab_size).normal(size=(5, vocab_size)).astype(np.float32)
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 7, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.5)]
    parameters = [
        SamplingParameters(max_new_tokens=9, temperature=t, top_k=k, top_p=p, min_p=m, seed=1)
        for t, k, p, m in settings
    ]
    sampler = make_sampler(parameters, vocab_size)
    for token in {0, vocab_size // 2, vocab_size - 1}:
        for slot in range(5):
            restrict(sampler, slot, pack(np.arange(vocab_size) == token))
        sampled = sampler.sample(logits)
        assert sampled.token_ids.tolist() == [token] * 5
        assert sampled.is_valid.all()


def test_a_mask_holds_for_one_draw():
    logits = np.array([[1, 2, 3]], np.float32)
    sampler = make_sampler([SamplingParameters(max_new_tokens=9)], 3)
    for _ in range(2):
        restrict(sampler, 0, np.array([0b001], np.int32))
        assert sampler.sample(logits).token_ids[0] == 0
        assert sampler.sample(logits).token_ids[0] == 2
    restrict(sampler, 0, np.array([0b001], np.int32))
    sampler.masks.clear(0)
    assert sampler.sample(logits).token_ids[0] == 2


def test_a_mask_of_the_slots_last_sequence_is_forgotten():
    sampler = make_sampler([SamplingParameters(max_new_tokens=9)], 3)
    restrict(sampler, 0, np.array([0b001], np.int32))
    sampler.assign(0, SamplingParameters(max_new_tokens=9))
    assert sampler.sample(np.array([[1, 2, 3]], np.float32)).token_ids[0] == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_row_with_nothing_to_choose_is_marked_and_leaves_its_neighbours_alone(temperature, top_k):
    parameters = [SamplingParameters(max_new_tokens=9, temperature=temperature, top_k=top_k, seed=s) for s in range(5)]
    logits = np.random.default_rng(3).normal(size=(5, 40)).astype(np.float32)
    whole = make_sampler(parameters, 40).sample(logits)
    logits[2, :10] = -np.inf
    logits[3, 20] = np.nan
    sampler = make_sampler(parameters, 40)
    restrict(sampler, 1, pack(np.zeros(40, np.bool_)))
    restrict(sampler, 2, pack(np.arange(40) < 10))  # what is allowed, the model has forbidden
    restrict(sampler, 3, pack(np.arange(40) < 10))  # what is allowed is finite, the row is not
    sampled = sampler.sample(logits)
    assert sampled.is_valid.tolist() == [True, False, False, False, True]
    assert sampled.token_ids[[0, 4]].tolist() == whole.token_ids[[0, 4]].tolist()


def test_bits_past_the_vocabulary_mean_nothing():
    sampler = make_sampler([SamplingParameters(max_new_tokens=9)], 33)
    restrict(sampler, 0, np.array([0, -2], np.int32))  # all but token 32, and there are 33
    assert not sampler.sample(np.ones((1, 33), np.float32)).is_valid[0]


def test_a_mask_has_a_bit_for_every_token():
    mask = new_sampler(3, 65).masks.begin(2)
    assert mask.shape == (3,)
    assert mask.dtype == np.int32


def test_a_bias_may_not_make_a_row_infinite_without_a_word():
    logits = np.array([[3e38, 1], [1, 2]], np.float32)
    sampler = make_sampler([SamplingParameters(max_new_tokens=9, repetition_penalty=0.01)] * 2, 2)
    for slot in range(2):
        sampler.assign(slot, SamplingParameters(max_new_tokens=9, repetition_penalty=0.01), prompt_ids=np.array([0]))
    assert sampler.sample(logits).is_valid.tolist() == [False, True]


def test_suppressed_tokens_are_never_chosen_and_count_in_log_probabilities():
    logits = np.array([[1.0, 4.0, 2.0], [0.0, 3.0, 1.0]], np.float32)
    sampler = new_sampler(2, 3, with_log_probabilities=True, suppressed_ids=(1,))
    sampler.assign(0, SamplingParameters(max_new_tokens=9))
    sampler.assign(1, SamplingParameters(max_new_tokens=9, temperature=2.0, seed=1))
    normalizers = np.log(np.exp(logits).sum(axis=1))
    for _ in range(20):
        sampled = sampler.sample(logits)
        assert sampled.token_ids[0] == 2
        assert sampled.token_ids[1] != 1
        expected = logits[[0, 1], sampled.token_ids] - normalizers
        np.testing.assert_allclose(sampled.log_probabilities, expected, rtol=1e-6)
