"""Served models over the tiny decoder: parameters, limits, admission, results."""

import asyncio
import json

import pytest
from numpy_decoder import NumpyEncoder
from tiny_engine import (
    EOS_ID,
    MAX_LENGTH,
    TOKENIZER,
    VOCAB_SIZE,
    make_bundle,
    make_decoder,
    make_generation_model,
    make_parts,
    make_translation_model,
)

from headway_server.bundles import SamplingDefaults, Task
from headway_server.decoding.sequence import Delta, FinishReason
from headway_server.errors import BundleError, DeadlineError, InvalidInputError, OverloadedError
from headway_server.preprocessing import TextTokenizer
from headway_server.serving.answers import Answer
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest

SEEDED = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12}


@pytest.fixture
async def model():
    model = make_generation_model(make_decoder())
    model.start()
    yield model
    model.close()


def make_endless_decoder():
    """A decoder whose greedy output never ends: some of 300 logits is always above 0."""
    decoder = make_decoder()
    decoder.output[:, EOS_ID] = 0
    return decoder


async def generate(model, *prompts, sampling=SEEDED, truncate=False, deadline=None):
    fields = [f"prompts[{i}]" for i in range(len(prompts))]
    request = GenerationRequest(parameters=sampling, truncate=truncate, deadline=deadline)
    answer = await model.generate(prompts, fields=fields, request=request)
    return answer.results


async def test_results_are_in_the_order_of_the_prompts(model):
    prompts = [f"the cat number {i}" for i in range(20)]
    together = await generate(model, *prompts)
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = await generate(model, prompt)
        assert alone.result.output == result.result.output
    assert len({result.result.output for result in together}) > 10


async def test_a_drawn_seed_is_answered_and_gives_the_same_text_again(model):
    unseeded = {"temperature": 1.5, "max_new_tokens": 20}
    first, second = await generate(model, "the dog", "the dog", sampling=unseeded)
    assert first.seed != second.seed
    again = {"temperature": 1.5, "max_new_tokens": 20, "seed": first.seed}
    (repeated,) = await generate(model, "the dog", sampling=again)
    assert repeated.result.output == first.result.output
    assert repeated.seed == first.seed


async def test_a_stream_ends_with_the_answer_of_the_unary_call(model):
    (expected,) = await generate(model, "the mat")
    parts = [
        part async for part in model.stream("the mat", field="prompt", request=GenerationRequest(parameters=SEEDED))
    ]
    assert all(isinstance(part, Delta) for part in parts[:-1])
    assert isinstance(parts[-1], Answer)
    (result,) = parts[-1].results
    assert result.result.output == expected.result.output == "".join(part.output for part in parts[:-1])


async def test_defaults_are_the_models_where_it_names_them():
    defaults = SamplingDefaults(max_new_tokens=3, temperature=1.0, top_k=1)
    model = make_generation_model(make_endless_decoder(), defaults=defaults)
    model.start()
    (result,) = await generate(model, "the cat", sampling={})
    (greedy,) = await generate(model, "the cat", sampling={"temperature": 0.0})
    model.close()
    assert result.result.num_new_tokens == 3
    assert result.result.output == greedy.result.output


async def test_without_defaults_a_continuation_fills_the_room():
    model = make_generation_model(make_endless_decoder())
    model.start()
    (result,) = await generate(model, "the cat", sampling={})
    model.close()
    assert result.result.finish_reason is FinishReason.LENGTH
    assert result.num_prompt_tokens + result.result.num_new_tokens == MAX_LENGTH


def text_of(num_tokens: int) -> str:
    text = "!" * num_tokens
    assert len(TOKENIZER.encode(text, add_special_tokens=False).ids) == num_tokens
    return text


async def test_a_prompt_past_the_limit_is_refused_with_limit_and_value(model):
    with pytest.raises(InvalidInputError, match=r"prompts\[1\]: has 41 tokens; at most 40 ") as caught:
        await generate(model, "the cat", text_of(41))
    assert caught.value.field == "prompts[1]"


async def test_a_prompt_that_leaves_too_little_room_is_refused_by_the_number_asked_for(model):
    with pytest.raises(InvalidInputError, match="at most 34 can follow") as caught:
        await generate(model, text_of(30), sampling={"max_new_tokens": 40})
    assert caught.value.field == "parameters.max_new_tokens"


