"""Several engines of one model: answers are those of one engine, and all share the work."""

import asyncio
import random

import numpy as np
import pytest
from loading import loading
from numpy_decoder import NumpyEncoder
from tiny_engine import BOS_ID, VOCAB_SIZE, make_decoder, make_sequence
from tiny_models import NUMBERS

from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.core.engine import Engine
from headway_server.decoding.core.lanes import Lanes
from headway_server.decoding.core.step import StepError, Stepper
from headway_server.decoding.sequence import SequenceResult
from headway_server.decoding.settings import EngineSettings
from headway_server.errors import DrainingError
from headway_server.runtime import Runtime
from headway_server.tasks.text_to_text.request import TextToTextRequest
from headway_server.tasks.text_to_text.translation import TranslationModel

ENCODER = NumpyEncoder(vocab_size=VOCAB_SIZE)


def make_lanes(count: int, **options) -> Lanes:
    return Lanes([Engine(Stepper(make_decoder(num_slots=4, **options), encoder=ENCODER)) for _ in range(count)])


def make_source(rng: np.random.Generator):
    return make_sequence(rng.integers(2, 200, size=rng.integers(1, 12)), start_ids=[BOS_ID], max_new_tokens=9)


async def test_sequences_are_shared_out_by_what_each_lane_has_to_do():
    lanes = make_lanes(3)
    lanes.start()
    rng = np.random.default_rng(0)
    running = asyncio.gather(lanes.run([make_source(rng) for _ in range(7)]))
    await asyncio.sleep(0)
    assert sorted(lanes._loads) == [2, 2, 3]
    await running
    assert lanes._loads == [0, 0, 0]
    lanes.close()
    assert not lanes.is_alive


async def test_results_come_in_the_order_of_the_call_and_are_those_of_one_engine():
    answers = []
    for count in (1, 3):
        lanes = make_lanes(count)
        lanes.start()
        rng = np.random.default_rng(1)
        answers.append([result.output for result in await lanes.run([make_source(rng) for _ in range(20)])])
        lanes.close()
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 5


async def test_a_failure_in_one_lane_ends_the_whole_call_and_frees_every_slot():
    lanes = make_lanes(2)
    lanes.start()
    broken = lanes._engines[1]._stepper._decoder
    working = broken.decode
    broken.decode = lambda *_, **__: 1 / 0
    rng = np.random.default_rng(2)
    with pytest.raises(StepError):
        await lanes.run([make_source(rng) for _ in range(8)])
    assert lanes._loads == [0, 0]
    broken.decode = working
    results = await lanes.run([make_source(rng) for _ in range(8)])
    assert all(isinstance(result, SequenceResult) for result in results)
    lanes.close()
    assert all(engine._stepper.scheduler.num_free == 4 for engine in lanes._engines)


async def test_an_engine_that_has_ended_gets_nothing_while_another_runs():
    lanes = make_lanes(2)
    lanes.start()
    lanes._engines[0].close()
    assert not lanes.is_alive
    results = await lanes.run([make_source(np.random.default_rng(4)) for _ in range(8)])
    assert all(isinstance(result, SequenceResult) for result in results)
    lanes.close()


async def test_closed_lanes_refuse_what_comes():
    lanes = make_lanes(2)
    lanes.start()
    lanes.close()
    with pytest.raises(DrainingError):
        await lanes.run([make_source(np.random.default_rng(3)) for _ in range(4)])
    assert lanes._loads == [0, 0]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
async def test_a_model_translates_alike_in_two_lanes_and_in_one(tiny_store, precision):
    bundle = open_bundle(tiny_store / "tiny-translation" / "1")
    rng = random.Random(4)
    calls = [[" ".join(rng.choices(NUMBERS, k=rng.randint(1, 8))) for _ in range(rng.randint(1, 3))] for _ in range(40)]
    answers = []
    for num_lanes in (1, 2):
        runtime = Runtime(device="cpu", num_threads=2, num_lanes=num_lanes)
        model = TranslationModel.load(
            bundle, runtime, loading(engine=EngineSettings(num_slots=33), precision=precision)
        )
        assert [engine.num_slots for engine in model._lanes._engines] == ([33] if num_lanes == 1 else [17, 16])
        model.start()
        answered = await asyncio.gather(*(model.write(texts, request=TextToTextRequest()) for texts in calls))
        answers.append([result for call in answered for result in call.results])
        model.close()
    assert [result.text for result in answers[0]] == [result.text for result in answers[1]]
    # Sentences are computed in other company, and a matrix product of another size adds in another order: float32 keeps
    # some seven digits of each step's logits.
    scores = [[result.log_probability for result in results] for results in answers]
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)
