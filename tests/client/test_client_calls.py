"""Every call, through both clients: what is sent, what is answered, what fails and how."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import headway_client
from headway_client import AsyncClient, Client, RetryPolicy, requests, results


class Blocking:
    """Calls the blocking client."""

    kind = Client

    def __init__(self, address: str, **settings: Any) -> None:
        self.client = Client(address, **settings)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self.client, name)(*args, **options)

    def stream(self, name: str, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        with getattr(self.client, name)(*args, **options) as stream:
            return list(stream), stream.answer

    def close(self) -> None:
        self.client.close()


class Asynchronous:
    """Calls the asyncio client, on an event loop of its own."""

    kind = AsyncClient

    def __init__(self, address: str, **settings: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(address, **settings)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        return self.loop.run_until_complete(getattr(self.client, name)(*args, **options))

    def stream(self, name: str, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        async def collect() -> tuple[list[Any], Any]:
            async with getattr(self.client, name)(*args, **options) as stream:
                return [piece async for piece in stream], stream.answer

        return self.loop.run_until_complete(collect())

    def close(self) -> None:
        self.loop.run_until_complete(self.client.close())
        self.loop.close()


Connect = Callable[..., Any]


@pytest.fixture(params=[Blocking, Asynchronous], ids=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of one kind; they are closed after the test."""
    made: list[Any] = []

    def make(address: str, **settings: Any) -> Any:
        made.append(request.param(address, **settings))
        return made[-1]

    yield make
    for caller in made:
        caller.close()


def test_generate_sends_every_option_and_reads_every_field(server: Any, connect: Connect) -> None:
    answer = connect(server.address).call(
        "generate",
        ["one two", "three"],
        model="rule",
        model_version="1",
        truncate=True,
        max_new_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        seed=2**63,
        stop=["."],
    )
    (request,) = server.rules.requests
    assert (request.model, request.model_version, request.truncate) == ("rule", "1", True)
    sampling = request.sampling
    assert (sampling.max_new_token_count, sampling.top_k, sampling.seed) == (5, 3, 2**63)
    assert (sampling.temperature, sampling.top_p, list(sampling.stop_strings)) == (0.5, 0.75, ["."])
    assert answer[0] == results.GeneratedText("one two and so on", results.FinishReason.LENGTH, 2, 5, False, 7)
    assert [result.text for result in answer] == ["one two and so on", "three and so on"]
    assert str(answer.model) == "rule 1 (fp32)"
    assert answer.timings == results.Timings(1.5, 0.25, 0.0, 0.0)


def test_options_that_are_not_given_stay_unset(server: Any, connect: Connect) -> None:
    connect(server.address).call("generate", "one", temperature=0.0)
    sampling = server.rules.requests[0].sampling
    assert sampling.HasField("temperature")
    assert not any(sampling.HasField(name) for name in ("max_new_token_count", "top_k", "top_p", "seed"))


def test_stream_generate_hands_out_pieces_whose_join_is_the_text(server: Any, connect: Connect) -> None:
    pieces, answer = connect(server.address).stream("stream_generate", "one two", max_new_tokens=9)
    assert len(pieces) == 6  # five words and the last message
    assert "".join(piece.text for piece in pieces) == answer[0].text == "one two and so on"
    assert [piece.new_token_count for piece in pieces] == [1, 2, 3, 4, 5, 5]
    assert server.rules.requests[0].sampling.max_new_token_count == 9


