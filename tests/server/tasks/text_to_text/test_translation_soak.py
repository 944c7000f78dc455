"""Thousands of random translations, searched and not: however they end, nothing is left behind."""

import asyncio
import gc
import random
import time

import numpy as np
import pytest
from numpy_decoder import NumpyDecoder, NumpyEncoder
from random_searches import random_search
from thorough import amount
from tiny_engine import BOS_ID, make_sequence

from headway_server.decoding.core.engine import Engine
from headway_server.decoding.core.step import Stepper
from headway_server.errors import CancelledError, DeadlineError, OverloadedError

SEED = 21
NUM_REQUESTS = amount(1_600, 4_000)
NUM_AT_ONCE = 80
NUM_SLOTS = 24
NUM_CHECKED = 120
VOCAB_SIZE = 40
ENCODER = NumpyEncoder(vocab_size=VOCAB_SIZE)


def new_decoder(num_slots: int) -> NumpyDecoder:
    return NumpyDecoder(num_slots=num_slots, vocab_size=VOCAB_SIZE)


def random_options(rng: random.Random) -> dict:
    options = {
        "input_ids": [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 12))],
        "max_new_tokens": rng.choice([1, 3, 8, 14]),
    }
    if rng.random() < 0.75:
        return options | {"search": random_search(rng, range(2, VOCAB_SIZE), widths=(1, 1, 2, 4, 4, 4, 5, 16))}
    return options | {
        "temperature": rng.choice([0.0, 0.9]),
        "seed": rng.randrange(2**32),
        "wants_deltas": rng.random() < 0.5,
    }


def outcome_of(result) -> tuple:
    return result.output, result.finish_reason, result.num_new_tokens, result.hypotheses


async def one_of_many(engine: Engine, rng: random.Random, counts: dict[str, int]) -> tuple[dict, tuple] | None:
    """Makes a call that may be cancelled or run out of time; returns it with its outcome where it came to its end."""
    options = random_options(rng)
    await asyncio.sleep(rng.random() * 0.05)
    end = rng.random()
    deadline = time.monotonic() + rng.random() * 0.05 if end < 0.15 else None
    sequence = make_sequence(start_ids=[BOS_ID], deadline=deadline, **options)
    task = asyncio.ensure_future(engine.run([sequence]))
    if 0.15 < end < 0.3:
        await asyncio.sleep(rng.random() * 0.05)
        task.cancel()
    try:
        (result,) = await task
    except (asyncio.CancelledError, CancelledError, DeadlineError, OverloadedError) as error:
        counts[type(error).__name__] = counts.get(type(error).__name__, 0) + 1
        return None
    counts["answered"] = counts.get("answered", 0) + 1
    return options, outcome_of(result)


async def until_idle(engine: Engine) -> None:
    for _ in range(500):
        if not engine._stepper.scheduler.has_work:
            return
        await asyncio.sleep(0.01)


@pytest.mark.timeout(240)
async def test_thousands_of_random_translations_leave_nothing_behind_and_answer_as_if_alone():
    rng = random.Random(SEED)
    decoder = new_decoder(NUM_SLOTS)
    engine = Engine(Stepper(decoder, encoder=ENCODER, max_encoder_tokens=60))
    engine.start()
    counts: dict[str, int] = {}
    answered: list[tuple[dict, tuple]] = []
    held: list[int] = []
    for wave in range(NUM_REQUESTS // NUM_AT_ONCE):
        outcomes = await asyncio.gather(*(one_of_many(engine, rng, counts) for _ in range(NUM_AT_ONCE)))
        if len(answered) < NUM_CHECKED:
            answered += [outcome for outcome in outcomes if outcome is not None][:10]
        del outcomes
        if wave in (10, NUM_REQUESTS // NUM_AT_ONCE - 1):
            await until_idle(engine)
            gc.collect()
            held.append(sum(map(len, map(gc.get_objects, range(3)))))
        decoder.steps.clear()
        decoder.decode_sizes.clear()
        ENCODER.batch_shapes.clear()
    await until_idle(engine)
    scheduler = engine._stepper.scheduler
    assert (scheduler.num_free, len(scheduler.waiting), scheduler.groups) == (NUM_SLOTS, 0, [])
    assert held[1] < held[0] * 1.05 + 2000, (SEED, held)
    assert counts["answered"] > NUM_REQUESTS / 3, counts
    assert counts["DeadlineError"] + counts["OverloadedError"] > 50, counts
    assert counts["CancelledError"] > 50, counts
    engine.close()
    await check_alone(answered)


async def check_alone(answered: list[tuple[dict, tuple]]) -> None:
    alone = Engine(Stepper(new_decoder(16), encoder=ENCODER))
    alone.start()
    for options, outcome in answered:
        (result,) = await alone.run([make_sequence(start_ids=[BOS_ID], **options)])
        assert outcome_of(result) == outcome, (SEED, options)
    alone.close()
    assert np.mean([outcome[2] for _, outcome in answered]) > 2


async def test_a_wide_search_gets_its_turn_among_ever_more_narrow_ones():
    engine = Engine(Stepper(new_decoder(16), encoder=ENCODER))
    engine.start()
    rng = random.Random(3)
    is_over = False

    async def narrow_ones():
        while not is_over:
            options = {"max_new_tokens": 10, "eos_id": None, "start_ids": [BOS_ID]}
            await engine.run([make_sequence([rng.randrange(2, VOCAB_SIZE)], **options)])

    crowd = [asyncio.ensure_future(narrow_ones()) for _ in range(40)]
    await asyncio.sleep(0.05)
    search = random_search(rng, range(2, VOCAB_SIZE), widths=(16,))
    wide = make_sequence([5, 6], search=search, start_ids=[BOS_ID], max_new_tokens=5)
    try:
        await asyncio.wait_for(engine.run([wide]), timeout=20)
    finally:
        is_over = True
        await asyncio.gather(*crowd)
        engine.close()
