"""A transport of fifty lines and a family of one small file get what gRPC and the real tasks get.

Neither is known to the server: the transport calls the serving layer, and the family is a line in a table.
"""

import asyncio

import grpc
import pytest
import tiny_bundles
from edge import make_application
from grpc_health.v1 import health_pb2, health_pb2_grpc
from line_transport import LineTransport, ask
from rpc_failures import failure_of
from tiny_family import FAMILY
from waiting import until

from headway.v1 import model_service_pb2, model_service_pb2_grpc
from headway_server.bundles import Task
from headway_server.observers import Observer, Observers
from headway_server.serving.calls import Calls
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings
from headway_server.tasks.table import FAMILIES

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TEXTS = "headway.v1.TextClassificationService"


class Recorder(Observer):
    """Notes what begins and what ends how."""

    def __init__(self) -> None:
        self.started: list[tuple[str, tuple[tuple[str, str], ...]]] = []
        self.finished: list[tuple[str, str]] = []

    def call_started(self, call) -> None:
        self.started.append((call.method, call.metadata))

    def call_finished(self, call, *, error, duration_s) -> None:
        assert duration_s >= 0
        self.finished.append((call.method, type(error).__name__))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def host(tmp_path, runtime):
    tiny_bundles.write_topic_bundle(tmp_path, name="mirror", description="mirror")
    settings = ServerSettings(store=tmp_path, max_text_kib=1)
    return ModelHost.open(runtime, settings, families={**FAMILIES, Task.TEXT_CLASSIFICATION: FAMILY})


@pytest.fixture
def calls(recorder) -> Calls:
    return Calls(max_calls=2, max_bytes=3000, observer=Observers([recorder]))


@pytest.fixture
async def port(host, calls):
    host.start()
    async with LineTransport(host, calls).listening() as port:
        yield port
    host.close()


async def test_it_answers(port, recorder):
    assert await ask(port, texts=["ab", "cd"], user="me") == {"results": ["ba by mirror", "dc by mirror"]}
    assert recorder.started == [("/lines/reverse", (("user", "me"),))]
    assert recorder.finished == [("/lines/reverse", "NoneType")]


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        ({"texts": []}, "InvalidInputError", "texts"),
        ({"texts": ["a", ""]}, "InvalidInputError", "texts[1]"),
        ({"texts": ["a"] * 5}, "InvalidInputError", "texts"),
        ({"texts": ["a" * 1025]}, "InvalidInputError", "texts[0]"),
        ({"texts": ["a"], "model": "other"}, "ModelNotFoundError", None),
    ],
)
async def test_its_inputs_are_held_to_the_same_limits(port, recorder, request_, error, field):
    reply = await ask(port, **request_)
    assert (reply["error"], reply.get("field")) == (error, field)
    assert recorder.finished == [("/lines/reverse", error)]


async def test_its_calls_have_a_deadline(port, calls, recorder):
    reply = await ask(port, texts=["ab"], pause_s=30, timeout_s=0.05)
    assert (reply["error"], calls.num_running) == ("DeadlineError", 0)
    assert recorder.finished == [("/lines/reverse", "DeadlineError")]


async def test_too_many_calls_and_too_many_bytes_are_refused_with_a_time_to_come_back(port, calls):
    slow = [asyncio.create_task(ask(port, texts=["a" * 900], pause_s=0.2)) for _ in range(2)]
    await until(lambda: calls.num_running == 2)
    reply = await ask(port, texts=["ab"])
    assert reply["error"] == "OverloadedError"
    assert "the server has 2 calls waiting, the limit is 2" in reply["message"]
    assert reply["retry_after_s"] > 0
    assert all("results" in reply for reply in await asyncio.gather(*slow))
    slow = [asyncio.create_task(ask(port, texts=["a" * 1000, "b" * 1000], pause_s=0.2))]
    await until(lambda: calls.num_running == 1)
    reply = await ask(port, texts=["a" * 1000])
    assert "bytes of calls waiting, the limit is 3000" in reply["message"]
    await asyncio.gather(*slow)