async def test_a_truncated_prompt_loses_its_beginning_and_says_so(model):
    sampling = {"max_new_tokens": 30, "temperature": 1.0, "seed": 1}
    long, tail = "the mat " * 30 + text_of(34), text_of(34)
    cut, exact = await generate(model, long, tail, sampling=sampling, truncate=True)
    assert cut.truncated
    assert not exact.truncated
    assert cut.num_prompt_tokens == exact.num_prompt_tokens == MAX_LENGTH - 30
    assert cut.result.output == exact.result.output


async def test_truncating_leaves_room_for_the_default_number_of_tokens(model):
    (cut,) = await generate(model, text_of(60), sampling={}, truncate=True)
    assert cut.num_prompt_tokens == MAX_LENGTH // 2
    (whole,) = await generate(model, text_of(40), sampling={}, truncate=True)
    assert whole.num_prompt_tokens == 40
    assert not whole.truncated


async def test_a_full_queue_is_overloaded_and_says_when_to_come_back():
    model = make_generation_model(make_decoder(num_slots=1), max_waiting=2)
    model.start()
    calls = [asyncio.ensure_future(generate(model, "the cat")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as caught:
        await generate(model, "the cat")
    assert caught.value.retry_after_s > 0
    await asyncio.gather(*calls)
    await generate(model, "the cat")
    with pytest.raises(InvalidInputError, match="at most 3 at once"):
        await generate(model, *["the cat"] * 4)
    model.close()


async def test_a_call_that_fails_gives_its_permits_back():
    model = make_generation_model(make_decoder(num_slots=1), max_waiting=0)
    model.start()
    for _ in range(3):
        with pytest.raises(InvalidInputError):
            await generate(model, text_of(50))
        with pytest.raises(DeadlineError):
            await generate(model, "the cat", deadline=0.0)
        stream = model.stream("the cat", field="prompt", request=GenerationRequest(parameters=SEEDED))
        await anext(stream)
        await stream.aclose()
    await generate(model, "the cat")
    model.close()


async def translate(model, *texts, max_new_tokens=20, truncate=False):
    parameters = TextToTextParameters(max_new_tokens=max_new_tokens)
    request = TextToTextRequest(parameters=parameters, truncate=truncate)
    return (await model.write(texts, request=request)).results


@pytest.fixture
async def translator():
    model = make_translation_model(make_decoder(), NumpyEncoder(vocab_size=VOCAB_SIZE))
    model.start()
    yield model
    model.close()


async def test_translations_are_the_same_alone_and_together(translator):
    texts = [f"the cat sat on mat {i}" for i in range(12)]
    together = await translate(translator, *texts)
    for text, result in zip(texts, together, strict=True):
        (alone,) = await translate(translator, text)
        assert alone.text == result.text
        assert alone.log_probability == result.log_probability < 0
        assert alone.num_source_tokens == len(TOKENIZER.encode(text).ids)


async def test_a_streamed_translation_ends_with_the_answer_of_the_unary_call(translator):
    (expected,) = await translate(translator, "the dog")
    request = TextToTextRequest(parameters=TextToTextParameters(max_new_tokens=20))
    parts = [part async for part in translator.stream("the dog", field="text", request=request)]
    (result,) = parts[-1].results
    assert result == expected
    assert result.text == "".join(part.output for part in parts[:-1])


async def test_a_translation_may_be_as_long_as_the_model_holds(translator):
    with pytest.raises(InvalidInputError, match="is 65; must be from 1 to 64"):
        await translate(translator, "the cat", max_new_tokens=65)
    endless = make_translation_model(make_endless_decoder(), NumpyEncoder(vocab_size=VOCAB_SIZE))
    endless.start()
    (result,) = await translate(endless, "the cat", max_new_tokens=None)
    endless.close()
    assert result.num_new_tokens == MAX_LENGTH


async def test_a_source_past_the_limit_is_refused_or_cut_at_its_end(translator):
    with pytest.raises(InvalidInputError, match=r"texts\[0\]: has 51 tokens"):
        await translate(translator, text_of(50))
    (cut,) = await translate(translator, text_of(50), truncate=True)
    (exact,) = await translate(translator, text_of(39))
    assert cut.truncated
    assert cut.num_source_tokens == exact.num_source_tokens == 40
    assert cut.text == exact.text


async def test_a_tokenizer_with_more_tokens_than_the_model_is_a_bad_bundle():
    decoder = make_decoder()
    decoder.vocab_size = VOCAB_SIZE - 1
    with pytest.raises(BundleError, match=f"largest id is {VOCAB_SIZE - 1}, the model has {VOCAB_SIZE - 1} tokens"):
        make_generation_model(decoder)


async def test_a_tokenizer_whose_ids_have_gaps_is_held_to_its_largest_id():
    tokenizer = TOKENIZER.from_str(TOKENIZER.to_str())
    vocabulary = json.loads(tokenizer.to_str())
    ids = vocabulary["model"]["vocab"]
    token = next(token for token, index in ids.items() if index == VOCAB_SIZE - 1)
    ids[token] = VOCAB_SIZE + 5
    decoder = make_decoder()
    with pytest.raises(BundleError, match=f"largest id is {VOCAB_SIZE + 5}, the model has {VOCAB_SIZE} tokens"):
        GenerationModel(
            make_bundle(Task.GENERATION),
            make_parts([decoder], tokenizer=TextTokenizer(tokenizer.from_str(json.dumps(vocabulary)))),
        )


@pytest.mark.parametrize(("name", "value"), [("bos", 999), ("eos", VOCAB_SIZE)])
async def test_a_special_token_that_the_model_does_not_have_is_a_bad_bundle(name, value):
    says = f"special_tokens.{name} is {value}, the model has {VOCAB_SIZE} tokens"
    with pytest.raises(BundleError, match=says):
        make_generation_model(make_decoder(), **{name: value})
    bundle = make_bundle(Task.TRANSLATION, **{name: value})
    with pytest.raises(BundleError, match=says):
        make_translation_model(make_decoder(), NumpyEncoder(vocab_size=VOCAB_SIZE), bundle=bundle)


async def test_a_default_that_no_call_could_ask_for_is_a_bad_bundle():
    make_generation_model(make_decoder(), defaults=SamplingDefaults(top_k=VOCAB_SIZE))
    with pytest.raises(BundleError, match=f"top_k is {VOCAB_SIZE + 1}, the model has {VOCAB_SIZE} tokens"):
        make_generation_model(make_decoder(), defaults=SamplingDefaults(top_k=VOCAB_SIZE + 1))


def decoder_with_embeddings(num_embeddings: int):
    decoder = make_decoder()
    decoder.tokens = decoder.tokens[:num_embeddings]
    return decoder


async def test_a_graph_with_fewer_embeddings_than_the_tokenizer_has_ids_is_a_bad_bundle():
    decoder = decoder_with_embeddings(VOCAB_SIZE - 1)
    model = make_generation_model(decoder)
    with pytest.raises(BundleError, match="does not run"):
        model._check_runs(make_parts([decoder]))


@pytest.mark.parametrize(("num_decoded", "num_encoded"), [(VOCAB_SIZE - 1, VOCAB_SIZE), (VOCAB_SIZE, VOCAB_SIZE - 1)])
async def test_a_translation_is_tried_with_the_largest_id_of_source_and_target(num_decoded, num_encoded):
    decoder, encoder = decoder_with_embeddings(num_decoded), NumpyEncoder(vocab_size=num_encoded)
    model = make_translation_model(decoder, encoder)
    with pytest.raises(BundleError, match="does not run"):
        model._check_runs(make_parts([decoder], encoder=encoder))


async def test_a_translation_is_tried_with_the_token_it_begins_with():
    decoder, encoder = make_decoder(), NumpyEncoder(vocab_size=VOCAB_SIZE)
    decoder.vocab_size = VOCAB_SIZE + 9  # logits for more tokens than it has embeddings
    translator = make_translation_model(decoder, encoder, bundle=make_bundle(Task.TRANSLATION, bos=VOCAB_SIZE + 3))
    with pytest.raises(BundleError, match="does not run"):
        translator._check_runs(make_parts([decoder], encoder=encoder))


async def test_a_model_that_cannot_be_run_is_a_bad_bundle():
    decoder = make_decoder()
    model = make_generation_model(decoder)

    def fail(*_) -> None:
        raise RuntimeError("unknown operator")

    decoder.decode = fail
    with pytest.raises(BundleError, match=r"does not run \(unknown operator\)"):
        model._check_runs(make_parts([decoder]))
