"""ModelStreamInfer by the real Triton client: text in pieces, many requests at once, errors, cancelling, draining."""

import asyncio
import tracemalloc
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from open_inference import GENERATION, TRANSLATION, infer_request, text
from tiny_bundles import TOPICS
from tiny_engine import EOS_ID, make_decoder, make_generation_model, slow_down
from triton_client import Received
from waiting import until

from headway.oip import grpc_predict_v2_pb2_grpc as pb_grpc
from headway_server.errors import OverloadedError
from headway_server.services import StreamedCalls
from headway_server.services.open_inference.service import OpenInferenceService
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings

DRAWN = {"temperature": 1.0, "seed": 5, "max_new_tokens": 30}


def texts_by_request(received: Received, output: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    for answer in received.answers:
        texts[answer.request_id] = texts.get(answer.request_id, "") + answer.arrays[output][0].decode()
    return texts


def test_text_comes_in_pieces_that_make_the_whole_and_the_last_is_marked(triton):
    whole = triton("infer", GENERATION, {"text": text("the cat")}, parameters=DRAWN).arrays
    received = triton("stream", [(GENERATION, {"text": text("the cat")}, {"parameters": DRAWN})])
    assert texts_by_request(received, "generated_text") == {"0": whole["generated_text"][0].decode()}
    assert len(received.answers) > 1  # a reader that comes late finds pieces joined
    assert [answer.is_final for answer in received.answers] == [False] * (len(received.answers) - 1) + [True]
    last = received.answers[-1].arrays
    assert {name: array.tolist() for name, array in last.items()} == {
        name: array.tolist() for name, array in whole.items()
    } | {"generated_text": [b""]}
    counts = [answer.arrays["new_token_count"].item() for answer in received.answers]
    assert counts == sorted(counts)


def test_a_client_that_asks_for_an_empty_last_response_finds_its_mark(triton):
    options = {"parameters": DRAWN, "enable_empty_final_response": True}
    received = triton("stream", [(GENERATION, {"text": text("the cat")}, options)])
    assert received.answers[-1].is_final


def test_many_requests_share_a_stream_and_each_answer_has_its_id(triton):
    words = [(topic, word) for topic, members in TOPICS.items() for word in members] * 10
    requests = [("topics", {"text": text(word)}, {}) for _, word in words]
    prompts = [(GENERATION, {"text": text("the dog")}, {"parameters": DRAWN}), (TRANSLATION, {"text": text("a")}, {})]
    received = triton("stream", [*requests, *prompts])
    assert not received.errors
    labels = {
        answer.request_id: answer.arrays["label"][0, 0].decode()
        for answer in received.answers
        if answer.model[0] == "topics"
    }
    assert labels == {str(number): topic for number, (topic, _) in enumerate(words)}
    generated = Received([answer for answer in received.answers if answer.model[0] == GENERATION])
    alone = triton("infer", GENERATION, {"text": text("the dog")}, parameters=DRAWN).arrays
    assert texts_by_request(generated, "generated_text") == {str(len(words)): alone["generated_text"][0].decode()}


def test_the_asyncio_client_streams_several_texts_at_once(triton):
    prompts = ["the cat", "the dog", "a mat"]
    whole = triton("infer", GENERATION, {"text": text(*prompts)}, parameters=DRAWN).arrays["generated_text"]
    streamed = triton("stream_in_asyncio", GENERATION, prompts, DRAWN)
    assert [streamed[str(number)] for number in range(3)] == [each.decode() for each in whole]


@pytest.mark.parametrize(
    ("model", "texts", "parameters"),
    [
        (GENERATION, ("a", "b"), {"max_new_tokens": 4}),
        (GENERATION, ("a",), {"max_new_tokens": 4, "sample_count": 2}),
        (TRANSLATION, ("the cat",), {"beam_size": 2}),
        (TRANSLATION, ("the cat. the dog.",), {"split_sentences": True}),
        ("topics", ("goal", "atom"), {}),
    ],
)
def test_what_has_no_pieces_is_answered_whole(triton, model, texts, parameters):
    received = triton("stream", [(model, {"text": text(*texts)}, {"parameters": parameters})])
    whole = triton("infer", model, {"text": text(*texts)}, parameters=parameters)
    [answer] = received.answers
    assert answer.is_final
    assert answer.arrays.keys() == whole.arrays.keys()


def test_an_error_is_told_by_a_message_and_the_stream_goes_on(triton, served):
    served.recorder.finished.clear()
    bad = ("topics", {"text": text("")}, {})
    received = triton("stream", [bad, ("nope", {"text": text("a")}, {}), ("topics", {"text": text("goal")}, {})])
    assert sorted(received.errors) == [
        (None, received.errors[0][1] if "nope" in received.errors[0][1] else received.errors[1][1]),
        (None, "text[0]: is empty; give at least one character"),
    ]
    [answer] = received.answers
    assert answer.arrays["label"][0, 0] == b"sports"
    assert sorted(served.recorder.finished) == [  # each message was a call, and is observed as one
        ("ModelStreamInfer", "", "ModelNotFoundError"),
        ("ModelStreamInfer", "topics", "InvalidInputError"),
        ("ModelStreamInfer", "topics", "NoneType"),
    ]


def test_an_error_ends_the_stream_with_its_code_for_a_client_that_asks_for_that(triton):
    received = triton("stream", [("nope", {"text": text("a")}, {})], headers={"triton_grpc_error": "true"})
    [(code, message)] = received.errors
    assert code == "StatusCode.NOT_FOUND"
    assert "nope" in message


@pytest.fixture
def slow(serve_in_thread):
    """A server whose one model takes 10 ms a token and never ends a text by itself."""
    decoder = make_decoder()
    decoder.output[:, EOS_ID] = 0
    slow_down(decoder, 0.01)
    model = make_generation_model(decoder)
    return serve_in_thread(lambda _: ModelHost([model]), ServerSettings(store="unused", port=0))


def test_cancelling_frees_what_the_text_held(triton_calls, slow):
    prompt = {"text": text("the cat")}
    assert triton_calls(slow.port, "cancel_stream", GENERATION, prompt, {"max_new_tokens": 60}) < 60
    [model] = slow.host.models

    async def is_free() -> None:
        await until(lambda: not model._admission.num_admitted and not slow.server.calls.num_running)

    slow.run(is_free())
    assert [kind for _, _, kind in slow.recorder.finished] == ["CancelledError"]


async def test_a_drain_answers_what_runs_and_ends_every_stream(slow):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{slow.port}") as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        idle, running = stub.ModelStreamInfer(), stub.ModelStreamInfer()
        await idle.write(infer_request("nope", "a"))
        assert "nope" in (await idle.read()).error_message
        request = infer_request(GENERATION, "the cat")
        request.parameters["max_new_tokens"].int64_param = 40
        await running.write(request)
        counts = [await running.read()]
        stopping = asyncio.create_task(asyncio.to_thread(slow.run, slow.server.stop()))
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await idle.read()
        assert await idle.code() is grpc.StatusCode.UNAVAILABLE
        while not counts[-1].infer_response.parameters["triton_final_response"].bool_param:
            counts.append(await running.read())
        last = {output.name: output for output in counts[-1].infer_response.outputs}
        assert list(last["new_token_count"].contents.int64_contents) == [40]
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await running.read()
        assert await stopping


async def test_a_slow_reader_holds_up_its_own_stream_alone(served):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        unread = stub.ModelStreamInfer()
        for number in range(100):
            await asyncio.wait_for(unread.write(infer_request("topics", "goal", request_id=str(number))), 10)
        answer = await stub.ModelInfer(infer_request("topics", "atom"))
        assert answer.outputs[0].contents.bytes_contents[0] == b"science"
        ids = set()
        for _ in range(100):
            response = await unread.read()
            ids.add(response.infer_response.id)
        assert ids == set(map(str, range(100)))
        await unread.done_writing()
        assert await unread.code() is grpc.StatusCode.OK


async def test_an_idle_stream_holds_nothing_of_its_last_request(served):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        stream = pb_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await stream.write(infer_request("topics", "goal"))
        assert not (await stream.read()).error_message
        tracemalloc.start()
        try:
            await stream.write(infer_request("nope", "x" * 2**22))
            assert (await stream.read()).error_message
            await until(lambda: tracemalloc.get_traced_memory()[0] < 2**20)
            assert tracemalloc.get_traced_memory()[1] > 2**22
        finally:
            tracemalloc.stop()
        stream.cancel()


async def test_a_stream_reads_no_request_that_it_has_no_room_for():
    num_read, hold = 0, asyncio.Event()

    async def calls():
        nonlocal num_read
        while num_read < 100:
            num_read += 1
            yield SimpleNamespace(answer=answer, status_of=lambda _: SimpleNamespace(message="refused"))

    @asynccontextmanager
    async def answer():
        await hold.wait()
        raise OverloadedError("no room", 1.0)
        yield

    sent = []

    async def send(response):
        sent.append(response)

    service = OpenInferenceService(
        None, statistics=None, is_draining=bool, stall_timeout_s=0, max_text_request_bytes=2**20
    )
    stream = asyncio.create_task(service.ModelStreamInfer(StreamedCalls(calls=calls(), write=send)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert num_read == 64
    hold.set()
    await stream
    assert (num_read, len(sent)) == (100, 100)


async def test_a_stream_that_nobody_reads_is_ended_and_holds_nothing(serve_in_thread, runtime, classifier_store):
    settings = ServerSettings(store=classifier_store, port=0, connection={"unread_timeout": 1})
    started = serve_in_thread(lambda observer: ModelHost.open(runtime, settings, observer=observer), settings)
    small = [("grpc.http2.bdp_probe", 0)]  # the channel takes 64 KiB of what is not read
    async with grpc.aio.insecure_channel(f"127.0.0.1:{started.port}", options=small) as channel:
        stream = pb_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        for _ in range(60):  # the answers are of 10 KB
            await stream.write(infer_request("topics", *["goal"] * 250))
        await until(lambda: started.server.calls.num_running > 1)
        await until(lambda: not started.server.calls.num_running)
        with pytest.raises(grpc.aio.AioRpcError, match="was not read"):
            _ = [response async for response in stream]
        assert await stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
