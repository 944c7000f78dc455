"""GenerationService and TranslationService behind a real channel, over the tiny decoder."""

from contextlib import asynccontextmanager

import grpc
from edge import make_interceptor
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from numpy_decoder import NumpyEncoder
from tiny_engine import VOCAB_SIZE, make_decoder, make_generation_model, make_translation_model
from waiting import until

from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import translation_service_pb2_grpc as translation_grpc
from headway_server.services.generation import GenerationService
from headway_server.services.translation import TranslationService
from headway_server.serving.host import ModelHost


@asynccontextmanager
async def serving(decoder=None, *, max_text_bytes=2**20, **options):
    """Serves a generation model, made with `options`, and a translation model; gives a stub of each service."""
    models = [
        make_generation_model(decoder or make_decoder(), max_text_bytes=max_text_bytes, **options),
        make_translation_model(make_decoder(), NumpyEncoder(vocab_size=VOCAB_SIZE)),
    ]
    host = ModelHost(models)
    host.start()
    servicers = {"GenerationService": GenerationService(host), "TranslationService": TranslationService(host)}
    server = grpc.aio.server(interceptors=[make_interceptor(servicers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield (
                generation_grpc.GenerationServiceStub(channel),
                translation_grpc.TranslationServiceStub(channel),
            )
    finally:
        await server.stop(None)
        host.close()
    for model in models:
        assert model._lanes._engines[0]._stepper.scheduler.num_free == model._lanes._engines[0].num_slots
        assert not model._lanes._engines[0]._stepper.scheduler.has_work
        await until(lambda model=model: model._admission.num_admitted == 0)  # a cancelled handler ends after its call


def violation(error: grpc.aio.AioRpcError) -> error_details_pb2.BadRequest.FieldViolation:
    for detail in rpc_status.from_call(error).details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            return bad_request.field_violations[0]
    raise AssertionError(error)
