"""Draws from weights by falling size, however many places without a weight follow."""

import numpy as np
import pytest

from headway_server.decoding.sampling.draws import FallingWeights, Restriction


def falling_weights(rng, count):
    weights = np.sort(np.exp(rng.normal(size=count) * 3).astype(np.float32))[::-1]
    return weights / weights[0]


@pytest.mark.parametrize("count", [1, 40, 255, 256, 257, 700, 5000])
@pytest.mark.parametrize("spare", [1, 216, 1000])
def test_a_row_does_not_depend_on_the_places_that_follow_it_by_a_single_bit(count, spare):
    rng = np.random.default_rng(count * spare)
    weights = np.stack([falling_weights(rng, count) for _ in range(9)])
    padded = np.concatenate([weights, np.zeros((9, spare), np.float32)], axis=1)
    alone, among = FallingWeights(weights), FallingWeights(padded)
    assert alone.totals.tobytes() == among.totals.tobytes()
    for top_p, min_p in ((1.0, 0.0), (0.9, 0.0), (np.nextafter(1, 0), 0.0), (1.0, 0.01), (0.7, 0.001)):
        restriction = Restriction(
            top_p=np.full(9, top_p), min_p=np.full(9, min_p, np.float32), numbers=np.append(rng.random(8), 1 - 2**-53)
        )
        places = alone.draw(restriction, alone.totals)
        assert places.tolist() == among.draw(restriction, among.totals).tolist()
        for row in range(9):
            one = FallingWeights(weights[row : row + 1])
            assert one.totals[0] == alone.totals[row]
            assert one.draw(restriction.take(np.array([row])), one.totals)[0] == places[row]


def test_the_largest_number_draws_a_token_that_has_a_weight():
    weights = np.zeros((1, 600), np.float32)
    weights[0, :3] = [1, 1e-30, 1e-40]
    restriction = Restriction(top_p=np.ones(1), min_p=np.zeros(1, np.float32), numbers=np.array([1 - 2**-53]))
    sums = FallingWeights(weights)
    assert sums.draw(restriction, sums.totals)[0] <= 1


def test_every_kept_place_is_drawn_in_its_turn():
    weights = falling_weights(np.random.default_rng(2), 600)
    exact = np.cumsum(weights.astype(np.float64))
    numbers = (exact - weights / 2) / exact[-1]  # the middle of each place's share
    n = len(numbers)
    restriction = Restriction(top_p=np.ones(n), min_p=np.zeros(n, np.float32), numbers=numbers)
    sums = FallingWeights(np.repeat(weights[np.newaxis], n, axis=0))
    assert sums.draw(restriction, sums.totals).tolist() == list(range(n))
