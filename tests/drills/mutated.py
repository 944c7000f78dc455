"""Calls that are random, cut off or mutated, of many methods, while a neighbour's answers must stay right.

A call may be answered or refused. It may not end as INTERNAL or UNKNOWN, and the server may not end.
"""

import asyncio
import random
import time
from collections import Counter
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from tests.drills.server import Server, check, running
from tests.support.mutation import mutate

from headway.oip import grpc_predict_v2_pb2 as oip
from headway.v1 import common_pb2 as common
from headway.v1 import embedding_service_pb2 as embeddings
from headway.v1 import generation_service_pb2 as generation
from headway.v1 import image_classification_service_pb2 as images
from headway.v1 import model_service_pb2 as models
from headway.v1 import text_classification_service_pb2 as texts
from headway.v1 import translation_service_pb2 as translation

_CALLERS: Final = 32
_DEADLINE_S: Final = 20.0
_RANDOM_SHARE: Final = 0.05
"""Of the calls that are random bytes alone."""
_NEIGHBOUR: Final = texts.ClassifyTextRequest(texts=["Oil prices fall as supplies rise."], model="ag-news")
_BAD: Final = frozenset({"INTERNAL", "UNKNOWN", "UNIMPLEMENTED", "DATA_LOSS"})


def _samples() -> list[tuple[str, Message]]:
    """Returns requests that are right, by the path of their method."""
    sampling = generation.GenerationParameters(
        max_new_tokens=4, sampling=common.SamplingParameters(temperature=0.8, top_k=5, seed=7), stop_strings=["\n\n"]
    )
    schema = generation.GenerationParameters(
        max_new_tokens=8, constraint=generation.Constraint(json_schema='{"type": "integer"}')
    )
    pixels = b"\x89PNG\r\n\x1a\n" + bytes(40)
    tensors = oip.ModelInferRequest(
        model_name="ag-news",
        inputs=[
            oip.ModelInferRequest.InferInputTensor(
                name="text",
                datatype="BYTES",
                shape=[1],
                contents=oip.InferTensorContents(bytes_contents=[b"Oil prices fall"]),
            )
        ],
    )
    own = [
        ("Generation", "GenerateText", generation.GenerateTextRequest(prompts=["To be"], parameters=sampling)),
        ("Generation", "GenerateText", generation.GenerateTextRequest(prompts=["1"], parameters=schema)),
        ("Translation", "TranslateText", translation.TranslateTextRequest(texts=["A man."], target_language="de")),
        ("TextClassification", "ClassifyText", texts.ClassifyTextRequest(texts=["Oil", "Goal"], top_k=2)),
        ("TextClassification", "ClassifyTokens", texts.ClassifyTokensRequest(texts=["Alan Turing"])),
        ("Embedding", "EmbedText", embeddings.EmbedTextRequest(texts=["Oil"], model="ag-news")),
        ("ImageClassification", "ClassifyImage", images.ClassifyImageRequest(images=[pixels])),
        ("Model", "GetModel", models.GetModelRequest(model="ag-news")),
    ]
    return [
        *((f"/headway.v1.{service}Service/{method}", message) for service, method, message in own),
        ("/inference.GRPCInferenceService/ModelInfer", tensors),
        ("/inference.GRPCInferenceService/ModelMetadata", oip.ModelMetadataRequest(name="ag-news")),
    ]


async def _call(server: Server, count: int, seed: int) -> dict[str, Any]:
    samples = [(path, message.SerializeToString()) for path, message in _samples()]
    others = [data for _, data in samples]
    codes, bad = Counter[str](), list[str]()
    async with grpc.aio.insecure_channel(server.address) as channel, grpc.aio.insecure_channel(server.address) as own:
        ask: Any = own.unary_unary(
            "/headway.v1.TextClassificationService/ClassifyText",
            request_serializer=texts.ClassifyTextRequest.SerializeToString,
            response_deserializer=texts.ClassifyTextResponse.FromString,
        )
        methods: dict[str, Any] = {path: channel.unary_unary(path) for path, _ in samples}
        expected = (await ask(_NEIGHBOUR)).results
        slowest_s, num_right = 0.0, 0

        async def caller(number: int) -> None:
            for index in range(number, count, _CALLERS):
                generator = random.Random(f"{seed} {index}")
                path, data = generator.choice(samples)
                mutated = mutate(generator, data, others)
                if generator.random() < _RANDOM_SHARE:
                    mutated = generator.randbytes(generator.randrange(200))
                try:
                    await methods[path](mutated, timeout=_DEADLINE_S)
                    code = "OK"
                except grpc.aio.AioRpcError as error:
                    code = error.code().name
                    if code in _BAD:
                        bad.append(f"{path} {mutated.hex()[:400]}: {code} {error.details()}")
                codes[code] += 1

        mutants = asyncio.gather(*(caller(number) for number in range(_CALLERS)))
        while not mutants.done():
            began = time.monotonic()
            check((await ask(_NEIGHBOUR, timeout=_DEADLINE_S)).results == expected, "a neighbour's answer changed")
            slowest_s, num_right = max(slowest_s, time.monotonic() - began), num_right + 1
            await asyncio.sleep(0.05)
        await mutants
    check(not bad, f"seed {seed}: " + "; ".join(bad[:3]))
    assert server.process is not None, "it runs"
    check(server.process.poll() is None, f"seed {seed}: the server has ended")
    return {"codes": codes, "neighbour_answers": num_right, "neighbour_slowest_ms": round(1e3 * slowest_s)}


def mutated(count: int, seed: int) -> dict[str, Any]:
    """Makes `count` calls and returns how they ended, and what the server held before and after."""
    with running("--log-level", "error") as server:
        asyncio.run(_call(server, 2_000, seed - 1))  # what is made once has been made
        before_mib, began = server.rss_mib, time.monotonic()
        result = asyncio.run(_call(server, count, seed))
        return {
            "drill": "mutated",
            "seed": seed,
            "calls": count,
            "seconds": round(time.monotonic() - began, 1),
            "rss_mib": [round(before_mib), round(server.rss_mib)],
        } | result
