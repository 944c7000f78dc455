"""Requests that are damaged, byte by byte and field by field, are answered or refused, and no answer is INTERNAL."""

import asyncio
import random
from collections import Counter

import grpc
import numpy as np
from open_inference import CHAT, GENERATION, TRANSLATION, infer_request, picture

from headway.oip import grpc_predict_v2_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelInfer"
NUM_CALLS = 800
BENIGN = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # of a parameter `timeout`
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
VALUES = (0, 1, -1, 2, 7, 255, 2**31, 2**63 - 1, -(2**63))


def raw_request(model: str, name: str, datatype: str, array: np.ndarray) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    request.inputs.add(name=name, datatype=datatype, shape=array.shape)
    return request


def seeds() -> list[pb.ModelInferRequest]:
    image = pb.ModelInferRequest(model_name="colours")
    image.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.bytes_contents.append(picture((200, 0, 0)))
    drawn = infer_request(GENERATION, "the cat")
    drawn.parameters["max_new_tokens"].int64_param = 3
    drawn.parameters["temperature"].double_param = 1.0
    drawn.parameters["stop_strings"].string_param = '["a"]'
    drawn.parameters["seed"].uint64_param = 5
    searched = infer_request(TRANSLATION, "the cat")
    searched.parameters["beam_size"].int64_param = 2
    chat = pb.ModelInferRequest(model_name=CHAT)
    turns = b'[{"role": "user", "content": "hi"}]'
    chat.inputs.add(name="conversation", datatype="BYTES", shape=[1]).contents.bytes_contents.append(turns)
    chat.parameters["max_new_tokens"].int64_param = 2
    pixels = np.zeros((1, 3, 8, 8), np.float32)
    return [
        infer_request("topics", "goal match", "atom"),
        infer_request("pairs", "goal"),
        infer_request("tagger", "Ada saw Köln"),
        raw_request("topics", "input_ids", "INT64", np.array([[1, 3, 4]])),
        raw_request("colours", "pixel_values", "FP32", pixels),
        image,
        drawn,
        searched,
        chat,
    ]


def mutate(rng: random.Random, request: pb.ModelInferRequest) -> bytes:
    """Changes a field, some bytes, or both."""
    changed = pb.ModelInferRequest()
    changed.CopyFrom(request)
    tensor = rng.choice(changed.inputs)
    what = rng.randrange(6)
    if what == 0 and tensor.shape:
        tensor.shape[rng.randrange(len(tensor.shape))] = rng.choice(VALUES)
    elif what == 1:
        tensor.datatype = rng.choice(
            ["BOOL", "INT8", "UINT64", "FP16", "BF16", "FP64", "BYTES", "INT64", "", "x" * 999]
        )
    elif what == 2:
        name = rng.choice(
            ["top_k", "timeout", "priority", "max_new_tokens", "choices", "regex", "truncate", "beam_size"]
        )
        kind = rng.choice(["bool_param", "int64_param", "string_param", "double_param"])
        value = {"bool_param": True, "string_param": rng.choice(['["a"]', "(", "[" * 500, "\0"])}
        setattr(changed.parameters[name], kind, value.get(kind, rng.choice(VALUES)))
    elif what == 3 and changed.raw_input_contents:
        data = bytearray(changed.raw_input_contents[0])
        data[rng.randrange(len(data))] = rng.randrange(256)
        changed.raw_input_contents[0] = bytes(data[: rng.choice([len(data), len(data) // 2])])
    data = bytearray(changed.SerializeToString())
    for _ in range(rng.choice([0, 0, 1, 3, 10])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


async def test_no_damaged_call_is_an_internal_error(served):
    seed = random.randrange(2**32)
    print("seed", seed)  # noqa: T201 (for a failure)
    rng, requests = random.Random(seed), seeds()
    codes: Counter[grpc.StatusCode] = Counter()
    wrong: list[object] = []
    room = asyncio.Semaphore(16)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        call = channel.unary_unary(METHOD)  # bytes in, bytes out

        async def send(data: bytes) -> None:
            async with room:
                try:
                    await call(data, timeout=20)
                    codes[grpc.StatusCode.OK] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code()] += 1
                    if error.code() not in BENIGN:
                        wrong.append((data, error))

        for request in requests:
            await send(request.SerializeToString())
        assert codes == {grpc.StatusCode.OK: len(requests)}
        await asyncio.gather(*(send(mutate(rng, rng.choice(requests))) for _ in range(NUM_CALLS)))
    assert wrong == []
    assert codes[grpc.StatusCode.OK] > NUM_CALLS // 10
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > NUM_CALLS // 10
