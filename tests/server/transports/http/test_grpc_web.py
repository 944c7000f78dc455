"""gRPC-Web: the protocol's own methods in binary and in base64. The client of npm is in test_connect.py."""

import base64
from urllib.parse import unquote

import pytest
from google.rpc import error_details_pb2, status_pb2
from tiny_engine import slow_down

from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import text_classification_service_pb2 as texts_pb

CLASSIFY = "/headway.v1.TextClassificationService/ClassifyText"
STREAM = "/headway.v1.GenerationService/StreamGenerateText"
KINDS = (
    "application/grpc-web",
    "application/grpc-web+proto",
    "application/grpc-web-text",
    "application/grpc-web-text+proto",
)


def envelope(data: bytes, flags: int = 0) -> bytes:
    return bytes((flags,)) + len(data).to_bytes(4, "big") + data


async def call(serving, path, body, *, kind=KINDS[0], **headers):
    """Returns the messages of an answer, and its trailers."""
    is_text = "text" in kind
    given = base64.b64encode(body) if is_text else body
    answer = await serving.client.post(path, content=given, headers={"content-type": kind, **headers})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"application/grpc-web{'-text' * is_text}+proto"
    rest = answer.content
    if is_text:  # pieces that were encoded by themselves follow each other
        rest = b"".join(base64.b64decode(rest[n : n + 4]) for n in range(0, len(rest), 4))
    messages = []
    while rest[0] == 0:
        size = int.from_bytes(rest[1:5], "big")
        messages.append(rest[5 : 5 + size])
        rest = rest[5 + size :]
    assert (rest[0], int.from_bytes(rest[1:5], "big")) == (0x80, len(rest) - 5)
    return messages, dict(line.split(": ", 1) for line in rest[5:].decode().splitlines())


@pytest.mark.parametrize("kind", KINDS)
async def test_one_answer_and_a_stream_come_with_their_trailers(serve, kind):
    async with serve() as serving:
        request = texts_pb.ClassifyTextRequest(texts=["star goal atom"], top_k=1)
        [message], trailers = await call(serving, CLASSIFY, envelope(request.SerializeToString()), kind=kind)
        assert texts_pb.ClassifyTextResponse.FromString(message).results[0].labels[0].label == "science"
        assert trailers == {"grpc-status": "0"}
        asked = generation_pb.StreamGenerateTextRequest(prompt="the cat")
        asked.parameters.max_new_tokens = 8
        messages, trailers = await call(serving, STREAM, envelope(asked.SerializeToString()), kind=kind)
        parts = [generation_pb.StreamGenerateTextResponse.FromString(message) for message in messages]
        assert "".join(part.text_delta for part in parts) == parts[-1].result.text != ""
        assert trailers == {"grpc-status": "0"}
        assert serving.recorder.finished == [(CLASSIFY, "NoneType"), (STREAM, "NoneType")]


async def test_errors_are_trailers_with_the_details_of_grpc(serve):
    async with serve() as serving:
        for body in (envelope(b""), b"", b"\0\0\0\0\5{}", envelope(b"", 1), envelope(b"\xff\xff")):
            messages, trailers = await call(serving, CLASSIFY, body)
            assert (messages, trailers["grpc-status"]) == ([], "3")
            details = trailers["grpc-status-details-bin"]
            status = status_pb2.Status.FromString(base64.b64decode(details + "=" * (-len(details) % 4)))
            assert unquote(trailers["grpc-message"]) == status.message
            info = error_details_pb2.ErrorInfo()
            assert status.details[0].Unpack(info)
            assert info.reason == "INVALID_INPUT"
        _, trailers = await call(serving, STREAM, envelope(b""), kind=KINDS[2])
        assert trailers["grpc-status"] == "3"
        kind = {"content-type": KINDS[2]}
        answer = await serving.client.post(CLASSIFY, content=b"no base64", headers=kind)
        assert b"grpc-status: 3" in base64.b64decode(answer.content)
        answer = await serving.client.post("/headway.v1.GenerationService/Nothing", content=b"", headers=kind)
        assert answer.status_code == 404


async def test_a_call_that_takes_longer_than_its_caller_waits_ends(serve):
    async with serve() as serving:
        slow_down(serving.decoder, 0.05)
        asked = generation_pb.StreamGenerateTextRequest(prompt="the cat")
        asked.parameters.max_new_tokens = 30
        body = envelope(asked.SerializeToString())
        _, trailers = await call(serving, STREAM, body, **{"grpc-timeout": "100m"})
        assert trailers["grpc-status"] == "4"
        for wrong in ("soon", "-1S", "1" * 9 + "S", "5"):
            _, trailers = await call(serving, STREAM, body, **{"grpc-timeout": wrong})
            assert trailers["grpc-status"] == "3"
