"""Thousands of random requests: whatever they ask for and however they end, nothing is left behind."""

import asyncio
import gc
import random
import time

import numpy as np
import pytest
from thorough import amount
from tiny_engine import VOCAB_SIZE, make_decoder, make_generation_model

from headway_server.decoding.constraints import ConstraintRequest
from headway_server.errors import CancelledError, DeadlineError, OverloadedError
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.parameters import LogProbabilityRequest

SEED = 20
NUM_REQUESTS = amount(2_000, 10_000)
NUM_AT_ONCE = 100
NUM_CHECKED = 150
LETTERS = "the cat sat on a mat and the dog "
CONSTRAINTS = [
    ConstraintRequest(choices=("cat", "dog", "a mat")),
    ConstraintRequest(regex="[a-c]{1,6}"),
    ConstraintRequest(json_schema='{"type": "boolean"}'),
]


def random_sampling(rng: random.Random) -> dict:
    """Parameters of every kind, each of them seldom set."""

    def seldom(value, odds: float = 0.15):
        return value if rng.random() < odds else None

    constraint = seldom(rng.choice(CONSTRAINTS), 0.03)
    max_new_tokens = rng.choice([1, 2, 3, 5, 8, 12])
    return {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": None if constraint else seldom(rng.randint(0, max_new_tokens)),
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_k": seldom(rng.choice([1, 4, 30])),
        "top_p": seldom(rng.choice([0.5, 0.9])),
        "min_p": seldom(0.1),
        "repetition_penalty": seldom(1.3),
        "presence_penalty": seldom(0.5),
        "frequency_penalty": seldom(-0.5),
        "logit_biases": ((rng.randrange(VOCAB_SIZE), 3.0),) if rng.random() < 0.1 else (),
        "stop_strings": ("at",) if rng.random() < 0.1 else (),
        "stop_token_ids": (rng.randrange(2, VOCAB_SIZE),) if rng.random() < 0.1 else (),
        "seed": rng.randrange(2**64),
        "constraint": constraint,
    }


def random_call(rng: random.Random) -> dict:
    start = rng.randrange(8)
    return {
        "prompt": (LETTERS * 2)[start : start + rng.randrange(1, 50)],
        "sampling": random_sampling(rng),
        "priority": rng.choice([0, 0, 0, 7, -7]),
        "log_probabilities": LogProbabilityRequest(num_top_tokens=2, include_prompt=True)
        if rng.random() < 0.05
        else None,
    }


async def collect(model, *, prompt, deadline=None, streamed=False, sample_count=1, **options) -> str:
    """Returns the text of a call, of its first sample."""
    sampling = {name: value for name, value in options.pop("sampling").items() if value is not None}
    request = GenerationRequest(
        parameters=sampling, truncate=True, deadline=deadline, sample_count=sample_count, **options
    )
    if not streamed:
        answer = await model.generate([prompt], fields=["prompts[0]"], request=request)
        return answer.results[0].text
    async for part in model.stream(prompt, field="prompt", request=request):
        last = part
    return last.results[0].text


async def one_of_many(model, rng: random.Random, counts: dict[str, int]) -> tuple[dict, str] | None:
    """Makes a call that may be cancelled or run out of time; returns it with its text where it came to its end."""
    call = random_call(rng)
    await asyncio.sleep(rng.random() * 0.01)
    end = rng.random()
    deadline = time.monotonic() + rng.random() * 0.02 if end < 0.15 else None
    task = asyncio.ensure_future(
        collect(model, deadline=deadline, streamed=rng.random() < 0.3, sample_count=rng.choice([1, 1, 1, 3]), **call)
    )
    if 0.15 < end < 0.3:
        await asyncio.sleep(rng.random() * 0.02)
        task.cancel()
    try:
        text = await task
    except (asyncio.CancelledError, CancelledError, DeadlineError, OverloadedError) as error:
        counts[type(error).__name__] = counts.get(type(error).__name__, 0) + 1
        return None
    counts["answered"] = counts.get("answered", 0) + 1
    return call, text


async def run_wave(model, rng: random.Random, counts: dict[str, int]) -> list[tuple[dict, str]]:
    outcomes = await asyncio.gather(*(one_of_many(model, rng, counts) for _ in range(NUM_AT_ONCE)))
    return [outcome for outcome in outcomes if outcome is not None]


async def until_idle(model) -> None:
    for _ in range(500):
        if not model._lanes._engines[0]._stepper.scheduler.has_work:
            return
        await asyncio.sleep(0.01)


@pytest.mark.timeout(240)
async def test_random_requests_leave_nothing_behind_and_answer_as_if_alone():
    rng = random.Random(SEED)
    decoder = make_decoder(num_slots=16, num_prefix_slots=2)
    model = make_generation_model(decoder, max_waiting=80)
    model.start()
    counts: dict[str, int] = {}
    answered: list[tuple[dict, str]] = []
    held: list[int] = []
    for wave in range(NUM_REQUESTS // NUM_AT_ONCE):
        outcomes = await run_wave(model, rng, counts)
        if len(answered) < NUM_CHECKED:
            answered += outcomes[:10]
        if wave in (10, NUM_REQUESTS // NUM_AT_ONCE - 1):
            await until_idle(model)
            gc.collect()
            held.append(sum(map(len, map(gc.get_objects, range(3)))))
        decoder.steps.clear()
        decoder.decode_sizes.clear()
    await until_idle(model)
    scheduler = model._lanes._engines[0]._stepper.scheduler
    assert (scheduler.num_free, len(scheduler.waiting), scheduler.prefilling) == (16, 0, None)
    assert model._admission.num_admitted == 0
    assert held[1] < held[0] * 1.05 + 2000, (SEED, held)
    assert counts["answered"] > NUM_REQUESTS / 3, counts
    assert min(counts[kind] for kind in ("CancelledError", "DeadlineError", "OverloadedError")) > NUM_REQUESTS / 200, (
        counts
    )
    model.close()

    alone = make_generation_model(make_decoder(num_slots=1))
    alone.start()
    for call, text in answered:
        assert await collect(alone, **call) == text, call
    alone.close()
    assert np.mean([len(text) for _, text in answered]) > 3
