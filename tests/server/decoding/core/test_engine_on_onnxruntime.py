"""The engine over exported, trained models on ONNX Runtime: the same answers alone, in a batch, and one at a time."""

import asyncio

import numpy as np
import pytest
from loading import loading
from naive_decoding import naive_decode
from tiny_engine import make_sequence, running_engine

from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.parameters import SamplingParameters, SearchParameters
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.decoding.settings import EngineSettings
from headway_server.preprocessing import TextTokenizer
from headway_server.runtime import Runtime
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.text_to_text.request import TextToTextRequest
from headway_server.tasks.text_to_text.translation import TranslationModel

SETTINGS = EngineSettings(num_slots=5, max_waiting=300)
PRECISIONS = [Precision.FP32, Precision.INT8]
PROVERBS = "a bird in the hand is worth two in the bush. the early bird catches the worm. actions speak louder than "
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def runtime():
    return Runtime(device="cpu", num_threads=1)


def random_calls(seed: int, count: int) -> list[tuple[str, dict]]:
    rng = np.random.default_rng(seed)
    calls = []
    for index in range(count):
        start = int(rng.integers(60))
        prompt = PROVERBS[start : start + int(rng.integers(1, 45))]
        sampling = {
            "max_new_tokens": int(rng.integers(1, 40)),
            "temperature": float(rng.choice([0.0, 1.0, 1.8])),
            "top_k": int(rng.choice([0, 5])),
            "top_p": float(rng.choice([1.0, 0.9])),
            "seed": index,
        }
        calls.append((prompt, sampling))
    return calls


async def generate(model, prompt, sampling):
    request = GenerationRequest(parameters=sampling)
    answer = await model.generate([prompt], fields=["prompts[0]"], request=request)
    return answer.results[0].result


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_continuations_equal_the_naive_loop_whatever_runs_beside_them(tiny_store, runtime, precision):
    bundle = open_bundle(tiny_store / "tiny-generation" / "1")
    model = GenerationModel.load(bundle, runtime, loading(engine=SETTINGS, precision=precision))
    calls = random_calls(seed=1, count=40)
    model.start()
    results = await asyncio.gather(*(generate(model, *call) for call in calls))
    model.close()
    alone = DecoderRunner(runtime, bundle, bundle.manifest.variants[precision], num_slots=1)
    for (prompt, sampling), result in zip(calls, results, strict=True):
        (encoded,) = [text async for text in model._tokenizer.encode_each([prompt], add_special_tokens=False)]
        parameters = SamplingParameters(**sampling)
        token_ids, _ = naive_decode(alone, encoded.input_ids, parameters, eos_id=None)
        assert result.output == model._tokenizer.decode(token_ids)
    assert len({result.output for result in results}) > 30


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_translations_equal_the_naive_loop_whatever_runs_beside_them(tiny_store, runtime, precision):
    bundle = open_bundle(tiny_store / "tiny-translation" / "1")
    model = TranslationModel.load(bundle, runtime, loading(engine=SETTINGS, precision=precision))
    rng = np.random.default_rng(2)
    texts = [" ".join(rng.choice(NUMBERS, size=rng.integers(1, 12))) for _ in range(40)]
    model.start()
    answer = await model.write(texts, request=TextToTextRequest())
    model.close()
    variant = bundle.manifest.variants[precision]
    alone, encoder = DecoderRunner(runtime, bundle, variant, num_slots=1), EncoderRunner(runtime, bundle, variant)
    special_tokens = bundle.manifest.special_tokens
    parameters = SamplingParameters(max_new_tokens=model.limits.max_total_tokens)
    for text, result in zip(texts, answer.results, strict=True):
        (encoded,) = [text async for text in model._tokenizer.encode_each([text], add_special_tokens=True)]
        (source,) = encoder.encode([EncoderInput.of_tokens(encoded.input_ids)])
        token_ids, reason = naive_decode(
            alone,
            encoded.input_ids,
            parameters,
            eos_id=special_tokens.eos,
            source=source,
            start_ids=[special_tokens.bos],
        )
        assert (result.text, result.finish_reason) == (model._tokenizer.decode(token_ids), reason)
        assert -50 < result.log_probability < 0
    assert len({result.text for result in answer.results}) > 30


@pytest.mark.parametrize("beam_size", [None, 4])
async def test_a_decoder_that_starts_from_the_first_tokens_of_a_translation_finds_the_others(
    tiny_store, runtime, beam_size
):
    bundle = open_bundle(tiny_store / "tiny-translation" / "1")
    variant = bundle.manifest.variants[Precision.FP32]
    decoder, encoder = DecoderRunner(runtime, bundle, variant, num_slots=8), EncoderRunner(runtime, bundle, variant)
    special_tokens = bundle.manifest.special_tokens
    rng = np.random.default_rng(6)
    tokenizer = TextTokenizer.load(bundle.file("tokenizer.json"))
    texts = [" ".join(rng.choice(NUMBERS, size=rng.integers(4, 9))) for _ in range(12)]
    sources = [tokenizer.library_tokenizer.encode(text).ids for text in texts]
    search = None if beam_size is None else SearchParameters(beam_size=beam_size, length_penalty=0.0)

    async def translate(engine, start_ids):
        sequences = [
            make_sequence(
                source,
                start_ids=start,
                eos_id=special_tokens.eos,
                search=search,
                num_top_tokens=None if search else 0,
                max_new_tokens=30,
            )
            for source, start in zip(sources, start_ids, strict=True)
        ]
        results = await asyncio.gather(*(engine.run([sequence]) for sequence in sequences))
        if search is not None:
            return [list(result.hypotheses[0].token_ids) for (result,) in results]
        return [[token.token_id for token in result.tokens] for (result,) in results]

    async with running_engine(decoder, encoder=encoder) as engine:
        whole = await translate(engine, [[special_tokens.bos]] * len(sources))
        rest = await translate(engine, [[special_tokens.bos, *token_ids[:3]] for token_ids in whole])
    assert [token_ids[3:] for token_ids in whole] == rest
    assert len({tuple(token_ids) for token_ids in rest}) > 8
