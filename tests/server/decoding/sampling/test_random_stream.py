"""Random numbers by counter."""

import numpy as np
from scipy import stats

from headway_server.decoding.sampling.draws import stream_states, uniform


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