async def test_what_one_call_is_too_large_for_is_answered_alone(port):
    assert "results" in await ask(port, texts=["a" * 1000] * 4)


async def test_its_calls_are_drained(port, calls):
    running = asyncio.create_task(ask(port, texts=["ab"], pause_s=0.1))
    await until(lambda: calls.num_running == 1)
    calls.refuse_new()
    assert (await ask(port, texts=["ab"]))["error"] == "DrainingError"
    assert not running.done()
    await calls.wait_idle()
    assert await running == {"results": ["ba by mirror"]}


async def test_both_transports_hold_their_calls_to_the_same_limits(host, recorder):
    settings = ServerSettings(store="unused", port=0, max_inflight_mib=1, max_message_mib=1)
    server = make_application(host, settings, observer=recorder)
    grpc_port = await server.start()
    async with (
        LineTransport(host, server.calls).listening() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
    ):
        stub = model_service_pb2_grpc.ModelServiceStub(channel)
        request = model_service_pb2.ListModelsRequest()
        [model] = (await stub.ListModels(request, metadata=[("tenant", "blue"), ("raw-bin", b"\xff")])).models
        assert model.name == "mirror"
        [(method, metadata)] = recorder.started
        assert method == "/headway.v1.ModelService/ListModels"
        assert ("tenant", "blue") in metadata
        assert "raw-bin" not in dict(metadata)
        running = asyncio.create_task(ask(port, texts=["ab"], pause_s=0.5))
        await until(lambda: server.calls.num_running == 1)
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server.calls.is_draining)
        assert (await ask(port, texts=["ab"]))["error"] == "DrainingError"
        failure = await failure_of(stub.ListModels(request))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert not stopping.done()
        assert await running == {"results": ["ba by mirror"]}
        assert await stopping
    assert recorder.finished[-2:] == [
        ("/headway.v1.ModelService/ListModels", "DrainingError"),
        ("/lines/reverse", "NoneType"),
    ]


async def health_of(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until_health(channel: grpc.aio.Channel, service: str, status: int) -> None:
    async with asyncio.timeout(10):
        while await health_of(channel, service) != status:  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.01)


async def test_the_health_of_a_family_is_reported_and_follows_its_heartbeat(host, monkeypatch):
    monkeypatch.setattr("headway_server.services.application._HEALTH_INTERVAL_S", 0.01)
    server = make_application(host, ServerSettings(store="unused", port=0, stall_timeout=0.05))
    port = await server.start()
    [model] = host.models
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await health_of(channel) == await health_of(channel, TEXTS) == SERVING
        model.heartbeat.beat()  # and nothing more: a run that hangs
        await until_health(channel, "", NOT_SERVING)
        assert await health_of(channel, TEXTS) == NOT_SERVING
        assert host.unhealthy(stall_timeout_s=0.05)["mirror/1"].startswith("has made no progress for")
        assert host.unhealthy(stall_timeout_s=0) == {}
        model.heartbeat.rest()  # it goes on after all
        await until_health(channel, "", SERVING)
        await until(lambda: not server._unhealthy)
        assert await health_of(channel, TEXTS) == SERVING
        await host.unload("mirror", "1")  # on purpose
        await until_health(channel, TEXTS, NOT_SERVING)
        assert await health_of(channel) == SERVING
        assert await server.stop()


async def test_a_server_whose_thread_hangs_stops_all_the_same_and_says_so(host):
    server = make_application(host, ServerSettings(store="unused", port=0))
    await server.start()
    host.models[0].hang.set()
    assert not await server.stop()


def test_a_family_is_imported_with_its_first_bundle():
    """Serving knows families by name alone: importing it imports no task."""
    import subprocess
    import sys

    program = "import sys, headway_server.serving.host\nprint([n for n in sys.modules if 'headway_server.tasks' in n])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
