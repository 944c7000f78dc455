"""What callers can hold by sending nothing, reading nothing, or opening much: attacks that succeed no more."""

import asyncio
import time
from collections import Counter
from contextlib import ExitStack

import grpc
import pytest
import structlog
from edge import make_application
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2_caller import Caller, frame
from rpc_failures import failure_of
from tiny_engine import make_decoder, make_generation_model
from waiting import until

from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc
from headway_server.errors import DeadlineError, OverloadedError
from headway_server.serving.host import ModelHost
from headway_server.serving.peer_waits import PeerWaits, WaitLimits
from headway_server.settings import ServerSettings
from headway_server.transports.grpc.interceptor import receive, send

CLASSIFY = "/headway.v1.TextClassificationService/ClassifyText"
HEALTH = "/grpc.health.v1.Health"
GENERATE = "/headway.v1.GenerationService/StreamGenerateText"
TEXT = texts_pb.ClassifyTextRequest(texts=["goal"])


def sweep(waits, seconds: float) -> None:
    """Looks at waits as often as it takes, as if so many seconds had passed."""
    for _ in range(4):
        waits.sweep(time.monotonic() + seconds)


async def new_channel_answers(port: int) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert (await check).status == health_pb2.HealthCheckResponse.SERVING
        assert (await texts_grpc.TextClassificationServiceStub(channel).ClassifyText(TEXT, timeout=5)).results


