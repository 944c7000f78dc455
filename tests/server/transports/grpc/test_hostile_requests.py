"""Requests that ask much of a server: each is refused by name, soon, and the next one is answered."""

import asyncio
import gc
import threading
import time
import tracemalloc
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest
from decoding_server import serving as serving_decoders
from rpc_failures import failure_of
from tiny_engine import make_decoder

from headway.oip import grpc_predict_v2_pb2 as inference_pb
from headway.oip import grpc_predict_v2_pb2_grpc as inference_grpc
from headway.v1 import generation_service_pb2 as pb
from headway.v1 import generation_service_pb2_grpc as pb_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway_server.services.open_inference import service as oip_service
from headway_server.services.open_inference import tensors

_PARAMETERS = pb.GenerateTextRequest.PARAMETERS_FIELD_NUMBER
_LOGIT_BIASES = pb.GenerationParameters.LOGIT_BIASES_FIELD_NUMBER


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def part(field: int, body: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(body)) + body


def request_with(**constraint: object) -> pb.GenerateTextRequest:
    parameters = pb.GenerationParameters(max_new_tokens=1, constraint=pb.Constraint(**constraint))
    return pb.GenerateTextRequest(prompts=["a"], parameters=parameters)


PLAIN = pb.GenerateTextRequest(prompts=["a"], parameters=pb.GenerationParameters(max_new_tokens=1))
MULTIPLES = [f'"{name}": {{"multipleOf": {"9" * digits}7}}' for name, digits in (("a", 2999), ("b", 2990))]


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"json_schema": '{"const": -9223372036854775808}'}, "so near to -2^63 none is supported"),
        ({"json_schema": '{"type": "integer", "minimum": -9.3e18, "maximum": 0}'}, "too far apart in digits"),
        ({"json_schema": f'{{"properties": {{{", ".join(MULTIPLES)}}}}}'}, "least common multiple of many digits"),
        ({"regex": ".*" * 4000}, "takes more than 1 s or 32 MiB to be compiled"),
    ],
    ids=["stack overflow", "minimum", "multiples", "slow"],
)
async def test_a_hostile_constraint_is_refused_and_the_next_call_is_answered(constraint, reason):
    async with serving_decoders() as (stub, _):
        for _ in range(2):
            failure = await failure_of(stub.GenerateText(request_with(**constraint)))
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
            assert reason in failure.message
        assert (await stub.GenerateText(PLAIN)).results


@contextmanager
def measured_loop():
    """Gives a list of how long the event loop did not come around, in seconds."""
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - began)

    task = asyncio.ensure_future(tick())
    try:
        yield gaps
    finally:
        task.cancel()


async def test_millions_of_empty_elements_cost_what_their_bytes_cost(serve, classifier_store):
    body = part(3, b"goal") + part(_PARAMETERS, part(_LOGIT_BIASES, b"") * 3_500_000)  # 7 MB, 7 KB with gzip
    async with serve(classifier_store) as serving:
        call = serving.channel.unary_unary("/headway.v1.GenerationService/GenerateText")
        await failure_of(call(b""))  # what a first call makes stays
        gc.collect()
        gc.disable()  # refused requests must not wait for it
        tracemalloc.start()
        try:
            with measured_loop() as gaps:
                for _ in range(5):
                    failure = await failure_of(call(body, compression=grpc.Compression.Gzip))
                    assert (failure.code, failure.field) == (
                        grpc.StatusCode.INVALID_ARGUMENT,
                        "parameters.logit_biases",
                    )
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
        assert max(gaps) < 0.5, "some milliseconds, and what the machine does besides"
        assert held < 2 * len(body), "no refused request is kept, but that the last one may be on its way out"
        assert peak < 4 * len(body)


