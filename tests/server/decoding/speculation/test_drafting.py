"""Drafts in the engine, over an exported, trained model: the same answers, token for token, whatever comes and goes."""

import asyncio
from contextlib import suppress

import grpc
import numpy as np
import pytest
from loading import loading
from numpy_decoder import NumpyDecoder
from tiny_engine import make_sequence, running_engine

from headway.v1 import generation_service_pb2 as pb
from headway.v1 import generation_service_pb2_grpc as pb_grpc
from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.decoding.core.engine import Engine
from headway_server.decoding.settings import EngineSettings
from headway_server.decoding.speculation.drafting import MAX_ROWS, verifies_exactly
from headway_server.preprocessing import ReasoningForm
from headway_server.runtime import Runtime
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.generation.thinking import ReasoningDelimiters, Thinking
from headway_server.tasks.parameters import LogProbabilityRequest

PROVERBS = "a bird in the hand is worth two in the bush. the early bird catches the worm. actions speak louder than "
WIDTH = 6


def load(store, precision, **settings):
    settings = EngineSettings(**({"num_slots": 5, "max_waiting": 300} | settings))
    bundle = open_bundle(store / "tiny-generation" / "1")
    return GenerationModel.load(
        bundle, Runtime(device="cpu", num_threads=1), loading(engine=settings, precision=precision)
    )


def drafting_of(model):
    return model._lanes._engines[0]._stepper.drafting


@pytest.fixture(scope="module", params=[Precision.FP32, Precision.INT8])
def models(request, tiny_store):
    """The model without and with speculation."""
    return load(tiny_store, request.param), load(tiny_store, request.param, speculation="prompt-lookup")


@pytest.fixture
async def plain_and_drafting(models):
    """Both, with engines that are started anew."""
    for model in models:
        engines = model._lanes._engines
        engines[0] = Engine(engines[0]._stepper)
        model.start()
    yield models
    for model in models:
        await asyncio.to_thread(model.close)
        assert model._lanes._engines[0]._stepper.scheduler.num_free == model._lanes._engines[0].num_slots


def random_sampling(rng: np.random.Generator) -> dict:
    """Everything that may be asked for, most of it now and then."""

    def now_and_then(value, otherwise):
        return value if rng.random() < 0.25 else otherwise

    sampling = {
        "max_new_tokens": int(rng.integers(1, 60)),
        "temperature": float(rng.choice([0.0, 0.0, 0.7, 1.5])),
        "top_k": now_and_then(4, 0),
        "top_p": now_and_then(0.8, 1.0),
        "min_p": now_and_then(0.1, 0.0),
        "repetition_penalty": now_and_then(1.2, 1.0),
        "presence_penalty": now_and_then(0.5, 0.0),
        "frequency_penalty": now_and_then(0.1, 0.0),
        "logit_biases": now_and_then(((3, 2.0), (5, -3.0)), ()),
        "seed": int(rng.integers(1000)),
        "stop_strings": now_and_then(("bush", "wor"), ()),
        "stop_token_ids": now_and_then((7,), ()),
    }
    constraint = now_and_then(ConstraintRequest(regex=r"[a-z ]{5,40}\. ?(the early bird catches the worm\. )*"), None)
    return sampling if constraint is None else sampling | {"constraint": constraint}


def random_call(seed: int):
    rng = np.random.default_rng(seed)
    start, length = int(rng.integers(60)), int(rng.integers(1, 46))
    prompt = PROVERBS[start : start + length] * int(rng.integers(1, 3))
    asked = LogProbabilityRequest(num_top_tokens=3, include_prompt=bool(rng.random() < 0.5))
    return prompt, random_sampling(rng), asked if rng.random() < 0.3 else None


async def answer(model, call, **options):
    prompt, sampling, log_probabilities = call
    decoded = await model.generate(
        [prompt],
        fields=["prompts[0]"],
        request=GenerationRequest(parameters=sampling, truncate=True, log_probabilities=log_probabilities, **options),
    )
    result = decoded.results[0].result
    return result.output, result.finish_reason, result.num_new_tokens, result.tokens, result.prompt_tokens


