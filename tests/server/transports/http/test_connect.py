"""The protocol's own methods by Connect: JSON and binary, one answer and streams, errors with their details."""

import asyncio
import base64
import json
import os
import re
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.rpc import error_details_pb2
from node_packages import install
from tiny_engine import slow_down
from waiting import until

from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import model_service_pb2 as models_pb
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway_server.transports.http.connect import _CODES

CLASSIFY = "/headway.v1.TextClassificationService/ClassifyText"
GENERATE = "/headway.v1.GenerationService/GenerateText"
STREAM = "/headway.v1.GenerationService/StreamGenerateText"
MODELS = "/headway.v1.ModelService"
PROTO = {"content-type": "application/proto"}


def envelope(data: bytes, flags: int = 0) -> bytes:
    return bytes((flags,)) + len(data).to_bytes(4, "big") + data


def opened(body: bytes) -> list[tuple[int, bytes]]:
    found = []
    while body:
        size = int.from_bytes(body[1:5], "big")
        found.append((body[0], body[5 : 5 + size]))
        body = body[5 + size :]
    return found


async def test_one_answer_in_json_and_in_binary_is_that_of_grpc(serve):
    async with serve() as serving:
        answer = await serving.client.post(CLASSIFY, json={"texts": ["star goal atom"], "topK": 1})
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["results"][0]["labels"][0]["label"] == "science"
        assert answer.json()["model"]["name"] == "topics"
        request = texts_pb.ClassifyTextRequest(texts=["star goal atom"], top_k=1)
        answer = await serving.client.post(CLASSIFY, content=request.SerializeToString(), headers=PROTO)
        assert answer.headers["content-type"] == "application/proto"
        assert texts_pb.ClassifyTextResponse.FromString(answer.content).results[0].labels[0].label == "science"
        assert serving.recorder.finished[-1] == (CLASSIFY, "NoneType")
        assert (await serving.client.post(f"{MODELS}/ListModels", json={})).json()["models"][0]["name"] == "colours"


async def test_a_stream_in_json_and_in_binary_is_that_of_grpc(serve):
    request = generation_pb.StreamGenerateTextRequest(prompt="the cat")
    request.parameters.max_new_tokens = 8
    async with serve() as serving:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
            stub = generation_grpc.GenerationServiceStub(channel)
            expected = [part async for part in stub.StreamGenerateText(request)]
        answer = await serving.client.post(
            STREAM,
            content=envelope(request.SerializeToString()),
            headers={"content-type": "application/connect+proto"},
        )
        assert answer.headers["content-type"] == "application/connect+proto"
        *parts, end = opened(answer.content)
        assert end == (2, b"{}")
        read = [generation_pb.StreamGenerateTextResponse.FromString(data) for _, data in parts]
        assert "".join(part.text_delta for part in read) == "".join(part.text_delta for part in expected)
        assert read[-1].result.new_token_count == 8
        body = json.dumps({"prompt": "the cat", "parameters": {"maxNewTokens": 8}}).encode()
        answer = await serving.client.post(
            STREAM, content=envelope(body), headers={"content-type": "application/connect+json"}
        )
        *parts, end = opened(answer.content)
        assert json.loads(parts[-1][1])["result"]["newTokenCount"] == 8
        assert end == (2, b"{}")


