"""Rows with every parameter there is, against the naive sampler, and alone against among others."""

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from sampler_rows import Row, make_parameters, new_sampler, pack, restrict

from headway_server.decoding.interfaces import Ranking

NUM_STEPS = 5


def make_rows(rng, vocab_size, num_rows):
    return [
        Row(
            parameters=make_parameters(rng, vocab_size),
            prompt_ids=rng.integers(vocab_size, size=rng.integers(1, 100)),
            end_ids=tuple(rng.integers(vocab_size, size=rng.integers(3)).tolist()),
        )
        for _ in range(num_rows)
    ]


def make_logits(rng, num_rows, vocab_size):
    logits = (rng.normal(size=(num_rows, vocab_size)) * rng.choice([0.1, 1, 3, 10])).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)  # many equal ones
    if rng.random() < 0.3:
        logits[rng.random(logits.shape) < 0.5] = -np.inf
    return logits


def make_masks(rng, rows, vocab_size):
    for row in rows:
        row.allowed = None if rng.random() < 0.5 else rng.random(vocab_size) < rng.choice([0.02, 0.5, 0.98])


def rank(logits):
    """Ranks the likeliest token of each row, as a graph may."""
    best = logits.argmax(axis=1)[:, np.newaxis]
    maximum = np.take_along_axis(logits, best, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        normalizers = np.log(np.exp(logits.astype(np.float64) - maximum).sum(axis=1)) + maximum[:, 0]
    return Ranking(best, maximum, normalizers)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from([1, 2, 5, 31, 65, 256, 300, 1000]))
def test_a_batch_chooses_what_the_naive_sampler_chooses(seed, vocab_size):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng, vocab_size, int(rng.integers(1, 9)))
    suppressed_ids = tuple(set(rng.integers(vocab_size, size=rng.integers(3)).tolist()))
    sampler = new_sampler(len(rows), vocab_size, suppressed_ids)
    for slot, row in enumerate(rows):
        row.suppressed_ids = suppressed_ids
        row.assign(sampler, slot)
    for step in range(NUM_STEPS):
        make_masks(rng, rows, vocab_size)
        for slot, row in enumerate(rows):
            row.restrict(sampler, slot)
        logits = make_logits(rng, len(rows), vocab_size)
        sampled = sampler.sample(logits, ranking=rank(logits) if rng.random() < 0.5 else None)
        for slot, row in enumerate(rows):
            note(f"step {step}, row {slot}: {row.parameters}")
            token = int(sampled.token_ids[slot])
            expected = row.choice(logits[slot])
            assert sampled.is_valid[slot] == (expected is not None)
            if expected is not None and token != expected:
                assert token in row.choices(logits[slot])
            row.text_ids.append(token)


@pytest.mark.parametrize("vocab_size", [30011, 9000])
def test_a_large_vocabulary_is_sampled_as_the_naive_sampler_does(vocab_size):
    rng = np.random.default_rng(vocab_size)
    rows = make_rows(rng, vocab_size, 16)
    sampler = new_sampler(len(rows), vocab_size)
    for scale in (0.5, 3):
        make_masks(rng, rows, vocab_size)
        logits = (rng.normal(size=(len(rows), vocab_size)) * scale).astype(np.float32)
        for slot, row in enumerate(rows):
            row.text_ids.clear()
            row.assign(sampler, slot)
            row.restrict(sampler, slot)
        token_ids = sampler.sample(logits).token_ids.tolist()
        for slot, row in enumerate(rows):
            expected = row.choice(logits[slot])
            assert token_ids[slot] == expected or token_ids[slot] in row.choices(logits[slot]), row.parameters


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from([3, 65, 257, 1000, 6007]))
def test_a_row_is_the_same_alone_and_among_others_and_wherever_it_moves(seed, vocab_size):
    rng = np.random.default_rng(seed)
    num_slots = int(rng.integers(2, 9))
    rows = make_rows(rng, vocab_size, num_slots)
    together = new_sampler(num_slots, vocab_size)
    alone = [new_sampler(1, vocab_size) for _ in rows]
    for slot, row in enumerate(rows):
        row.assign(together, slot)
        row.assign(alone[slot], 0)
    running = list(range(num_slots))  # which row is in which slot
    for _ in range(NUM_STEPS):
        make_masks(rng, rows, vocab_size)
        logits = make_logits(rng, num_slots, vocab_size)
        for slot, number in enumerate(running):
            rows[number].restrict(together, slot)
            rows[number].restrict(alone[number], 0)
        if len(running) > 1 and rng.random() < 0.5:  # one retires after its mask was set, the last takes its slot
            slot = int(rng.integers(len(running)))
            together.masks.slots.move(len(running) - 1, slot)
            running[slot] = running[-1]
            running.pop()
        batch = together.sample(logits[running])
        for slot, number in enumerate(running):
            single = alone[number].sample(logits[number : number + 1])
            assert single.token_ids[0] == batch.token_ids[slot]
            assert single.is_valid[0] == batch.is_valid[slot]
            assert single.log_probabilities[0] == batch.log_probabilities[slot] or not single.is_valid[0]
            assert single.top_tokens.get(0) == batch.top_tokens.get(slot)


def test_a_row_that_begins_later_is_sampled_by_itself():
    rng = np.random.default_rng(8)
    rows = make_rows(rng, 500, 3)
    sampler, whole = (new_sampler(3, 500) for _ in range(2))
    logits = make_logits(rng, 3, 500)
    for slot, row in enumerate(rows):
        row.assign(sampler, slot)
        row.assign(whole, slot)
    one_by_one = [sampler.sample(logits[slot : slot + 1], np.array([slot])).token_ids[0] for slot in range(3)]
    assert one_by_one == whole.sample(logits).token_ids.tolist()


def test_edits_leave_the_logits_as_they_are():
    rng = np.random.default_rng(9)
    rows = make_rows(rng, 200, 6)
    logits = make_logits(rng, 6, 200)
    before = logits.copy()
    sampler = new_sampler(6, 200, with_log_probabilities=True)
    for slot, row in enumerate(rows):
        row.assign(sampler, slot)
        restrict(sampler, slot, pack(rng.random(200) < 0.5))
    sampler.sample(logits)
    assert np.array_equal(logits, before)
