"""Random numbers by counter."""

import numpy as np
from scipy import stats

from headway_server.decoding.sampling.draws import further, stream_states, uniform


def test_random_numbers_are_uniform_and_streams_independent():
    seeds = np.arange(200, dtype=np.uint64)
    states = stream_states(seeds, np.zeros(200, np.uint64))
    steps = np.arange(100, dtype=np.uint64)
    numbers = np.stack([uniform(states, np.full(200, step, np.uint64)) for step in steps])
    check_streams(numbers)
    other = uniform(stream_states(seeds, np.ones(200, np.uint64)), np.zeros(200, np.uint64))
    assert not np.isin(other, numbers).any()


def test_further_numbers_of_a_step_are_uniform_and_independent_of_the_first():
    first = uniform(stream_states(np.arange(200, dtype=np.uint64), np.zeros(200, np.uint64)), np.zeros(200, np.uint64))
    check_streams(np.stack([first, *(further(first, trial) for trial in range(1, 100))]))
    low = np.sort(first)[:100]  # as where a first number is known to be low
    assert stats.kstest(np.concatenate([further(low, trial) for trial in (1, 2)]), "uniform").pvalue > 0.01


def check_streams(numbers):
    """Checks numbers (steps, streams)."""
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 0.01
    assert np.unique(numbers).size == numbers.size
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.3
    assert abs(np.corrcoef(numbers[0], numbers[1])[0, 1]) < 0.3