async def run_some(model, calls, *, at_once: int):
    """Answers calls, so many at once: the next begins when another has ended."""
    gate = asyncio.Semaphore(at_once)

    async def one(call):
        async with gate:
            return await answer(model, call)

    return await asyncio.gather(*(one(call) for call in calls))


@pytest.mark.parametrize("at_once", [1, 2, 3])
async def test_answers_are_those_without_drafts_token_for_token(plain_and_drafting, at_once):
    plain, drafting = plain_and_drafting
    calls = [random_call(seed) for seed in range(100 * at_once, 100 * at_once + 60)]
    expected = await run_some(plain, calls, at_once=at_once)
    assert await run_some(drafting, calls, at_once=at_once) == expected
    assert drafting_of(plain) is None
    counts = drafting_of(drafting)
    if at_once == 1:  # with several, drafts depend on who happens to run beside whom
        assert counts.num_accepted_tokens > 20
        assert counts.num_drafted_tokens > counts.num_accepted_tokens, "some were refused"
    assert f"{counts.num_accepted_tokens} of {counts.num_drafted_tokens} tokens accepted" in repr(drafting)
    assert len({text for text, *_ in expected}) > 40


async def test_samples_of_a_prompt_and_a_stream_are_the_same(plain_and_drafting):
    sampling = {"max_new_tokens": 40, "temperature": 0.5, "seed": 3}
    texts, deltas = [], []
    for model in plain_and_drafting:
        decoded = await model.generate(
            [PROVERBS], fields=["prompts[0]"], request=GenerationRequest(parameters=sampling, sample_count=2)
        )
        texts.append([result.text for result in decoded.results])
        parts = [
            part
            async for part in model.stream(PROVERBS, field="prompt", request=GenerationRequest(parameters=sampling))
        ]
        deltas.append("".join(part.output for part in parts[:-1]))
        assert deltas[-1] == parts[-1].results[0].text
    assert texts[0] == texts[1]
    assert deltas[0] == deltas[1] == texts[0][0]


async def test_callers_who_go_leave_the_others_answers_as_they_are(plain_and_drafting):
    plain, drafting = plain_and_drafting
    calls = [random_call(seed) for seed in range(700, 740)]
    expected = [await answer(plain, call) for call in calls]
    rng = np.random.default_rng(7)

    async def leave_early(call):
        with suppress(TimeoutError):
            await asyncio.wait_for(answer(drafting, call), float(rng.random() * 0.02))

    async def stay(call, stayed):
        stayed.append(await answer(drafting, call))

    for call, wanted in zip(calls, expected, strict=True):
        stayed = []
        await asyncio.gather(stay(call, stayed), leave_early(random_call(int(rng.integers(10**6)))))
        assert stayed == [wanted]


async def test_a_slot_that_ends_ends_the_drafts(plain_and_drafting):
    plain, drafting = plain_and_drafting
    longest = drafting.limits.max_total_tokens
    sampling = {"max_new_tokens": longest - 3, "temperature": 0.0}
    answers = [await answer(model, (PROVERBS[:3], sampling, None)) for model in (plain, drafting)]
    assert answers[0] == answers[1]
    assert answers[0][2] == longest - 3


class SteppingVerifier:
    """Verifies with the steps of a decoder, one token at a time."""

    def __init__(self, decoder: NumpyDecoder, *, width: int = WIDTH, error: float = 0.0) -> None:
        self.decoder, self.width, self.error = decoder, width, error
        self.rows: list[int] = []

    def verify(self, token_ids, positions):
        self.rows.append(len(token_ids))
        steps = [self.decoder.decode(token_ids[:, place], positions + place) for place in range(self.width)]
        return np.stack(steps, axis=1) + np.float32(self.error)


def repeating_decoder(**options) -> NumpyDecoder:
    """A decoder that soon repeats itself: positions mean nothing to it."""
    decoder = NumpyDecoder(num_slots=4, vocab_size=12, max_length=64, seed=3, **options)
    decoder.places[:] = 0
    return decoder


def test_what_has_other_bits_is_not_taken_for_exact():
    decoder = repeating_decoder()
    assert verifies_exactly(decoder, SteppingVerifier(decoder))
    assert not verifies_exactly(decoder, SteppingVerifier(decoder, error=1e-6))
    assert not verifies_exactly(decoder, SteppingVerifier(decoder, width=65))