async def test_tensors_of_megabytes_are_read_off_the_event_loop(serving, monkeypatch):
    threads = []

    def read(message, *arguments, **options):
        threads.append(threading.current_thread().name)
        return tensors.read_inputs(message, *arguments, **options)

    monkeypatch.setattr(oip_service, "read_inputs", read)
    stub = inference_grpc.GRPCInferenceServiceStub(serving.channel)
    for size in (10, 4 * 2**20):
        element = len(b"x" * size).to_bytes(4, "little") + b"x" * size
        tensor = inference_pb.ModelInferRequest.InferInputTensor(name="image", datatype="BYTES", shape=[1])
        request = inference_pb.ModelInferRequest(model_name="colours", inputs=[tensor], raw_input_contents=[element])
        assert (await failure_of(stub.ModelInfer(request))).code is grpc.StatusCode.INVALID_ARGUMENT
    assert threads[0] == "MainThread"
    assert threads[1].startswith("preprocessing")


async def test_a_compressed_request_is_held_to_its_decoded_size(serve, classifier_store):
    async with serve(classifier_store, max_message_mib=8) as serving:
        call = serving.channel.unary_unary("/headway.v1.TextClassificationService/ClassifyText")
        for size in (9 * 2**20, 200 * 2**20):  # 9 KB and 200 KB on the wire
            failure = await failure_of(call(part(3, b"a" * size), compression=grpc.Compression.Gzip))
            assert failure.code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
        assert (await serving.texts.ClassifyText(texts_pb.ClassifyTextRequest(texts=["goal"]))).results


async def test_characters_that_normalization_makes_18_of_are_refused(serving):
    request = texts_pb.ClassifyTextRequest(texts=["goal", "\ufdfa" * 87_000], truncate=True)
    failure = await failure_of(serving.texts.ClassifyText(request))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "texts[1]")
    assert "1566000 characters when" in failure.message


async def test_slow_constraints_hold_up_no_neighbours_text():
    async with serving_decoders() as (stub, _):
        slow = [
            asyncio.ensure_future(failure_of(stub.GenerateText(request_with(regex=".*" * 3900 + "a" * index))))
            for index in range(4)
        ]
        await asyncio.sleep(0.1)
        prompt = pb.GenerateTextRequest(
            prompts=["oil prices rose " * 500], truncate=True, parameters=pb.GenerationParameters(max_new_tokens=1)
        )
        await stub.GenerateText(prompt)
        assert not all(call.done() for call in slow)
        assert {failure.code for failure in await asyncio.gather(*slow)} == {grpc.StatusCode.INVALID_ARGUMENT}


@asynccontextmanager
async def second_connection(stub):
    """Gives a stub of the same server over a connection of its own."""
    address = stub.GenerateText._channel.target.decode()
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield pb_grpc.GenerationServiceStub(channel)


async def test_who_guesses_anothers_prompt_learns_nothing_without_its_salt():
    secret = "My account number is 4711 and my diagnosis is a very private matter of the heart. " * 10

    def guess(salt: str) -> pb.GenerateTextRequest:
        parameters = pb.GenerationParameters(max_new_tokens=1)
        return pb.GenerateTextRequest(prompts=[secret], truncate=True, parameters=parameters, cache_salt=salt)

    async with serving_decoders(make_decoder(num_prefix_slots=2)) as (stub, _):
        counts = [
            (await stub.GenerateText(guess(salt))).results[0].cached_prompt_token_count
            for salt in ("hers", "", "his", "hers", "")
        ]
        assert counts[:3] == [0, 0, 0]
        assert min(counts[3:]) > 0
        failure = await failure_of(stub.GenerateText(guess("x" * 257)))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "cache_salt")


async def test_who_guesses_anothers_prompt_over_another_connection_needs_no_salt_to_be_kept_apart():
    async def ask(stub, salt: str = "") -> int:
        request = pb.GenerateTextRequest(
            prompts=["My account number is 4711 and my diagnosis is private. " * 20],
            truncate=True,
            parameters=pb.GenerationParameters(max_new_tokens=1),
            cache_salt=salt,
        )
        return (await stub.GenerateText(request)).results[0].cached_prompt_token_count

    async with serving_decoders(make_decoder(num_prefix_slots=3)) as (stub, _), second_connection(stub) as other:
        assert await ask(stub) == 0
        assert await ask(other) == 0
        assert await ask(other, "shared") == 0
        assert min(await ask(stub, "shared"), await ask(stub), await ask(other)) > 0
