"""What happens around a call, unary and streaming, with a servicer that does as its prompt says."""

import asyncio

import grpc
import pytest
import structlog
from edge import make_interceptor
from rpc_failures import failure_of
from waiting import until

from headway.v1 import generation_service_pb2 as pb
from headway.v1 import generation_service_pb2_grpc as pb_grpc
from headway_server.errors import InvalidInputError
from headway_server.serving.calls import Calls


class PanicException(BaseException):
    """Named as what libraries written in Rust raise; it is no Exception."""


class Obedient:
    """Answers "pieces", refuses "bad", breaks on "bug" and "panic", and waits on "wait"."""

    def __init__(self) -> None:
        self.closed = 0

    async def _obey(self, prompt):
        if prompt == "bad":
            raise InvalidInputError("prompt", "is bad")
        if prompt == "bug":
            raise KeyError("internals")
        if prompt == "panic":
            raise PanicException("internals")
        if prompt == "wait":
            await asyncio.Event().wait()

    async def GenerateText(self, request, _deadline):  # noqa: N802 (the method's name in the protocol)
        await self._obey(request.prompts[0])
        return pb.GenerateTextResponse(results=[pb.GeneratedText(text="pieces")])

    async def StreamGenerateText(self, request, _deadline):  # noqa: N802 (the method's name in the protocol)
        try:
            yield pb.StreamGenerateTextResponse(text_delta="pie")
            await self._obey(request.prompt)
            yield pb.StreamGenerateTextResponse(text_delta="ces")
        finally:
            self.closed += 1


@pytest.fixture
def servicer() -> Obedient:
    return Obedient()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
async def channel(servicer, calls):
    server = grpc.aio.server(interceptors=[make_interceptor({"GenerationService": servicer}, calls)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


@pytest.fixture
def stub(channel):
    return pb_grpc.GenerationServiceStub(channel)


async def unary(stub, prompt):
    return (await stub.GenerateText(pb.GenerateTextRequest(prompts=[prompt]))).results[0].text


async def stream(stub, prompt):
    call = stub.StreamGenerateText(pb.StreamGenerateTextRequest(prompt=prompt))
    return "".join([response.text_delta async for response in call])


@pytest.mark.parametrize("call", [unary, stream])
async def test_answers_pass_through(stub, call):
    assert await call(stub, "go") == "pieces"


@pytest.mark.parametrize("call", [unary, stream])
async def test_errors_become_statuses_with_details(stub, calls, call):
    failure = await failure_of(call(stub, "bad"))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT")
    assert (failure.field, failure.message) == ("prompt", "prompt: is bad")
    await until(lambda: calls.num_running == 0)


@pytest.mark.parametrize("call", [unary, stream])
@pytest.mark.parametrize("prompt", ["bug", "panic"])
async def test_bugs_and_panics_become_incidents(stub, calls, call, prompt):
    failure = await failure_of(call(stub, prompt))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "internals" not in failure.message
    await until(lambda: calls.num_running == 0)


async def test_a_stream_that_its_caller_leaves_is_closed(stub, servicer, calls):
    call = stub.StreamGenerateText(pb.StreamGenerateTextRequest(prompt="wait"))
    assert (await call.read()).text_delta == "pie"
    assert calls.num_running == 1
    call.cancel()
    await until(lambda: servicer.closed == 1 and calls.num_running == 0)


async def test_a_deadline_ends_a_stream(stub, servicer, calls):
    call = stub.StreamGenerateText(pb.StreamGenerateTextRequest(prompt="wait"), timeout=0.2)
    failure = await failure_of(read_all(call))
    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: servicer.closed == 1 and calls.num_running == 0)


async def read_all(call):
    return [response async for response in call]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff\xff\xff", id="no message"),
        pytest.param(b"\x1a\x03\xed\xa0\x80", id="a lone surrogate in a prompt"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_bytes_that_are_no_request_are_refused(stub, channel, calls, data, streams):
    name = f"/headway.v1.GenerationService/{'StreamGenerateText' if streams else 'GenerateText'}"
    call = channel.unary_stream(name)(data) if streams else channel.unary_unary(name)(data)
    with structlog.testing.capture_logs() as lines:
        failure = await failure_of(read_all(call) if streams else call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT")
    assert failure.field == "request"
    assert "UTF-8" in failure.message
    assert lines == []
    await until(lambda: calls.num_running == 0)


@pytest.mark.parametrize("call", [unary, stream])
async def test_new_calls_are_refused_while_draining_and_running_ones_are_waited_for(stub, calls, call):
    running = stub.GenerateText(pb.GenerateTextRequest(prompts=["wait"]))
    await until(lambda: calls.num_running == 1)
    idle = asyncio.create_task(calls.wait_idle())
    calls.refuse_new()
    failure = await failure_of(call(stub, "go"))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert not idle.done()
    running.cancel()
    await idle
