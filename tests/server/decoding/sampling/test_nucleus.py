"""Draws from weights by falling size, however much padding follows them."""

import numpy as np
import pytest

from headway_server.decoding.sampling.draws import Nucleus


def falling_weights(rng, count):
    weights = np.sort(np.exp(rng.normal(size=count) * 3).astype(np.float32))[::-1]
    return weights / weights[0]


@pytest.mark.parametrize("count", [1, 40, 256, 700, 5000])
@pytest.mark.parametrize("spare", [1, 216, 1000])
def test_a_row_does_not_depend_on_the_padding_that_follows_it(count, spare):
    rng = np.random.default_rng(count * spare)
    weights = np.stack([falling_weights(rng, count) for _ in range(9)])
    padded = np.concatenate([weights, np.zeros((9, spare), np.float32)], axis=1)
    for top_p, min_p in ((1.0, 0.0), (0.9, 0.0), (np.nextafter(1, 0), 0.0), (1.0, 0.01), (0.7, 0.001)):
        nucleus = Nucleus(
            top_p=np.full(9, top_p), min_p=np.full(9, min_p, np.float32), numbers=np.append(rng.random(8), 1 - 2**-53)
        )
        columns = nucleus.draw(weights)
        assert columns.tolist() == nucleus.draw(padded).tolist()
        for row in range(9):
            assert nucleus.take(np.array([row])).draw(weights[row : row + 1])[0] == columns[row]


def test_the_largest_number_draws_a_token_that_has_a_weight():
    weights = np.zeros((1, 600), np.float32)
    weights[0, :3] = [1, 1e-30, 1e-40]
    nucleus = Nucleus(top_p=np.ones(1), min_p=np.zeros(1, np.float32), numbers=np.array([1 - 2**-53]))
    assert nucleus.draw(weights)[0] <= 1


def test_every_kept_column_is_drawn_in_its_turn():
    weights = falling_weights(np.random.default_rng(2), 600)
    exact = np.cumsum(weights.astype(np.float64))
    numbers = (exact - weights / 2) / exact[-1]  # the middle of each column's share
    n = len(numbers)
    nucleus = Nucleus(top_p=np.ones(n), min_p=np.zeros(n, np.float32), numbers=numbers)
    assert nucleus.draw(np.repeat(weights[np.newaxis], n, axis=0)).tolist() == list(range(n))
