"""The order of examples: every one once an epoch, within the bound, and the same for the same seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_training.batches import bucketed_batches, count_bucketed, even_batches, sorted_batches
from headway_training.tasks import TrainingBatch

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=300)


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, batch_tokens=st.integers(1, 400), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_buckets_cover_every_example_once_within_the_bound(lengths, batch_tokens, seed, epoch):
    for batches in (
        bucketed_batches(lengths, batch_tokens, seed=seed, epoch=epoch),
        sorted_batches(lengths, batch_tokens),
    ):
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
        for batch in batches:
            assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= batch_tokens
    counted = count_bucketed(lengths, batch_tokens, seed=seed, epoch=epoch)
    assert counted == len(bucketed_batches(lengths, batch_tokens, seed=seed, epoch=epoch))


@pytest.mark.parametrize(("count", "batch_size"), [(10, 3), (9, 3), (1, 8)])
def test_even_batches_cover_every_example_once(count, batch_size):
    batches = even_batches(count, batch_size, seed=0, epoch=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_the_order_follows_from_seed_and_epoch_alone():
    lengths = list(range(1, 101))

    def order(seed: int, epoch: int) -> list[int]:
        return np.concatenate(bucketed_batches(lengths, 128, seed=seed, epoch=epoch)).tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_buckets_pad_little():
    lengths = np.random.default_rng(0).integers(1, 100, 5000).tolist()
    batches = bucketed_batches(lengths, 2048, seed=0, epoch=0)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)
    assert sum(lengths) / padded > 0.9


def test_even_batches_of_examples_of_similar_length():
    lengths = np.random.default_rng(3).integers(1, 500, 1_000)
    batches = even_batches(len(lengths), 16, lengths, seed=0, epoch=1)
    assert sorted(np.concatenate(batches)) == list(range(1_000))
    assert {len(batch) for batch in batches} <= {16, 1_000 % 16}
    spread = np.mean([np.ptp(lengths[batch]) for batch in batches])
    assert spread < 0.1 * np.mean([np.ptp(lengths[batch]) for batch in even_batches(1_000, 16, seed=0, epoch=1)])
    assert not np.array_equal(batches[0], even_batches(len(lengths), 16, lengths, seed=0, epoch=2)[0])


def test_a_tensor_of_a_batch_that_is_not_rows_first_is_named():
    targets = torch.zeros(3, 2, dtype=torch.int64)
    TrainingBatch(tensors={"targets": targets, "pixels": torch.zeros(3, 4)}, num_units=3)
    with pytest.raises(AssertionError, match=r"targets have 3, and others are \{'places': \(6,\)\}"):
        TrainingBatch(tensors={"targets": targets, "places": torch.zeros(6)}, num_units=3)
