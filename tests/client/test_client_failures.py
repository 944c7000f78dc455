"""How calls fail, through both clients: errors, retries, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

import headway_client
from headway_client import NO_RETRIES, AsyncClient, Client, LoadBalancing, RetryPolicy, requests
from headway_client.errors import from_rpc_error
from headway_client.retry import Attempts, RetryBudget

Connect = Callable[..., Any]


class Relay:
    """A port whose connections lead to a server, and are cut whenever a request has arrived there."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._is_open = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)
        self._start(self._cut_at_each_request)

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=function, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._server.port))
                self._ends += [near, far]
                self._start(self._copy, near, far)
                self._start(self._copy, far, near)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _cut_at_each_request(self) -> None:
        num_seen = 0
        while self._is_open:
            if len(self._server.rules.requests) > num_seen:
                num_seen = len(self._server.rules.requests)
                self._cut()
            time.sleep(0.005)

    def _cut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._cut()
        for thread in self._threads[1:]:
            thread.join()
        for end in self._ends:
            end.close()


def test_an_error_carries_its_details(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.append(
        fault(
            grpc.StatusCode.INVALID_ARGUMENT,
            message="bad request",
            reason="TEXT_TOO_LONG",
            violations={"texts[3]": "the text has 9 tokens, the model reads 8"},
        )
    )
    with pytest.raises(headway_client.InvalidArgumentError) as caught:
        connect(server.address).call("classify_text", ["x"])
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TEXT_TOO_LONG")
    assert error.details.domain == "headway"
    assert error.details.metadata == {"limit": "8"}
    assert error.field_violations[0].field == "texts[3]"
    assert str(error) == "INVALID_ARGUMENT: bad request; texts[3]: the text has 9 tokens, the model reads 8"
    assert error.retry_delay_s is None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.fixture(scope="module")
def client(shared_rule_server: Any) -> Iterator[Client]:
    """A client that tries three times, and shares its connection between the tests."""
    policy = RetryPolicy(max_attempts=3, initial_backoff_s=0.001, max_backoff_s=0.001, budget=0)
    with Client(shared_rule_server.address, retry=policy) as client:
        yield client


KINDS = {
    "CANCELLED": headway_client.CallCancelledError,
    "INVALID_ARGUMENT": headway_client.InvalidArgumentError,
    "OUT_OF_RANGE": headway_client.InvalidArgumentError,
    "DEADLINE_EXCEEDED": headway_client.DeadlineExceededError,
    "NOT_FOUND": headway_client.NotFoundError,
    "PERMISSION_DENIED": headway_client.PermissionDeniedError,
    "UNAUTHENTICATED": headway_client.UnauthenticatedError,
    "RESOURCE_EXHAUSTED": headway_client.ResourceExhaustedError,
    "FAILED_PRECONDITION": headway_client.FailedPreconditionError,
    "UNIMPLEMENTED": headway_client.UnimplementedError,
    "INTERNAL": headway_client.InternalError,
    "UNAVAILABLE": headway_client.UnavailableError,
    "UNKNOWN": headway_client.UnexpectedStatusError,
    "ABORTED": headway_client.UnexpectedStatusError,
    "ALREADY_EXISTS": headway_client.UnexpectedStatusError,
    "DATA_LOSS": headway_client.UnexpectedStatusError,
}
CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
IN_WORDS = (
    "told to fail",
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused",
    "no healthy upstream",
    "CANCELLED",
    "Socket closed",
)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_every_code_has_its_error(server: Any, connect: Connect, fault: Any, code: grpc.StatusCode) -> None:
    server.rules.faults.append(fault(code, reason="BECAUSE"))
    with pytest.raises(headway_client.CallError) as caught:
        connect(server.address, retry=NO_RETRIES).call("generate_text", "one")
    assert (type(caught.value), caught.value.code) == (KINDS[code.name], code)


@pytest.mark.parametrize("details", [{}, {"reason": "BECAUSE"}, {"retry_delay_s": 0.001}], ids="".join)
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_whether_a_call_is_tried_again_is_said_by_code_and_details_and_not_by_words(
    server: Any, client: Client, fault: Any, code: grpc.StatusCode, details: dict[str, Any]
) -> None:
    most = {
        "UNAVAILABLE": 3 if details else 2,  # without details the connection may have broken
        "CANCELLED": 1 if details else 2,
        "RESOURCE_EXHAUSTED": 3 if "retry_delay_s" in details else 1,
    }
    for message in IN_WORDS:
        server.rules.requests.clear()
        server.rules.faults.clear()
        server.rules.faults.extend([fault(code, message=message, **details)] * 3)
        with pytest.raises(headway_client.CallError):
            client.generate_text("one")
        assert len(server.rules.requests) == most.get(code.name, 1), message


@pytest.mark.parametrize(
    ("before", "after", "is_sent"),
    [
        ("READY", "IDLE", True),  # pick-first lets go of what broke
        ("READY", "CONNECTING", True),  # round-robin connects again
        ("READY", "TRANSIENT_FAILURE", True),
        ("READY", "READY", True),  # a proxy answered, or another server took over
        ("IDLE", "IDLE", True),
        ("TRANSIENT_FAILURE", "READY", True),
        ("IDLE", "TRANSIENT_FAILURE", False),
        ("CONNECTING", "TRANSIENT_FAILURE", False),
        ("TRANSIENT_FAILURE", "TRANSIENT_FAILURE", False),
    ],
)
def test_whether_a_call_without_an_answer_was_sent_is_told_by_the_connection(
    before: str, after: str, is_sent: bool
) -> None:
    policy = RetryPolicy(max_broken=1, budget=2)
    states = iter([grpc.ChannelConnectivity[before], *[grpc.ChannelConnectivity[after]] * 2])
    attempts = Attempts(policy, 60, RetryBudget(policy), lambda: next(states))
    assert attempts.begin() > 59
    lost = headway_client.UnavailableError("whatever is said", grpc.StatusCode.UNAVAILABLE)
    assert (attempts.delay_s(lost) is None) is is_sent


class Refused(grpc.RpcError):
    """A refusal whose details are `data`."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "too much"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("grpc-status-details-bin", self._data),)


def details_of(*packed: tuple[str, bytes]) -> bytes:
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="too much")
    for name, value in packed:
        status.details.add(type_url=f"type.googleapis.com/google.rpc.{name}", value=value)
    return status.SerializeToString()


def delay(seconds: int) -> tuple[str, bytes]:
    return "RetryInfo", error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds)).SerializeToString()


@pytest.mark.parametrize(
    ("data", "retry_delay_s"),
    [
        (b"\xff\xff", None),
        (details_of(("ErrorInfo", b"\xff"), ("BadRequest", b"\xff"), ("RetryInfo", b"\xff")), None),
        (details_of(("ErrorInfo", b"\xff"), delay(2)), 2.0),
        (details_of(delay(2**62)), 2.0**62),
        (details_of(delay(-5)), 0.0),
    ],
)
def test_details_that_cannot_be_read_are_left_out(data: bytes, retry_delay_s: float | None) -> None:
    error = from_rpc_error(Refused(data))
    assert type(error) is headway_client.ResourceExhaustedError
    assert (error.message, error.reason, error.retry_delay_s) == ("too much", "", retry_delay_s)


def test_a_call_that_the_client_itself_ended_is_not_tried_again() -> None:
    attempts = Attempts(RetryPolicy(), 60, RetryBudget(RetryPolicy()), lambda: grpc.ChannelConnectivity.SHUTDOWN)
    attempts.begin()
    ended = headway_client.CallCancelledError("whatever is said", grpc.StatusCode.CANCELLED)
    assert attempts.delay_s(ended) is None


def test_a_fault_of_another_server_has_a_code_that_headway_never_answers(server: Any, connect: Connect) -> None:
    server.rules.faults.append(None)  # the servicer itself raises
    with pytest.raises(headway_client.UnexpectedStatusError):
        connect(server.address).call("generate_text", "one")


def test_an_answer_with_too_few_results_is_a_protocol_error() -> None:
    call = requests.generate_text(["one", "two"])
    reply = call.response_type()
    reply.results.add()
    with pytest.raises(headway_client.ProtocolError, match="1 results; expected 2"):
        call.read(reply)


def test_a_stream_without_a_result_is_a_protocol_error(server: Any, connect: Connect) -> None:
    server.rules.omit_result = True
    with pytest.raises(headway_client.ProtocolError, match="ended without its result"):
        connect(server.address).stream("stream_generate_text", "one")


def test_unavailable_is_tried_again_until_it_succeeds(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.extend([fault(grpc.StatusCode.UNAVAILABLE, reason="DRAINING")] * 9)
    retry = RetryPolicy(initial_backoff_s=0.01, max_backoff_s=0.01)
    assert connect(server.address, retry=retry).call("generate_text", "one")[0].text == "one and so on"
    assert len(server.rules.requests) == 10


def test_attempts_go_on_until_the_deadline(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.extend([fault(grpc.StatusCode.UNAVAILABLE, reason="DRAINING")] * 1000)
    caller = connect(server.address, retry=RetryPolicy(initial_backoff_s=0.02, max_backoff_s=0.02))
    began_s = time.monotonic()
    with pytest.raises(headway_client.CallError):
        caller.call("generate_text", "one", timeout_s=1)
    assert 0.8 < time.monotonic() - began_s < 2
    assert len(server.rules.requests) > 10


@pytest.mark.parametrize("balancing", list(LoadBalancing))
def test_a_call_whose_connection_broke_is_sent_once_more_and_no_oftener(
    server: Any, connect: Connect, balancing: LoadBalancing
) -> None:
    server.rules.delay_s = 60
    with Relay(server) as relay:
        caller = connect(relay.address, load_balancing=balancing, retry=RetryPolicy(initial_backoff_s=0.01))
        with pytest.raises(headway_client.CallError) as caught:
            caller.call("generate_text", "one", timeout_s=20)
    assert not isinstance(caught.value, headway_client.DeadlineExceededError)
    assert len(server.rules.requests) == 2


@pytest.mark.parametrize("balancing", list(LoadBalancing))
def test_a_call_that_was_never_sent_is_tried_again_whatever_the_budget_until_a_server_is_there(
    new_server: Any, connect: Connect, balancing: LoadBalancing
) -> None:
    new_server.start()
    new_server.stop()
    caller = connect(
        new_server.address,
        load_balancing=balancing,
        retry=RetryPolicy(budget=8, initial_backoff_s=0.01, max_backoff_s=0.02),
    )
    starter = threading.Timer(0.4, new_server.start)
    starter.start()
    assert caller.call("generate_text", "one", timeout_s=20)[0].text == "one and so on"
    starter.join()


def test_retries_end_with_the_last_attempt(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.extend([fault(grpc.StatusCode.UNAVAILABLE, reason="DRAINING")] * 9)
    caller = connect(server.address, retry=RetryPolicy(max_attempts=3, initial_backoff_s=0.01))
    with pytest.raises(headway_client.UnavailableError):
        caller.call("generate_text", "one")
    assert len(server.rules.requests) == 3


def test_an_overloaded_server_is_given_the_time_it_asks_for(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_s=0.2))
    caller = connect(server.address, retry=RetryPolicy(initial_backoff_s=0.01))
    assert caller.call("classify_text", "one")[0].token_count == 1
    first_s, second_s = server.rules.times_s
    assert second_s - first_s >= 0.2


def test_a_wait_past_the_deadline_is_not_begun(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_s=60))
    with pytest.raises(headway_client.ResourceExhaustedError) as caught:
        connect(server.address).call("classify_text", "one", timeout_s=5)
    assert caught.value.retry_delay_s == 60
    assert len(server.rules.requests) == 1


def test_a_stream_is_tried_again_before_its_first_delta(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.UNAVAILABLE))
    caller = connect(server.address, retry=RetryPolicy(initial_backoff_s=0.01))
    _, answer = caller.stream("stream_generate_text", "one")
    assert answer[0].text == "one and so on"
    assert len(server.rules.requests) == 2


def test_a_stream_is_not_tried_again_after_its_first_delta(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.fault_after_deltas = fault(grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(headway_client.UnavailableError):
        connect(server.address).stream("stream_generate_text", "one")
    assert len(server.rules.requests) == 1


def test_a_server_that_goes_away_and_returns_is_found_again(new_server: Any, connect: Connect) -> None:
    new_server.start()
    caller = connect(new_server.address, retry=RetryPolicy(max_attempts=100, initial_backoff_s=0.2))
    assert len(caller.call("generate_text", "one")) == 1
    new_server.stop()
    with pytest.raises(headway_client.CallError):
        caller.call("generate_text", "two", timeout_s=0.3)
    new_server.start()
    assert len(caller.call("generate_text", "three", timeout_s=30)) == 1


def test_a_deadline_ends_the_call_on_both_sides(server: Any, connect: Connect) -> None:
    server.rules.delay_s = 60
    with pytest.raises(headway_client.DeadlineExceededError):
        connect(server.address).call("generate_text", "one", timeout_s=0.2)
    assert server.rules.cancelled.wait(10)
    with pytest.raises(headway_client.DeadlineExceededError):
        connect(server.address, timeout_s=0.2).stream("stream_generate_text", "one")


def test_a_closed_client_says_so(server: Any, connect: Connect) -> None:
    caller = connect(server.address, timeout_s=3)
    assert repr(caller.client) == f"<{caller.kind.__name__} {server.address} open, timeout 3 s>"
    caller.call("health")
    if isinstance(caller.client, Client):
        caller.client.close()
    else:
        caller.loop.run_until_complete(caller.client.aclose())
    assert "closed" in repr(caller.client)
    with pytest.raises(headway_client.ClientClosedError):
        caller.call("health")


def test_a_client_that_is_closed_during_a_wait_ends_the_call(server: Any, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_s=0.5))
    client = Client(server.address)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.classify_text, "one")
        assert server.rules.admitted.wait(10)
        client.close()
        with pytest.raises(headway_client.HeadwayError, match=r"closed|cancelled|ended"):
            call.result(10)
    assert len(server.rules.requests) == 1


def test_leaving_a_stream_early_frees_the_call_on_the_server(server: Any) -> None:
    server.rules.delta_delay_s = 0.05
    long_prompt = "word " * 2000
    with Client(server.address) as client:
        with client.stream_generate_text(long_prompt) as stream:
            assert next(stream).text == "word"
            assert "open, 1 tokens" in repr(stream)
            with pytest.raises(headway_client.StreamNotFinishedError):
                _ = stream.answer
        assert server.rules.cancelled.wait(10)
        assert list(stream) == []
        assert "closed" in repr(stream)


async def test_leaving_an_asyncio_stream_early_frees_the_call_on_the_server(server: Any) -> None:
    server.rules.delta_delay_s = 0.05
    async with AsyncClient(server.address) as client:
        async with client.stream_generate_text("word " * 2000) as stream:
            assert (await anext(stream)).text == "word"
        assert await asyncio.to_thread(server.rules.cancelled.wait, 10)
        assert [delta async for delta in stream] == []


def wait_for_failure(stream: Any) -> None:
    """Waits until the first attempt of a stream has failed, and the stream waits for the next one."""
    while not stream._attempts._failed_count:
        time.sleep(0.01)


async def test_an_asyncio_stream_that_is_closed_while_it_waits_to_retry_is_not_opened_again(
    server: Any, fault: Any
) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_s=30))
    async with AsyncClient(server.address) as client:
        stream = client.stream_generate_text("one")
        reader = asyncio.create_task(anext(stream))
        await asyncio.to_thread(wait_for_failure, stream)
        await stream.aclose()
        with pytest.raises(headway_client.CallCancelledError):
            await asyncio.wait_for(reader, 5)
        assert [delta async for delta in stream] == []
    assert len(server.rules.requests) == 1


def test_a_stream_that_is_closed_while_it_waits_to_retry_is_not_opened_again(server: Any, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_s=30))
    with Client(server.address) as client, ThreadPoolExecutor(1) as pool:
        stream = client.stream_generate_text("one")
        reader = pool.submit(next, stream)
        wait_for_failure(stream)
        stream.close()
        with pytest.raises(headway_client.CallCancelledError):
            reader.result(5)
    assert len(server.rules.requests) == 1


async def test_cancelling_a_task_cancels_its_call(server: Any) -> None:
    server.rules.delay_s = 60
    async with AsyncClient(server.address) as client:
        task = asyncio.create_task(client.generate_text("one"))
        assert await asyncio.to_thread(server.rules.admitted.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.rules.cancelled.wait, 10)


async def test_closing_a_client_ends_its_calls_with_an_error_of_their_own(server: Any) -> None:
    server.rules.delay_s = 60
    client = AsyncClient(server.address)
    task = asyncio.create_task(client.generate_text("one"))
    assert await asyncio.to_thread(server.rules.admitted.wait, 10)
    await client.aclose()
    with pytest.raises(headway_client.CallCancelledError):
        await task
