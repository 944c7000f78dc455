"""Beam search over an exported, trained model: what PyTorch finds with the same weights, alone and in any company."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from naive_beam_search import next_log_probabilities, translate_with_beams
from random_searches import Spelled, differences, is_close_call, random_search, reference_config
from tiny_engine import make_sequence, running_engine
from tiny_models import NUMBERS

from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.parameters import SearchParameters
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.runtime import Runtime
from headway_training.checkpoint import load_model

BOS_ID, EOS_ID, MAX_LENGTH = 1, 2, 24
FIRST_SOURCE_ID, FIRST_TARGET_ID = 4, 14


@pytest.fixture(scope="module")
def runtime():
    return Runtime(device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def model(tiny_checkpoints):
    return load_model(tiny_checkpoints["translation"])[0]


@pytest.fixture
def new_runners(tiny_store, runtime):
    bundle = open_bundle(tiny_store / "tiny-translation" / "1")

    def open_both(num_slots: int, precision: Precision = Precision.FP32):
        variant = bundle.manifest.variants[precision]
        return DecoderRunner(runtime, bundle, variant, num_slots=num_slots), EncoderRunner(runtime, bundle, variant)

    return open_both


def random_source(rng: random.Random) -> np.ndarray:
    numbers = [FIRST_SOURCE_ID + rng.randrange(len(NUMBERS)) for _ in range(rng.randint(1, 8))]
    return np.array([*numbers, EOS_ID])


def random_cases(seed: int, count: int, **options) -> list[tuple[np.ndarray, SearchParameters, int]]:
    rng = random.Random(seed)
    words = range(FIRST_TARGET_ID, FIRST_TARGET_ID + 10)
    return [
        (random_source(rng), random_search(rng, words, **options), rng.choice([4, 9, 14, MAX_LENGTH]))
        for _ in range(count)
    ]


def new_sequence(source, search, max_new_tokens):
    return make_sequence(
        source, start_ids=[BOS_ID], eos_id=EOS_ID, search=search, max_new_tokens=max_new_tokens, output=Spelled()
    )


async def search_together(runners, cases, seed: int = 0):
    """Lets all of them join at random moments, and some be cancelled on their way."""
    rng = random.Random(seed)
    longest_wait_s = 0.2 if len(cases) > 1 else 0.0
    async with running_engine(runners[0], encoder=runners[1]) as engine:

        async def answer(case):
            await asyncio.sleep(rng.random() * longest_wait_s)
            if rng.random() < 0.2:
                gone = new_sequence(*case)
                asyncio.get_running_loop().call_later(rng.random() * 0.02, setattr, gone, "cancelled", True)
                await asyncio.gather(engine.run([gone]), return_exceptions=True)
            return (await engine.run([new_sequence(*case)]))[0]

        return await asyncio.gather(*map(answer, cases))


async def test_what_is_found_equals_pytorch_hypothesis_for_hypothesis(new_runners, model):
    cases = random_cases(seed=1, count=200)
    results = await search_together(new_runners(40), cases)
    num_close = 0
    for (source, search, max_length), result in zip(cases, results, strict=True):
        source_ids = torch.from_numpy(source)
        options = {"eos": EOS_ID, "search": reference_config(search), "max_length": max_length}
        expected = translate_with_beams(model, source_ids, bos=BOS_ID, **options)
        if found := differences(result.hypotheses, expected):
            num_close += 1
            log_probabilities = next_log_probabilities(model, source_ids, bos=BOS_ID)
            assert is_close_call(log_probabilities, **options), (source, search, max_length, found)
    assert num_close <= 5
    best = [result.hypotheses[0].token_ids for result in results]
    assert len(set(best)) > 120
    assert max(len(result.hypotheses) for result in results) == 16


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
async def test_a_sentence_finds_the_same_alone_and_in_company_to_the_last_bit(new_runners, precision):
    cases = random_cases(seed=2, count=30, widths=(1, 2, 4, 4, 4, 8))
    together = await search_together(new_runners(24, precision), cases)
    for case, result in zip(cases, together, strict=True):
        (alone,) = await search_together(new_runners(case[1].beam_size, precision), [case])
        assert alone.hypotheses == result.hypotheses, case


async def test_a_trained_model_translates_with_beams(new_runners):
    search = SearchParameters(beam_size=4, num_hypotheses=4)
    rng = random.Random(3)
    sources = [random_source(rng) for _ in range(40)]
    results = await search_together(new_runners(20), [(source, search, MAX_LENGTH) for source in sources])
    expected = [tuple((source[:-1] + 10)[::-1].tolist()) for source in sources]
    right = [result.hypotheses[0].token_ids == tokens for result, tokens in zip(results, expected, strict=True)]
    assert np.mean(right) > 0.7


async def test_alignments_are_as_long_as_the_translations_and_sum_to_one(new_runners):
    runners = new_runners(12)
    if not runners[0].has_alignment:
        pytest.skip("this export has no alignment")
    search = SearchParameters(beam_size=4, num_hypotheses=4, wants_alignment=True)
    rng = random.Random(4)
    cases = [(random_source(rng), search, MAX_LENGTH) for _ in range(12)]
    aligned = await search_together(runners, cases)
    plain = await search_together(
        new_runners(12), [(source, replace(search, wants_alignment=False), length) for source, search, length in cases]
    )
    for (source, _, _), one, other in zip(cases, aligned, plain, strict=True):
        assert [h.token_ids for h in one.hypotheses] == [h.token_ids for h in other.hypotheses]
        for hypothesis in one.hypotheses:
            assert hypothesis.alignment.shape == (len(hypothesis.token_ids), len(source))
            np.testing.assert_allclose(hypothesis.alignment.sum(axis=1), 1, atol=1e-5)