async def test_thousands_of_calls_at_once_are_answered_and_none_is_cancelled(serving):
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{serving.port}", options=options) for _ in range(8)]
    stubs = [texts_grpc.TextClassificationServiceStub(channel) for channel in channels]
    calls = [stubs[number % 8].ClassifyText(TEXT, timeout=60) for number in range(4000)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    codes = {error.code() for error in outcomes if isinstance(error, grpc.aio.AioRpcError)}
    assert codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert sum(isinstance(outcome, texts_pb.ClassifyTextResponse) for outcome in outcomes) > 2000
    await asyncio.gather(*(channel.close() for channel in channels))


async def test_health_watches_and_headers_alone_shut_nobody_out(serve, classifier_store):
    async with serve(classifier_store, max_calls=50) as serving:
        watches = [
            health_pb2_grpc.HealthStub(serving.channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(40)
        ]
        states = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        refused = [state for state in states if isinstance(state, grpc.aio.AioRpcError)]
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(refused) == 40 - 16
        with Caller(serving.port) as caller:
            for _ in range(100):
                caller.begin(CLASSIFY)
                caller.begin("/grpc.health.v1.Health/Check")
            await asyncio.to_thread(caller.read, 0.2)
            await new_channel_answers(serving.port)
        for watch in watches:
            watch.cancel()


async def test_a_health_watch_that_nobody_reads_keeps_no_state_from_being_told(serve, classifier_store):
    async with serve(classifier_store) as serving:
        with Caller(serving.port, window=0) as caller:
            caller.send(caller.begin(f"{HEALTH}/Watch"), frame(b""))
            await until(lambda: len(serving.server.callers._unread) == 1)
            reader = health_pb2_grpc.HealthStub(serving.channel).Watch(health_pb2.HealthCheckRequest())
            assert (await reader.read()).status == health_pb2.HealthCheckResponse.SERVING
            serving.server.health.set("", is_serving=False)
            assert (await asyncio.wait_for(reader.read(), 5)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            reader.cancel()
            sweep(serving.server.callers._unread, 3600)
            await until(lambda: not serving.server.callers._lasting)


@pytest.mark.parametrize(
    "method",
    [
        f"{HEALTH}/Check",
        f"{HEALTH}/Watch",
        "/inference.GRPCInferenceService/ModelReady",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
@pytest.mark.parametrize(
    "request_bytes", [b"\xff", b"\x0a\x80\x80\x05" + b"x" * 81920], ids=["no message", "too large"]
)
async def test_what_is_no_request_of_health_or_reflection_is_invalid(serving, method, request_bytes):
    with Caller(serving.port) as caller, structlog.testing.capture_logs() as lines:
        stream = caller.begin(method)
        for start in range(0, len(data := frame(request_bytes)), 16384):
            caller.send(stream, data[start : start + 16384], ends=start + 16384 >= len(data))
            await asyncio.to_thread(caller.read, 0.05)
        assert await asyncio.to_thread(caller.status, stream, 10) == "3"  # INVALID_ARGUMENT
    assert lines == []


async def test_a_body_that_never_ends_is_cut_off(serve, classifier_store):
    async with serve(classifier_store, connection={"request_timeout": 1}) as serving:
        with Caller(serving.port) as caller:
            stream = caller.begin(CLASSIFY)
            caller.send(stream, frame(TEXT.SerializeToString())[:-1], ends=False)
            status = await asyncio.to_thread(caller.status, stream, 10)
        assert status == "4"  # DEADLINE_EXCEEDED
        await new_channel_answers(serving.port)


async def test_streams_that_nobody_reads_hold_no_permits():
    model = make_generation_model(make_decoder(num_slots=2), max_waiting=2)
    server = make_application(ModelHost([model]), ServerSettings(store="none", port=0))
    port = await server.start()
    request = frame(generation_pb.StreamGenerateTextRequest(prompt="the cat").SerializeToString())
    with Caller(port, window=0) as caller:
        for number in range(12):
            stream = caller.begin(GENERATE)
            caller.send(stream, request)
            await until(lambda most=number + 1: server.calls.num_running == most)
            await until(lambda: model._admission.num_admitted == 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = generation_grpc.GenerationServiceStub(channel)
            assert (await stub.GenerateText(generation_pb.GenerateTextRequest(prompts=["the cat"]), timeout=10)).results
        assert server.calls.num_running == 12
        sweep(server.callers._unread, 3600)
        await until(lambda: server.calls.num_running == 0)
    await server.stop()


@pytest.fixture
def callers():
    limits = WaitLimits(timeout_s=5, max_slow=2, max_waits=4)
    return PeerWaits(requests=limits, answers=limits, max_lasting=3, max_lasting_per_connection=2)


class Silent:
    """A context whose caller sends nothing."""

    async def read(self):
        await asyncio.Event().wait()

    async def write(self, _):
        await asyncio.Event().wait()


async def test_the_calls_that_have_waited_longest_make_room(callers):
    waits = [asyncio.create_task(receive(callers, Silent())) for _ in range(6)]
    await until(waits[1].done)
    assert [wait.done() for wait in waits] == [True, True, False, False, False, False]
    assert isinstance(waits[0].exception(), OverloadedError)
    sweep(callers._arriving, 2)  # all four are slow by now
    await until(waits[3].done)
    assert [wait.done() for wait in waits] == [True] * 4 + [False, False]
    sweep(callers._arriving, 6)
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OverloadedError] * 4 + [DeadlineError] * 2


async def test_a_call_is_not_slow_where_the_event_loop_is_late(callers):
    waits = [asyncio.create_task(receive(callers, Silent())) for _ in range(4)]
    await asyncio.sleep(0)
    callers._arriving.sweep(time.monotonic() + 6)
    await asyncio.sleep(0.01)
    assert not any(wait.done() for wait in waits)
    for wait in waits:
        wait.cancel()


async def test_bodies_that_never_end_hold_what_is_said_at_start(serve, classifier_store):
    async with serve(classifier_store, max_message_mib=1, connection={"max_arriving_mib": 4}) as serving:
        with ExitStack() as stack:
            opened = [stack.enter_context(Caller(serving.port)) for _ in range(7)]
            streams = [caller.begin(CLASSIFY) for caller in opened]
            await until(lambda: len(serving.server.callers._arriving) == 7)
            await until(lambda: len(serving.server.callers._arriving) == 4)
            await new_channel_answers(serving.port)
            begun = zip(opened, streams, strict=True)
            ends = await asyncio.gather(*(asyncio.to_thread(caller.status, stream, 0.5) for caller, stream in begun))
            assert Counter(ends) == {"8": 3, None: 4}, "RESOURCE_EXHAUSTED, and nothing yet"


async def test_streams_of_requests_have_as_many_places_as_half_requests():
    limits = WaitLimits(timeout_s=5, max_slow=2)
    callers = PeerWaits(requests=limits, answers=limits, max_lasting=9, max_lasting_per_connection=9, max_receiving=2)
    with (
        callers.lasting("a", receives=True),
        callers.lasting("b", receives=True),
        callers.lasting("b"),
        pytest.raises(OverloadedError, match="there are 2 streams of requests"),
        callers.lasting("c", receives=True),
    ):
        pass
    with callers.lasting("c", receives=True):
        pass


async def test_a_call_that_is_cancelled_while_it_waits_is_just_cancelled(callers):
    wait = asyncio.create_task(send(callers, Silent(), "message"))
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert repr(callers) == "PeerWaits(0 arriving, 0 unread, 0 lasting)"


async def test_request_ids_are_taken_or_made_and_given_back(serving):
    call = serving.texts.ClassifyText(TEXT, metadata=[("x-request-id", "abc-1")])
    await call
    assert dict(await call.trailing_metadata())["x-request-id"] == "abc-1"
    for given in ("", "with space", "x" * 129):
        call = serving.texts.ClassifyText(TEXT, metadata=[("x-request-id", given)])
        await call
        assert len(dict(await call.trailing_metadata())["x-request-id"]) == 16
    failure = await failure_of(serving.texts.ClassifyText(texts_pb.ClassifyTextRequest()))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    call = serving.texts.ClassifyText(texts_pb.ClassifyTextRequest(), metadata=[("x-request-id", "abc-2")])
    assert dict(await call.trailing_metadata())["x-request-id"] == "abc-2"


async def test_an_answer_is_compressed_for_who_asks(serving):
    with Caller(serving.port) as caller:
        encodings = []
        for metadata in ([], [("accept-encoding", "br, gzip")]):
            stream = caller.begin(CLASSIFY, ("grpc-accept-encoding", "identity,gzip"), *metadata)
            caller.send(stream, frame(TEXT.SerializeToString()))
            assert await asyncio.to_thread(caller.status, stream, 10) == "0"
            encodings.append(caller.header(stream, b"grpc-encoding"))
    assert encodings == [None, "gzip"]
