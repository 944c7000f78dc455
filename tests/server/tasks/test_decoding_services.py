"""GenerationService and TranslationService through a real channel, over the tiny decoder."""

import asyncio

import grpc
import pytest
from decoding_server import serving, violation
from tiny_engine import make_decoder, slow_down

from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as generation
from headway.v1 import translation_service_pb2 as translation

PARAMETERS = generation.GenerationParameters(
    max_new_tokens=12, sampling=common_pb2.SamplingParameters(temperature=1.0, seed=5)
)


async def test_prompts_are_answered_in_order_with_everything_the_protocol_promises():
    async with serving() as (stub, _):
        request = generation.GenerateTextRequest(prompts=["the cat", "the dog sat"], parameters=PARAMETERS)
        response = await stub.GenerateText(request)
        assert len(response.results) == 2
        for result in response.results:
            assert result.finish_reason in (
                common_pb2.FINISH_REASON_LENGTH,
                common_pb2.FINISH_REASON_END_OF_SEQUENCE,
            )
            assert result.seed == 5
            assert 1 <= result.new_token_count <= 12
            assert result.prompt_token_count > 0
        assert (response.model.name, response.model.version, response.model.variant) == (
            "tiny-generation",
            "1",
            common_pb2.VARIANT_FP32,
        )
        assert response.timings.total.ToNanoseconds() >= response.timings.inference.ToNanoseconds() > 0
        swapped = await stub.GenerateText(
            generation.GenerateTextRequest(prompts=["the dog sat", "the cat"], parameters=PARAMETERS)
        )
        assert [r.text for r in swapped.results] == [r.text for r in reversed(response.results)]


async def test_a_stream_joins_to_the_unary_answer_and_its_last_message_is_complete():
    async with serving() as (stub, _):
        unary = await stub.GenerateText(generation.GenerateTextRequest(prompts=["the cat"], parameters=PARAMETERS))
        stream = stub.StreamGenerateText(generation.StreamGenerateTextRequest(prompt="the cat", parameters=PARAMETERS))
        messages = [message async for message in stream]
        assert "".join(message.text_delta for message in messages) == unary.results[0].text
        assert messages[-1].result == unary.results[0]
        assert messages[-1].model == unary.model
        assert messages[-1].HasField("timings")
        assert not any(message.HasField("result") for message in messages[:-1])


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (generation.GenerateTextRequest(prompts=[]), "prompts"),
        (generation.GenerateTextRequest(prompts=["a"] * 257), "prompts"),
        (generation.GenerateTextRequest(prompts=["a", ""]), "prompts[1]"),
        (generation.GenerateTextRequest(prompts=["a", "!" * 100]), "prompts[1]"),
        (
            generation.GenerateTextRequest(
                prompts=["a"],
                parameters=generation.GenerationParameters(sampling=common_pb2.SamplingParameters(temperature=3)),
            ),
            "parameters.sampling.temperature",
        ),
    ],
)
async def test_a_bad_field_is_an_invalid_argument_that_names_it(request_, field):
    async with serving() as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateText(request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert violation(caught.value).field == field


async def test_an_empty_prompt_of_a_stream_is_an_invalid_argument():
    async with serving() as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.StreamGenerateText(generation.StreamGenerateTextRequest())))
        assert violation(caught.value).field == "prompt"


async def test_a_cancelled_stream_frees_its_slot():
    decoder = make_decoder(num_slots=1)
    decoder.output[:, 1] = 0  # greedy output does not end by itself
    async with serving(decoder) as (stub, _):
        for _ in range(5):
            stream = stub.StreamGenerateText(generation.StreamGenerateTextRequest(prompt="the cat"))
            await anext(aiter(stream))
            stream.cancel()
        response = await stub.GenerateText(
            generation.GenerateTextRequest(prompts=["the cat"], parameters=PARAMETERS), timeout=5
        )
        assert response.results[0].new_token_count > 0
        await asyncio.sleep(0.05)


async def test_a_deadline_is_held_and_the_slot_freed():
    async with serving(make_decoder(num_slots=1)) as (stub, _):
        many = generation.GenerateTextRequest(prompts=["the cat"] * 200)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateText(many, timeout=0.02)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stub.GenerateText(generation.GenerateTextRequest(prompts=["the cat"], parameters=PARAMETERS), timeout=5)


async def test_a_full_queue_is_resource_exhausted():
    decoder = make_decoder(num_slots=1)
    decoder.output[:, 1] = 0  # greedy output does not end by itself
    slow_down(decoder, 0.1)
    async with serving(decoder, max_waiting=0) as (stub, _):
        stream = stub.StreamGenerateText(generation.StreamGenerateTextRequest(prompt="the cat"))
        await anext(aiter(stream))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateText(generation.GenerateTextRequest(prompts=["a"]))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stream.cancel()


async def test_a_failed_step_is_internal_and_says_nothing_of_the_inside():
    decoder = make_decoder()
    decoder.tokens[:] = float("nan")
    async with serving(decoder) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateText(generation.GenerateTextRequest(prompts=["the cat"]))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "finite" not in caught.value.details()


async def test_texts_are_translated_in_order_and_streams_agree():
    async with serving() as (_, stub):
        parameters = common_pb2.DecodingParameters(max_new_tokens=15)
        texts = ["the cat", "the dog sat"]
        request = translation.TranslateTextRequest(texts=texts, source_language="en", parameters=parameters)
        response = await stub.TranslateText(request)
        assert len(response.results) == 2
        for text, result in zip(texts, response.results, strict=True):
            assert result.log_probability < 0
            assert result.source_token_count > 0
            stream = stub.StreamTranslateText(
                translation.StreamTranslateTextRequest(text=text, parameters=parameters, target_language="de")
            )
            messages = [message async for message in stream]
            assert messages[-1].result == result
            assert "".join(message.text_delta for message in messages) == result.text


async def test_a_language_the_model_does_not_speak_is_named():
    async with serving() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.TranslateText(translation.TranslateTextRequest(texts=["a"], target_language="fr"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert violation(caught.value).field == "target_language"
