"""The HTTP port beside gRPC: the same calls to the same server, in turns.

    python -m benchmarks.http_port --store models

Labels of one text by `ag-news`: calls a second over gRPC, over Connect in binary and in JSON, and over
the Open Inference Protocol (KServe v2) by gRPC and by HTTP. Text of `shakespeare`: milliseconds until the first text,
over gRPC and by OpenAI's API. The callers over HTTP are as small as one can write them, so that the server is what is
measured; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc
import uvloop

from headway.oip import grpc_predict_v2_pb2 as oip_pb
from headway.oip import grpc_predict_v2_pb2_grpc as oip_grpc
from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc

_TEXT: Final = "Oil prices fall as the storm weakens and refineries on the coast open again"
_CALLERS: Final = (1, 8, 32)
_NUM_ROUNDS: Final = 5
_ROUND_S: Final = 1.0
_FIRST_TEXTS: Final = 48

Call = Callable[[], Awaitable[float]]
"""Makes a call, and returns after how many seconds its first part was there."""


class _HttpCaller:
    """A connection that sends the same request again and again."""

    def __init__(self, port: int, path: str, body: bytes, media_type: str) -> None:
        self._port = port
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {media_type}\r\n"
        self._request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __call__(self) -> float:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        began = time.perf_counter()
        self._writer.write(self._request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        if (place := head.find(b"content-length: ")) >= 0:
            await self._reader.readexactly(int(head[place + 16 : head.index(b"\r\n", place)]))
            return time.perf_counter() - began
        first = 0.0
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            await self._reader.readexactly(size + 2)
            first = first or time.perf_counter() - began
        await self._reader.readexactly(2)
        return first


def _grpc_unary(channel: grpc.aio.Channel) -> Call:
    stub = texts_grpc.TextClassificationServiceStub(channel)
    request = texts_pb.ClassifyTextRequest(texts=[_TEXT], model="ag-news")

    async def call() -> float:
        began = time.perf_counter()
        await stub.ClassifyText(request)
        return time.perf_counter() - began

    return call


def _grpc_stream(channel: grpc.aio.Channel) -> Call:
    stub = generation_grpc.GenerationServiceStub(channel)
    request = generation_pb.StreamGenerateTextRequest(prompt="ROMEO:", model="shakespeare")
    request.parameters.max_new_tokens = 16

    async def call() -> float:
        began, first = time.perf_counter(), 0.0
        async for part in stub.StreamGenerateText(request):
            if part.text_delta:
                first = first or time.perf_counter() - began
        return first

    return call


def _inference(channel: grpc.aio.Channel) -> Call:
    stub = oip_grpc.GRPCInferenceServiceStub(channel)
    request = oip_pb.ModelInferRequest(model_name="ag-news")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(_TEXT.encode())

    async def call() -> float:
        began = time.perf_counter()
        await stub.ModelInfer(request)
        return time.perf_counter() - began

    return call


async def _rate(calls: list[Call], seconds: float) -> float:
    """Returns the calls a second of callers that each wait for their answer."""
    count, end = 0, time.perf_counter() + seconds

    async def work(call: Call) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await call()
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*map(work, calls))
    return count / (time.perf_counter() - began)


async def _first_texts(calls: list[Call]) -> float:
    """Returns the median of the milliseconds to the first text."""

    async def work(call: Call) -> list[float]:
        return [await call() for _ in range(max(2, _FIRST_TEXTS // len(calls)))]

    found = await asyncio.gather(*map(work, calls))
    return statistics.median(1e3 * seconds for each in found for seconds in each)


async def _measure(port: int, http_port: int) -> dict[str, Any]:
    request = texts_pb.ClassifyTextRequest(texts=[_TEXT], model="ag-news")
    path = "/headway.v1.TextClassificationService/ClassifyText"
    in_json = json.dumps({"texts": [_TEXT], "model": "ag-news"}).encode()
    message = request.SerializeToString()
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [_TEXT]}
    tensors = json.dumps({"inputs": [tensor]}).encode()
    chat = json.dumps({"model": "shakespeare", "prompt": "ROMEO:", "max_tokens": 16, "stream": True}).encode()
    found: dict[str, Any] = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        unary: dict[str, Callable[[], Call]] = {
            "gRPC": lambda: _grpc_unary(channel),
            "Connect, binary": lambda: _HttpCaller(http_port, path, message, "application/proto"),
            "Connect, JSON": lambda: _HttpCaller(http_port, path, in_json, "application/json"),
            "KServe v2 over gRPC": lambda: _inference(channel),
            "KServe v2 over HTTP": lambda: _HttpCaller(
                http_port, "/v2/models/ag-news/infer", tensors, "application/json"
            ),
        }
        streams: dict[str, Callable[[], Call]] = {
            "gRPC": lambda: _grpc_stream(channel),
            "OpenAI's API": lambda: _HttpCaller(http_port, "/v1/completions", chat, "application/json"),
        }
        for callers in _CALLERS:
            sides = {name: [make() for _ in range(callers)] for name, make in unary.items()}
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(_NUM_ROUNDS + 1):
                for name, calls in sides.items():
                    rate = await _rate(calls, _ROUND_S if number else 0.3)
                    if number:  # the first round warms up
                        rates[name].append(rate)
            found[f"calls a second, {callers} callers"] = {
                name: round(statistics.median(values), 1) for name, values in rates.items()
            }
        for callers in _CALLERS:
            sides = {name: [make() for _ in range(callers)] for name, make in streams.items()}
            times: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(_NUM_ROUNDS + 1):
                for name, calls in sides.items():
                    milliseconds = await _first_texts(calls)
                    if number:
                        times[name].append(milliseconds)
            found[f"ms to the first text, {callers} callers"] = {
                name: round(statistics.median(values), 2) for name, values in times.items()
            }
    return found


def main() -> None:
    """Starts a server, and measures it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("models"))
    store = parser.parse_args().store
    command = [sys.executable, "-m", "headway_server", "--store", str(store), "--port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            port = int(line.split("ready on ")[1].split()[0].rpartition(":")[2])
            found = uvloop.run(_measure(port, int(line.rpartition(":")[2])))
        finally:
            server.terminate()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
