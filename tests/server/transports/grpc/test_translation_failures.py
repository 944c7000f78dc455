"""Searches that are cancelled, late or too many, over the tiny decoder: every slot and permit comes back."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from edge import make_interceptor
from numpy_decoder import NumpyEncoder
from rpc_failures import failure_of
from tiny_engine import EOS_ID, VOCAB_SIZE, make_decoder, make_translation_model, slow_down
from waiting import until

from headway.v1 import common_pb2
from headway.v1 import translation_service_pb2 as pb
from headway.v1 import translation_service_pb2_grpc as pb_grpc
from headway_server.services.translation import TranslationService
from headway_server.serving.host import ModelHost

SLOTS = 8
WISHES = {
    "greedy": {},
    "beams": {"parameters": common_pb2.DecodingParameters(beam_size=4)},
    "phrases": {
        "parameters": common_pb2.DecodingParameters(beam_size=4),
        "phrase_constraints": [common_pb2.PhraseConstraints(required=["the dog"], forbidden=["cat"])],
    },
    "sampling": {"parameters": common_pb2.DecodingParameters(sampling=common_pb2.SamplingParameters(temperature=1.0))},
    "prefix": {"target_prefixes": ["the mat"]},
}


@asynccontextmanager
async def serving(*, step_s: float = 0.01, max_waiting: int = 8):
    """Serves a model whose translations are long, and checks afterwards that nothing is held."""
    decoder = make_decoder(num_slots=SLOTS)
    decoder.output[:, EOS_ID] = 0
    slow_down(decoder, step_s)
    model = make_translation_model(decoder, NumpyEncoder(vocab_size=VOCAB_SIZE), max_waiting=max_waiting)
    host = ModelHost([model])
    host.start()
    server = grpc.aio.server(interceptors=[make_interceptor({"TranslationService": TranslationService(host)})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.TranslationServiceStub(channel)
    await server.stop(None)
    await until(lambda: model._admission.num_admitted == 0)
    scheduler = model._lanes._engines[0]._stepper.scheduler
    await until(lambda: scheduler.num_free == SLOTS and not scheduler.has_work)
    host.close()


def request(*texts: str, **wishes) -> pb.TranslateTextRequest:
    return pb.TranslateTextRequest(texts=texts, **wishes)


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES.keys())
async def test_a_call_that_is_late_ends_with_its_deadline(wishes):
    async with serving() as stub:
        failure = await failure_of(stub.TranslateText(request("the cat", **wishes), timeout=0.15))
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES.keys())
async def test_a_cancelled_call_makes_room_for_the_next(wishes):
    async with serving(step_s=0.002) as stub:
        calls = [stub.TranslateText(request("the cat", **wishes)) for _ in range(6)]
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        parameters = common_pb2.DecodingParameters(beam_size=SLOTS, max_new_tokens=3)
        response = await stub.TranslateText(request("the dog", parameters=parameters), timeout=20)
        assert response.results[0].new_token_count == 3


async def test_a_cancelled_stream_with_a_prefix_gives_its_slot_back():
    async with serving() as stub:
        for _ in range(SLOTS):
            stream = stub.StreamTranslateText(pb.StreamTranslateTextRequest(text="the cat", target_prefix="the"))
            await anext(aiter(stream))
            stream.cancel()


async def test_too_many_sentences_at_once_are_overload_and_say_when_to_come_back():
    async with serving() as stub:
        running = asyncio.ensure_future(failure_of(stub.TranslateText(request(*["the cat"] * 10), timeout=1)))
        await asyncio.sleep(0.1)
        failure = await failure_of(stub.TranslateText(request("the cat. " * 8, split_sentences=True)))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failure.retry_after_s > 0
        assert "this call brings 7" in failure.message  # beside the permit that its text has
        assert (await running).code is grpc.StatusCode.DEADLINE_EXCEEDED