async def test_drafts_are_for_few_sequences_that_all_have_one():
    decoder = repeating_decoder()
    verifier = SteppingVerifier(decoder)
    async with running_engine(decoder, verifier=verifier) as engine:
        prompts = [[2, 3, 4, 5, 2, 3, 4], [6, 7, 8, 6, 7, 8, 6], [9, 1, 2]]

        def sequences(lengths):
            return [
                make_sequence(prompt, eos_id=None, max_new_tokens=length)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]

        together = [result.output for result in await engine.run(sequences([20, 50, 50]))]
        assert set(verifier.rows) <= set(range(1, MAX_ROWS + 1))
        assert {1, 2} <= set(verifier.rows)
        verifier.rows.clear()
        alone = [(await engine.run([one]))[0].output for one in sequences([20, 50, 50])]
        assert together == alone
        assert set(verifier.rows) == {1}
        verifier.rows.clear()
        await engine.run(sequences([1, 1, 2]))
        assert not verifier.rows, "a single token needs no draft"


async def test_a_draft_that_could_not_be_taken_back_is_not_run(monkeypatch):
    decoder = repeating_decoder()
    verifier = SteppingVerifier(decoder)
    starts: list[int] = []
    run = verifier.verify
    monkeypatch.setattr(
        verifier, "verify", lambda token_ids, starts_: (starts.extend(starts_), run(token_ids, starts_))[1]
    )
    monkeypatch.setattr(decoder, "can_return", lambda length, num_read: length // 20 == num_read // 20)
    async with running_engine(decoder, verifier=verifier) as engine:
        (found,) = await engine.run([make_sequence([2, 3, 4, 5, 2, 3, 4], eos_id=None, max_new_tokens=50)])
    async with running_engine(repeating_decoder()) as engine:
        (plain,) = await engine.run([make_sequence([2, 3, 4, 5, 2, 3, 4], eos_id=None, max_new_tokens=50)])
    assert found.output == plain.output
    assert starts
    assert all((start + 1) // 20 == (start + verifier.width) // 20 for start in starts)


async def test_a_server_with_speculation_says_what_it_costs_and_answers_alike(tiny_store, start_process):
    flags = ("--store", tiny_store, "--port", 0, "--num-slots", 2)
    servers = [start_process(*flags), start_process(*flags, "--speculation", "prompt-lookup")]
    request = pb.GenerateTextRequest(
        model="tiny-generation", prompts=[PROVERBS], parameters=pb.GenerationParameters(max_new_tokens=50)
    )
    texts = []
    for server in servers:
        address = server.wait_ready().split()[3]
        async with grpc.aio.insecure_channel(address) as channel:
            texts.append((await pb_grpc.GenerationServiceStub(channel).GenerateText(request)).results[0].text)
        server.process.terminate()
        assert server.wait_end() == 0
    assert texts[0] == texts[1] != ""
    logs = [server.log.read_text() for server in servers]
    assert "speculation" not in logs[0]
    line = next(line for line in logs[1].splitlines() if "memory" in line and "tiny-generation" in line)
    assert "2 x " in line
    assert "tokens_a_run=6" in logs[1]
    translator = next(line for line in logs[1].splitlines() if "memory" in line and "tiny-translation" in line)
    assert "2 x " not in translator.partition("state=")[0], "a translator drafts nothing"


async def test_thoughts_end_at_their_budgets_with_drafts_as_without(plain_and_drafting, monkeypatch):
    for model in plain_and_drafting:
        delimiters = ReasoningDelimiters.of(ReasoningForm(begin="the", end="bush."), model._tokenizer)

        def thinking(plan, prompt, constraint, *, delimiters=delimiters):
            budget = (plan.parameters.seed or 0) % 12
            return Thinking(delimiters, is_open=True, context_ids=prompt.context_ids, budget=budget, answer=constraint)

        monkeypatch.setattr(model, "_rule_of", thinking)
    calls = [random_call(seed) for seed in range(200, 230)]
    plain = await run_some(plain_and_drafting[0], calls, at_once=4)
    assert plain == await run_some(plain_and_drafting[1], calls, at_once=1)
    assert sum("bush." in text for text, *_ in plain) > 10
    assert drafting_of(plain_and_drafting[1]).num_accepted_tokens > 0