async def test_errors_have_connects_code_and_the_details_of_grpc(serve):
    async with serve() as serving:
        answer = await serving.client.post(CLASSIFY, json={"texts": []})
        error = answer.json()
        assert (answer.status_code, error["code"]) == (400, "invalid_argument")
        assert error["message"] == "texts: is empty; give 1 to 256"
        details = {detail["type"]: base64.b64decode(detail["value"] + "==") for detail in error["details"]}
        assert error_details_pb2.ErrorInfo.FromString(details["google.rpc.ErrorInfo"]).reason == "INVALID_INPUT"
        violations = error_details_pb2.BadRequest.FromString(details["google.rpc.BadRequest"]).field_violations
        assert violations[0].field == "texts"
        answer = await serving.client.post(CLASSIFY, json={"texts": ["a"], "model": "none"})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        for body in (
            b"{",
            b'{"nothing": 1}',
            b"\xff",
            b'{"texts": 5}',
            b'{"texts": ["\\ud800"]}',
            b'{"texts": "\\ud800"}',
            b"[" * 100_000,
        ):
            answer = await serving.client.post(CLASSIFY, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument"), body[:20]
        images = "/headway.v1.ObjectDetectionService/DetectObjects"
        for path, content, field in (
            (images, {"images": [{"data": "AA=="}]}, "images"),
            (CLASSIFY, {"texts": [{}]}, "texts"),
        ):
            answer = await serving.client.post(path, json=content)
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
            message = answer.json()["message"]
            assert field in message
            assert not re.search("operand|bytes|dict|object has|Error", message), message
        answer = await serving.client.post(CLASSIFY, content=b"\xff\xff", headers=PROTO)
        assert answer.json()["message"].startswith("request: is not a message of this method")
        answer = await serving.client.post(CLASSIFY, content=b"x", headers={"content-type": "text/plain"})
        assert answer.status_code == 415
        answer = await serving.client.post("/headway.v1.GenerationService/Nothing", json={})
        assert (answer.status_code, answer.json()["code"]) == (404, "unimplemented")
        answer = await serving.client.get(CLASSIFY)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert set(_CODES) == {code.value[0] for code in grpc.StatusCode} - {0}


async def test_errors_of_a_stream_end_it_with_status_200(serve):
    async with serve() as serving:
        kind = {"content-type": "application/connect+json"}
        for body in (envelope(b'{"prompt": ""}'), b"", b"\0\0\0\0\5{}", envelope(b"{}", 1), envelope(b"{}") * 2):
            answer = await serving.client.post(STREAM, content=body, headers=kind)
            assert answer.status_code == 200
            [(flags, end)] = opened(answer.content)
            assert (flags, json.loads(end)["error"]["code"]) == (2, "invalid_argument")


async def test_a_call_that_takes_longer_than_its_caller_waits_ends(serve):
    async with serve() as serving:
        slow_down(serving.decoder, 0.05)
        body = {"prompts": ["the cat"], "parameters": {"maxNewTokens": 30}}
        answer = await serving.client.post(GENERATE, json=body, headers={"connect-timeout-ms": "100"})
        assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
        for wrong in ("soon", "-1", "1" * 11, "0" * 12 + "9" * 5000):
            answer = await serving.client.post(GENERATE, json=body, headers={"connect-timeout-ms": wrong})
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")


async def test_a_caller_who_goes_frees_the_slot(serve):
    async with serve() as serving:
        slow_down(serving.decoder, 0.02)
        body = {"prompts": ["the cat"], "parameters": {"maxNewTokens": 40}}
        call = asyncio.create_task(serving.client.post(GENERATE, json=body))
        await until(lambda: serving.decoder.decode_sizes)
        call.cancel()
        await until(lambda: serving.server.calls.num_running == 0)
        assert serving.recorder.finished[-1] == (GENERATE, "CancelledError")


@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
async def test_only_this_machine_by_its_own_name_changes_the_server(serve, host):
    async with serve() as serving:
        answer = await serving.client.post(f"{MODELS}/ScanStore", json={}, headers={"host": host})
        if host == "127.0.0.1":  # which has no store to look at, and says so
            assert answer.json()["code"] == "failed_precondition"
        else:
            assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")


async def test_every_method_with_one_request_can_be_called(serve):
    async with serve() as serving:
        assert len(serving.server.procedures) >= 20
        for name in models_pb.DESCRIPTOR.services_by_name["ModelService"].methods_by_name:
            assert f"{MODELS}/{name}" in serving.server.procedures
        answer = await serving.client.post("/inference.GRPCInferenceService/ServerLive", json={})
        assert answer.json() == {"live": True}


def name_fields(messages):
    """Sets the names of fields in JSON, as protoc does, and Python does not when it copies a descriptor."""
    for message in messages:
        name_fields(message.nested_type)
        for field in message.field:
            first, *rest = field.name.split("_")
            field.json_name = first + "".join(map(str.capitalize, rest))


async def test_the_client_of_connects_own_makers_gets_the_same(serve, request, tmp_path):
    modules = install(request.config, "connect")
    files = FileDescriptorSet()
    seen = set()

    def add(descriptor):
        if descriptor.name not in seen:
            seen.add(descriptor.name)
            for dependency in descriptor.dependencies:
                add(dependency)
            file = files.file.add()
            descriptor.CopyToProto(file)
            name_fields(file.message_type)

    for module in (texts_pb, generation_pb, models_pb, error_details_pb2):
        add(module.DESCRIPTOR)
    (tmp_path / "descriptors").write_bytes(files.SerializeToString())
    script = Path(__file__).parents[3] / "support" / "node" / "connect.cjs"
    async with serve() as serving:
        slow_down(serving.decoder, 0.01)
        ran = await asyncio.create_subprocess_exec(
            "node",
            str(script),
            serving.url,
            str(tmp_path / "descriptors"),
            env=os.environ | {"NODE_PATH": str(modules)},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await asyncio.wait_for(ran.communicate(), 60)
    for found in json.loads(output):
        assert found["unary"] == ["science"]
        assert found["text"] == found["deltas"] != ""
        assert found["refused"] == ["InvalidArgument", "texts: is empty; give 1 to 256", "INVALID_INPUT"]
        assert found["refusedStream"][::2] == ["InvalidArgument", "INVALID_INPUT"]
        assert found["late"][0] == "DeadlineExceeded"
        assert found["models"] == 3
