"""The sampler against a naive one, against its distribution, and against itself in other company."""

import numpy as np
import pytest
from naive_decoding import naive_token
from scipy import stats

from headway_server.engine.candidates import top_candidates
from headway_server.engine.random_stream import stream_states, uniform
from headway_server.engine.sampler import Sampler
from headway_server.engine.sequence import SamplingParameters

VOCAB_SIZES = [5, 65, 256, 1000, 5003]


def make_parameters(rng: np.random.Generator, vocab_size: int) -> SamplingParameters:
    return SamplingParameters(
        max_new_tokens=10,
        temperature=float(rng.choice([0.0, 0.3, 0.8, 1.0, 2.0])),
        top_k=int(rng.choice([0, 0, 1, 2, min(40, vocab_size), vocab_size])),
        top_p=float(rng.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.999])),
        seed=int(rng.integers(2**63)),
        sample=int(rng.integers(3)),
    )


def make_sampler(parameters: list[SamplingParameters], vocab_size: int, **options: bool) -> Sampler:
    sampler = Sampler(num_slots=len(parameters), vocab_size=vocab_size, **options)
    for slot, one in enumerate(parameters):
        sampler.assign(slot, one)
    return sampler


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_mixed_batch_equals_the_naive_sampler_row_by_row(vocab_size):
    rng = np.random.default_rng(vocab_size)
    parameters = [make_parameters(rng, vocab_size) for _ in range(24)]
    sampler = make_sampler(parameters, vocab_size)
    for step in range(4):
        logits = (rng.normal(size=(24, vocab_size)) * 3).astype(np.float32)
        expected = [naive_token(row, one, step) for row, one in zip(logits, parameters, strict=True)]
        assert sampler.sample(logits).token_ids.tolist() == expected


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_row_chooses_the_same_alone_and_in_a_batch(vocab_size):
    rng = np.random.default_rng(vocab_size + 1)
    parameters = [make_parameters(rng, vocab_size) for _ in range(16)]
    logits = (rng.normal(size=(16, vocab_size)) * 3).astype(np.float32)
    together = make_sampler(parameters, vocab_size, with_log_probabilities=True).sample(logits)
    for row, one in enumerate(parameters):
        alone = make_sampler([one], vocab_size, with_log_probabilities=True).sample(logits[row : row + 1])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.log_probabilities[0] == together.log_probabilities[row]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 12, 1.0), (1.0, 0, 0.8), (1.3, 20, 0.9), (1.0, 0, 0.999)],
)
def test_tokens_follow_their_distribution(temperature, top_k, top_p):
    vocab_size, num_rows, num_steps = 700, 500, 40
    row = (np.random.default_rng(3).normal(size=vocab_size) * 2).astype(np.float32)
    parameters = [
        SamplingParameters(max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=11, sample=i)
        for i in range(num_rows)
    ]
    sampler = make_sampler(parameters, vocab_size)
    logits = np.repeat(row[np.newaxis], num_rows, axis=0)
    counts = np.zeros(vocab_size, np.int64)
    for _ in range(num_steps):
        counts += np.bincount(sampler.sample(logits).token_ids, minlength=vocab_size)
    expected = distribution(row, temperature, top_k, top_p) * num_rows * num_steps
    assert counts[expected == 0].sum() == 0
    frequent = expected >= 5
    observed = np.append(counts[frequent], counts[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum())
    keep = wanted > 0
    assert stats.chisquare(observed[keep], wanted[keep]).pvalue > 0.001


def distribution(row, temperature, top_k, top_p):
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    order = np.argsort(-row, kind="stable")[: top_k or None]
    probabilities = weights[order] / weights[order].sum()
    before = np.cumsum(probabilities) - probabilities
    kept = order[before < top_p]
    result = np.zeros_like(weights)
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.array([[0, 3, 3, 1, 3]], np.float32)
    assert make_sampler([SamplingParameters(max_new_tokens=1)], 5).sample(logits).token_ids[0] == 1


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


def test_logits_are_left_as_they_are():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    before = logits.copy()
    parameters = [
        SamplingParameters(max_new_tokens=1, temperature=1.0, top_p=p, top_k=k) for p, k in [(1, 0), (0.5, 9), (0.5, 0)]
    ]
    make_sampler(parameters, 50, with_log_probabilities=True).sample(logits)
    assert np.array_equal(logits, before)


def test_log_probabilities_are_the_models_own():
    logits = (np.random.default_rng(4).normal(size=(6, 777)) * 4).astype(np.float32)
    parameters = [
        SamplingParameters(max_new_tokens=1, temperature=t, top_k=k, seed=5) for t in (0, 0.5) for k in (0, 3, 9)
    ]
    sampled = make_sampler(parameters, 777, with_log_probabilities=True).sample(logits)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert sampled.log_probabilities == pytest.approx(exact[np.arange(6), sampled.token_ids], abs=1e-5)


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
    moving.move(2, 0)
    assert moving.sample(logits[2:]).token_ids[0] == staying.sample(logits).token_ids[2]


def test_random_numbers_are_uniform_and_streams_independent():
    seeds = np.arange(200, dtype=np.uint64)
    states = stream_states(seeds, np.zeros(200, np.uint64))
    steps = np.arange(100, dtype=np.uint64)
    numbers = np.stack([uniform(states, np.full(200, step, np.uint64)) for step in steps])
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 0.01
    assert np.unique(numbers).size == numbers.size
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.3
    other = uniform(stream_states(seeds, np.ones(200, np.uint64)), np.zeros(200, np.uint64))
    assert not np.isin(other, numbers).any()
