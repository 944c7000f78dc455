"""The scheduler against a model of the slots: what is where, after any history."""

import asyncio
import random

import numpy as np
import pytest
from tiny_engine import make_sequence

from headway_server.decoding.core.scheduler import Scheduler
from headway_server.decoding.sequence import Stage

CHUNK = 8


@pytest.fixture
async def scheduler():
    return Scheduler(num_slots=4, prefill_chunk=CHUNK)


def sequence_of(length: int, start_ids=None):
    return make_sequence(np.arange(2, 2 + length), start_ids=start_ids)


def let_run(scheduler: Scheduler, count: int):
    sequences = [sequence_of(3) for _ in range(count)]
    scheduler.waiting.add(sequences)
    for _ in sequences:
        admitted = scheduler.admit(now=0.0)
        scheduler.join(admitted)
    return sequences


async def test_the_oldest_is_admitted_first_and_one_at_a_time(scheduler):
    first, second = sequence_of(3), sequence_of(3)
    scheduler.waiting.add([first, second])
    assert scheduler.admit(now=1.0) is first
    assert scheduler.admit(now=1.0) is None
    scheduler.join(first)
    assert scheduler.admit(now=2.0) is second
    assert (first.slot, second.slot) == (0, 1)
    assert second.started_at == 2.0


async def test_chunks_begin_at_multiples_of_the_chunk_and_the_last_may_be_short(scheduler):
    sequence = sequence_of(2 * CHUNK + 3)
    scheduler.waiting.add([sequence])
    scheduler.admit(now=0.0)
    cut = []
    while not cut or not cut[-1].is_last:
        cut.append(scheduler.next_chunk())
        sequence.num_prefilled = cut[-1].stop
    assert [(chunk.start, chunk.stop) for chunk in cut] == [(0, 8), (8, 16), (16, 19)]


async def test_nobody_is_admitted_past_the_slots(scheduler):
    let_run(scheduler, 4)
    scheduler.waiting.add([sequence_of(3)])
    assert scheduler.admit(now=0.0) is None
    assert scheduler.num_free == 0


async def test_a_retired_slot_is_filled_by_the_last_one(scheduler):
    a, b, c, d = let_run(scheduler, 4)
    moves = scheduler.retire([b])
    assert [(move.sequence, move.source, move.target) for move in moves] == [(d, 3, 1)]
    assert scheduler.running == [a, d, c]
    assert b.stage is Stage.FINISHED


async def test_the_last_one_retires_without_a_move(scheduler):
    sequences = let_run(scheduler, 4)
    assert scheduler.retire(sequences[2:]) == []
    assert scheduler.running == sequences[:2]


async def test_the_prefilling_one_follows_to_the_end_of_the_running_ones(scheduler):
    a, b = let_run(scheduler, 2)
    prefilling = sequence_of(20)
    scheduler.waiting.add([prefilling])
    scheduler.admit(now=0.0)
    moves = scheduler.retire([a])
    assert [(move.sequence, move.source, move.target) for move in moves] == [(b, 1, 0), (prefilling, 2, 1)]
    assert prefilling.slot == 1


async def test_the_prefilling_and_the_waiting_can_be_retired(scheduler):
    prefilling, waiting, staying = (sequence_of(20) for _ in range(3))
    scheduler.waiting.add([prefilling, waiting, staying])
    scheduler.admit(now=0.0)
    assert scheduler.retire([prefilling, waiting]) == []
    assert list(scheduler.waiting) == [staying]
    assert scheduler.num_free == 4


async def test_overdue_are_the_cancelled_and_those_past_their_deadline_wherever_they_are(scheduler):
    running = let_run(scheduler, 2)
    waiting = [sequence_of(3) for _ in range(3)]
    scheduler.waiting.add(waiting)
    scheduler.admit(now=0.0)
    running[1].deadline = 5.0
    waiting[0].cancelled = True
    waiting[2].deadline = 9.0
    assert scheduler.overdue(now=6.0) == [running[1], waiting[0]]


async def test_sentences_are_admitted_up_to_a_budget_of_padded_tokens(scheduler):
    sentences = [sequence_of(length, start_ids=[0]) for length in (10, 4, 12, 2)]
    scheduler.waiting.add(sentences)
    assert scheduler.admit_sources(now=0.0, max_padded_tokens=30) == sentences[:2]
    for sentence in sentences[:2]:
        scheduler.join(sentence)
    assert scheduler.admit_sources(now=0.0, max_padded_tokens=5) == sentences[2:3]


async def test_sentences_are_admitted_up_to_the_free_slots(scheduler):
    let_run(scheduler, 3)
    sentences = [sequence_of(2, start_ids=[0]) for _ in range(3)]
    scheduler.waiting.add(sentences)
    assert scheduler.admit_sources(now=0.0, max_padded_tokens=1000) == sentences[:1]


async def test_any_history_keeps_the_running_ones_a_prefix_and_moves_every_sequence_rightly():
    rng = random.Random(8)
    scheduler = Scheduler(num_slots=5, prefill_chunk=CHUNK)
    held: dict[int, object] = {}  # what a cache would hold: slot to sequence
    for _ in range(3000):
        action = rng.random()
        if action < 0.3:
            scheduler.waiting.add([sequence_of(rng.randrange(1, 20))])
        if (admitted := scheduler.admit(now=0.0)) is not None:
            held[admitted.slot] = admitted
        if (chunk := scheduler.next_chunk()) is not None:
            chunk.sequence.num_prefilled = chunk.stop
            if chunk.is_last:
                scheduler.join(chunk.sequence)
        everyone = [*scheduler.running, *scheduler.waiting, *([scheduler.prefilling] if scheduler.prefilling else [])]
        for move in scheduler.retire(rng.sample(everyone, k=min(len(everyone), rng.choice([0, 0, 1, 2])))):
            assert held[move.source] is move.sequence
            held[move.target] = move.sequence
        for slot, sequence in enumerate(scheduler.running):
            assert sequence.slot == slot
            assert held[slot] is sequence
        if scheduler.prefilling is not None:
            assert scheduler.prefilling.slot == len(scheduler.running)
            assert held[len(scheduler.running)] is scheduler.prefilling
    await asyncio.sleep(0)