def test_translate(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    answer = caller.call("translate", ["a dog"], source_language="en", target_language="de", max_new_tokens=4)
    assert answer[0] == results.TranslatedText("A DOG", -1.5, results.FinishReason.END_OF_SEQUENCE, 2, 2, False)
    (request,) = server.rules.requests
    assert (request.source_language, request.target_language) == ("en", "de")
    assert request.parameters.max_new_token_count == 4
    pieces, streamed = caller.stream("stream_translate", "a dog")
    assert "".join(piece.text for piece in pieces) == "A DOG"
    assert streamed[0] == answer[0]


def test_classify_and_its_kin(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    labels = caller.call("classify", ["good news", "bad"], top_k=2)
    assert labels[0].labels == (results.LabelScore("World", 0.5), results.LabelScore("Sports", 0.25))
    assert len(labels) == 2
    assert caller.call("classify_tokens", "good news")[0].spans == (results.LabeledSpan("noun", 0.5, 0, 4),)
    assert caller.call("embed", "good news")[0].values == (0.5, -0.5)


def test_label_takes_bytes_and_paths(server: Any, connect: Connect, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"four")
    answer = connect(server.address).call("label", [b"one", file, str(file)], top_k=1)
    assert [result.width for result in answer] == [3, 4, 4]
    assert list(server.rules.requests[0].images) == [b"one", b"four", b"four"]
    with pytest.raises(FileNotFoundError):
        connect(server.address).call("label", tmp_path / "absent.png")


def test_models_and_model(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    listing = caller.call("models")
    (model,) = listing
    assert (model.name, model.task, model.parameter_count) == ("rule", results.Task.GENERATION, 1_234_567)
    assert model.default_sampling == results.SamplingDefaults(None, 0.5, None, None)
    assert model.quality[0].value == 90.5
    assert listing.rejected_bundles[0].path == "broken/1"
    assert len(caller.call("models", "translation")) == 0
    assert caller.call("model", "rule").manifest_json == '{"schema_version": 1}'
    with pytest.raises(ValueError, match="juggling"):
        caller.call("models", "juggling")


def test_health_and_readiness(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    assert caller.call("health") is results.HealthStatus.SERVING
    caller.call("wait_ready", 5.0)
    server.rules.serving = False
    assert caller.call("health") is results.HealthStatus.NOT_SERVING
    with pytest.raises(headway_client.DeadlineExceededError, match=r"not ready within 0\.2 s"):
        caller.call("wait_ready", 0.2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("generate", 3, "prompts: a str or a sequence of str"),
        ("generate", ["one", b"two"], r"prompts\[1\]: a str is needed, got bytes"),
        ("classify", b"one", "texts: a str or"),
        ("label", [b"one", 2], r"images\[1\]: bytes or a path"),
    ],
)
def test_a_wrong_type_is_told_before_anything_is_sent(
    server: Any, connect: Connect, name: str, value: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        connect(server.address).call(name, value)
    assert server.rules.requests == []


def test_a_misspelt_option_is_a_type_error(server: Any, connect: Connect) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        connect(server.address).call("generate", "one", max_tokens=3)


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
        connect(server.address).call("classify", ["x"])
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TEXT_TOO_LONG")
    assert error.details.domain == "headway"
    assert error.details.metadata == {"limit": "8"}
    assert error.field_violations[0].field == "texts[3]"
    assert str(error) == "INVALID_ARGUMENT: bad request; texts[3]: the text has 9 tokens, the model reads 8"
    assert error.retry_delay_s is None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, headway_client.NotFoundError),
        (grpc.StatusCode.FAILED_PRECONDITION, headway_client.FailedPreconditionError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, headway_client.ResourceExhaustedError),
        (grpc.StatusCode.CANCELLED, headway_client.CallCancelledError),
        (grpc.StatusCode.UNAUTHENTICATED, headway_client.AccessDeniedError),
        (grpc.StatusCode.DATA_LOSS, headway_client.InternalError),
    ],
)
def test_a_code_has_its_error_and_is_not_tried_again(
    server: Any, connect: Connect, fault: Any, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    server.rules.faults.append(fault(code))
    with pytest.raises(kind):
        connect(server.address).call("generate", "one")
    assert len(server.rules.requests) == 1


def test_a_fault_of_the_server_is_an_internal_error(server: Any, connect: Connect) -> None:
    server.rules.faults.append(None)  # the servicer itself raises
    with pytest.raises(headway_client.InternalError):
        connect(server.address).call("generate", "one")


def test_an_answer_with_too_few_results_is_a_protocol_error() -> None:
    call = requests.generate(["one", "two"])
    reply = call.response_type()
    reply.results.add()
    with pytest.raises(headway_client.ProtocolError, match="1 results to 2 inputs"):
        call.read(reply)


def test_a_stream_without_a_result_is_a_protocol_error(server: Any, connect: Connect) -> None:
    server.rules.omit_result = True
    with pytest.raises(headway_client.ProtocolError, match="ended without its result"):
        connect(server.address).stream("stream_generate", "one")


def test_unavailable_is_tried_again_until_it_succeeds(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.extend([fault(grpc.StatusCode.UNAVAILABLE)] * 2)
    retry = RetryPolicy(initial_backoff_s=0.01)
    assert connect(server.address, retry=retry).call("generate", "one")[0].text == "one and so on"
    assert len(server.rules.requests) == 3


def test_retries_end_with_the_last_attempt(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.extend([fault(grpc.StatusCode.UNAVAILABLE)] * 9)
    caller = connect(server.address, retry=RetryPolicy(max_attempts=3, initial_backoff_s=0.01))
    with pytest.raises(headway_client.UnavailableError):
        caller.call("generate", "one")
    assert len(server.rules.requests) == 3


def test_an_overloaded_server_is_given_the_time_it_asks_for(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_s=0.2))
    caller = connect(server.address, retry=RetryPolicy(initial_backoff_s=0.01))
    assert caller.call("classify", "one")[0].token_count == 1
    first_s, second_s = server.rules.times_s
    assert second_s - first_s >= 0.2


def test_a_wait_past_the_deadline_is_not_begun(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_s=60))
    with pytest.raises(headway_client.ResourceExhaustedError) as caught:
        connect(server.address).call("classify", "one", timeout_s=5)
    assert caught.value.retry_delay_s == 60
    assert len(server.rules.requests) == 1


def test_a_stream_is_tried_again_before_its_first_piece(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.UNAVAILABLE))
    caller = connect(server.address, retry=RetryPolicy(initial_backoff_s=0.01))
    _, answer = caller.stream("stream_generate", "one")
    assert answer[0].text == "one and so on"
    assert len(server.rules.requests) == 2


def test_a_stream_is_not_tried_again_after_its_first_piece(server: Any, connect: Connect, fault: Any) -> None:
    server.rules.fault_after_pieces = fault(grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(headway_client.UnavailableError):
        connect(server.address).stream("stream_generate", "one")
    assert len(server.rules.requests) == 1


def test_a_server_that_goes_away_and_returns_is_found_again(new_server: Any, connect: Connect) -> None:
    new_server.start()
    caller = connect(new_server.address, retry=RetryPolicy(max_attempts=100, initial_backoff_s=0.2))
    assert len(caller.call("generate", "one")) == 1
    new_server.stop()
    with pytest.raises(headway_client.CallError):
        caller.call("generate", "two", timeout_s=0.3)
    new_server.start()
    assert len(caller.call("generate", "three", timeout_s=30)) == 1


def test_a_deadline_ends_the_call_on_both_sides(server: Any, connect: Connect) -> None:
    server.rules.delay_s = 60
    with pytest.raises(headway_client.DeadlineExceededError):
        connect(server.address).call("generate", "one", timeout_s=0.2)
    assert server.rules.cancelled.wait(10)
    with pytest.raises(headway_client.DeadlineExceededError):
        connect(server.address, timeout_s=0.2).stream("stream_generate", "one")


def test_a_closed_client_says_so(server: Any, connect: Connect) -> None:
    caller = connect(server.address, timeout_s=3)
    assert repr(caller.client) == f"<{caller.kind.__name__} {server.address} open, timeout 3 s>"
    caller.call("health")
    if isinstance(caller.client, Client):
        caller.client.close()
    else:
        caller.loop.run_until_complete(caller.client.close())
    assert "closed" in repr(caller.client)
    with pytest.raises(headway_client.ClientClosedError):
        caller.call("health")


def test_a_client_that_is_closed_during_a_wait_ends_the_call(server: Any, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_s=0.5))
    client = Client(server.address)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.classify, "one")
        assert server.rules.admitted.wait(10)
        client.close()
        with pytest.raises(headway_client.HeadwayError, match=r"closed|cancelled|ended"):
            call.result(10)
    assert len(server.rules.requests) == 1


