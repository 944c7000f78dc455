"""Masks of slots, token by token."""

import numpy as np
import pytest
from sampler_rows import pack

from headway_server.decoding.rules import forbid, mask_of, unpack
from headway_server.decoding.sampling.masks import TokenMasks
from headway_server.decoding.slots import Slots


@pytest.mark.parametrize("share", [0.0, 0.0002, 0.02, 0.5, 0.9998, 1.0])
@pytest.mark.parametrize("suppressed_ids", [(), (0, 77, 5002)])
@pytest.mark.parametrize("vocab_size", [5003, 5024])
def test_masks_hold_for_their_rows_token_by_token(share, suppressed_ids, vocab_size):
    rng = np.random.default_rng(3)
    masks = TokenMasks(Slots(7), vocab_size=vocab_size, suppressed_ids=suppressed_ids)
    may_follow = np.ones((7, vocab_size), np.bool_)
    for slot in (1, 2, 5):
        may_follow[slot] = rng.random(vocab_size) < share
        mask = masks.begin(slot)
        mask &= pack(may_follow[slot])
    may_follow[:, [*suppressed_ids]] = False
    slots, rows = np.array([5, 2, 0, 1]), np.array([0, 3, 4, 2])
    logits = rng.normal(size=(6, vocab_size)).astype(np.float32)
    expected = logits.copy()
    for slot, row in zip(slots, rows, strict=True):
        expected[row][~may_follow[slot]] = -np.inf
    masks.apply(slots, rows, logits)
    np.testing.assert_array_equal(logits, expected)
    token_ids = rng.integers(vocab_size, size=(4, 50))
    np.testing.assert_array_equal(masks.allows(slots, token_ids), np.take_along_axis(may_follow[slots], token_ids, 1))
    np.testing.assert_array_equal(masks.allows(slots, token_ids[:, 0]), may_follow[slots, token_ids[:, 0]])
    few = [masks.few(slot) for slot in range(7)]
    assert all(
        found is None or found.tolist() == np.flatnonzero(may_follow[slot]).tolist() for slot, found in enumerate(few)
    )
    assert [found is not None for found in few] == [slot in (1, 2, 5) and share <= 0.0002 for slot in range(7)]
    masks.clear(np.arange(7))
    assert masks.allows(slots, np.full(4, 5001)).all()
    assert masks.restricts.tolist() == [bool(suppressed_ids)] * 7


def test_bits_are_set_and_cleared_by_token():
    mask = mask_of((0, 31, 32, 63, 63), 3)
    assert np.flatnonzero(unpack(mask)).tolist() == [0, 31, 32, 63]
    forbid(mask, {31, 32, 95})
    assert np.flatnonzero(unpack(mask)).tolist() == [0, 63]
    assert pack(unpack(mask)).tolist() == mask.tolist()


def test_what_is_kept_of_a_slot_moves_as_one():
    slots = Slots(4)
    masks, numbers, names = TokenMasks(slots, vocab_size=40), slots.array(np.float32, 0.5, shape=(2,)), slots.objects()
    numbers[3], names[3] = (1, 2), "three"
    forbid(masks.begin(3), {7})
    slots.move(3, 1)
    assert numbers.tolist() == [[0.5, 0.5], [1, 2], [0.5, 0.5], [1, 2]]
    assert names == [None, "three", None, "three"]
    assert masks.allows(np.array([1, 1, 2]), np.array([7, 8, 7])).tolist() == [False, True, True]
