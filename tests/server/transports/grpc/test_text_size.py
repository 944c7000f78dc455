"""The size of a text, as the services of decoding models hold to it."""

from contextlib import asynccontextmanager

import grpc
import pytest
from edge import make_interceptor
from numpy_decoder import NumpyEncoder
from rpc_failures import failure_of
from tiny_engine import VOCAB_SIZE, make_decoder, make_generation_model, make_translation_model

from headway.v1 import generation_service_pb2 as generation
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import translation_service_pb2 as translation
from headway.v1 import translation_service_pb2_grpc as translation_grpc
from headway_server.services.generation import GenerationService
from headway_server.services.translation import TranslationService
from headway_server.serving.host import ModelHost

LONG = "a" * 101
CALLS = {
    "prompts[1]": ("GenerateText", generation.GenerateTextRequest(prompts=["a", LONG])),
    "prompt": ("StreamGenerateText", generation.StreamGenerateTextRequest(prompt=LONG)),
    "texts[1]": ("TranslateText", translation.TranslateTextRequest(texts=["a", LONG])),
    "text": ("StreamTranslateText", translation.StreamTranslateTextRequest(text=LONG)),
    "target_prefixes[0]": ("TranslateText", translation.TranslateTextRequest(texts=["a"], target_prefixes=[LONG])),
    "target_prefix": ("StreamTranslateText", translation.StreamTranslateTextRequest(text="a", target_prefix=LONG)),
    "conversations[0].messages[0].content": (
        "GenerateText",
        generation.GenerateTextRequest(conversations=[{"messages": [{"role": "ROLE_USER", "content": LONG}]}]),
    ),
}


@asynccontextmanager
async def serving(max_text_bytes: int):
    """Gives the methods of both services by name."""
    encoder = NumpyEncoder(vocab_size=VOCAB_SIZE)
    size = {"max_text_bytes": max_text_bytes}
    models = [make_generation_model(make_decoder(), **size), make_translation_model(make_decoder(), encoder, **size)]
    host = ModelHost(models)
    host.start()
    servicers = {"GenerationService": GenerationService(host), "TranslationService": TranslationService(host)}
    server = grpc.aio.server(interceptors=[make_interceptor(servicers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stubs = (
                generation_grpc.GenerationServiceStub(channel),
                translation_grpc.TranslationServiceStub(channel),
            )
            yield {name: method for stub in stubs for name, method in vars(stub).items()}
    finally:
        await server.stop(None)
        host.close()


async def read_all(call):
    return [response async for response in call]


@pytest.mark.parametrize("field", CALLS)
async def test_a_text_past_the_size_is_refused_and_named(field):
    name, request = CALLS[field]
    async with serving(max_text_bytes=100) as methods:
        call = methods[name](request)
        failure = await failure_of(read_all(call) if name.startswith("Stream") else call)
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert "has 101 bytes, the limit is 100" in failure.message