def test_leaving_a_stream_early_frees_the_call_on_the_server(server: Any) -> None:
    server.rules.piece_delay_s = 0.05
    long_prompt = "word " * 2000
    with Client(server.address) as client:
        with client.stream_generate(long_prompt) as stream:
            assert next(stream).text == "word"
            assert "open, 1 tokens" in repr(stream)
            with pytest.raises(headway_client.StreamNotFinishedError):
                _ = stream.answer
        assert server.rules.cancelled.wait(10)
        assert list(stream) == []
        assert "closed" in repr(stream)


async def test_leaving_an_asyncio_stream_early_frees_the_call_on_the_server(server: Any) -> None:
    server.rules.piece_delay_s = 0.05
    async with AsyncClient(server.address) as client:
        async with client.stream_generate("word " * 2000) as stream:
            assert (await anext(stream)).text == "word"
        assert await asyncio.to_thread(server.rules.cancelled.wait, 10)
        assert [piece async for piece in stream] == []


async def test_cancelling_a_task_cancels_its_call(server: Any) -> None:
    server.rules.delay_s = 60
    async with AsyncClient(server.address) as client:
        task = asyncio.create_task(client.generate("one"))
        assert await asyncio.to_thread(server.rules.admitted.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.rules.cancelled.wait, 10)


async def test_closing_a_client_ends_its_calls_with_an_error_of_their_own(server: Any) -> None:
    server.rules.delay_s = 60
    client = AsyncClient(server.address)
    task = asyncio.create_task(client.generate("one"))
    assert await asyncio.to_thread(server.rules.admitted.wait, 10)
    await client.close()
    with pytest.raises(headway_client.CallCancelledError):
        await task


def test_both_clients_have_the_same_methods_and_options() -> None:
    def signatures(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters) for name, method in methods if name[0] != "_"}

    assert signatures(Client) == signatures(AsyncClient)


def test_no_module_of_the_client_brings_in_numpy_or_a_framework() -> None:
    program = (
        "import importlib, pkgutil, sys, headway_client\n"
        "for module in pkgutil.walk_packages(headway_client.__path__, 'headway_client.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(sorted({'torch', 'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
