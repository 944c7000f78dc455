"""Requests that are damaged, byte by byte and field by field, are answered or refused, and no answer is INTERNAL."""

import asyncio
import random
from collections import Counter

import grpc
import numpy as np
from mutation import mutate, mutate_message
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
WORDS = (
    *("BOOL", "INT8", "UINT64", "FP16", "BF16", "FP64", "BYTES", "INT64"),
    *("top_k", "timeout", "priority", "max_new_tokens", "choices", "regex", "truncate", "beam_size"),
)


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


def damaged(rng: random.Random, requests: list[pb.ModelInferRequest]) -> bytes:
    """A request with a field changed, some bytes, both, or neither."""
    request = rng.choice(requests)
    if rng.random() < 0.7:
        request = mutate_message(rng, request, WORDS)
    data = request.SerializeToString()
    return mutate(rng, data, [other.SerializeToString() for other in requests]) if rng.random() < 0.5 else data


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
        await asyncio.gather(*(send(damaged(rng, requests)) for _ in range(NUM_CALLS)))
    assert wrong == []
    assert codes[grpc.StatusCode.OK] > NUM_CALLS // 10
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > NUM_CALLS // 10
