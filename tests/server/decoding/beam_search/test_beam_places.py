"""How the places of a search are shared out among the banks of required phrases."""

import random

import pytest

from headway_server.decoding.beam_search.search import share_beams


@pytest.mark.parametrize(
    ("num_beams", "sizes", "shares"),
    [
        (4, [9], [4]),
        (6, [9, 9, 9], [2, 2, 2]),
        (8, [9, 9, 9], [2, 2, 4]),  # what is left over goes to the fullest
        (8, [9, 9, 1], [2, 5, 1]),  # what a bank cannot fill goes to the next lower one
        (8, [1, 9, 2], [1, 5, 2]),
        (8, [1, 9, 0], [1, 7, 0]),
        (2, [9, 9, 9, 0], [0, 0, 2, 0]),  # fewer places than banks: the fullest that there are
        (5, [2, 0, 0], [2, 0, 0]),
    ],
)
def test_beams_are_shared_out_evenly_the_fullest_bank_first(num_beams, sizes, shares):
    assert share_beams(num_beams, sizes) == shares


def test_no_place_stays_empty_while_there_is_a_continuation():
    rng = random.Random(4)
    for _ in range(500):
        sizes = [rng.randrange(6) for _ in range(rng.randint(1, 7))]
        num_beams = rng.randint(1, 16)
        shares = share_beams(num_beams, sizes)
        assert sum(shares) == min(num_beams, sum(sizes))
        assert all(share <= size for share, size in zip(shares, sizes, strict=True))
