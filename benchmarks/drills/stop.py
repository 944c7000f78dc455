"""Stops under load: SIGTERM, and kill -9 with a new start.

Plain callers count the codes that gRPC gives them; callers of the project's client, which tries again until its
deadline, count what they lost.
"""

import asyncio
import time
from collections import Counter
from typing import Any

import grpc

from benchmarks.drills.server import Server, check, running
from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc
from headway_client import AsyncClient, CallError

_TEXTS = texts_pb.ClassifyTextRequest(texts=["Oil prices fall as supplies rise."], model="ag-news")
_STREAM = generation_pb.StreamGenerateTextRequest(
    prompt="To be", parameters=generation_pb.GenerationParameters(max_new_tokens=100)
)


class _Load:
    """Callers that go on until they are told to stop."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.codes: Counter[str] = Counter()
        self.unfinished_streams = 0
        self.answers = 0
        self.lost: list[str] = []
        self.slowest_s = 0.0
        self.ends = False

    async def plain(self) -> None:
        """Calls without any retry; waits a little after a refusal."""
        async with grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = texts_grpc.TextClassificationServiceStub(channel)
            while not self.ends:
                try:
                    await stub.ClassifyText(_TEXTS, timeout=30)
                    self.codes["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    self.codes[error.code().name] += 1
                    await asyncio.sleep(0.2)

    async def streams(self) -> None:
        """Reads streams to their end."""
        async with grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = generation_grpc.GenerationServiceStub(channel)
            while not self.ends:
                has_begun = False
                try:
                    async for _ in stub.StreamGenerateText(_STREAM, timeout=60):
                        has_begun = True
                    self.codes["stream OK"] += 1
                except grpc.aio.AioRpcError as error:
                    self.codes[f"stream {error.code().name}"] += 1
                    self.unfinished_streams += has_begun
                    await asyncio.sleep(0.2)

    async def retrying(self) -> None:
        """Calls as the project's client does by itself."""
        async with AsyncClient(self.address, timeout_s=60) as client:
            while not self.ends:
                began = time.monotonic()
                try:
                    await client.classify_text("Oil prices fall as supplies rise.", model="ag-news")
                    self.answers += 1
                except CallError as error:
                    self.lost.append(str(error)[:200])
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def start(self, *, plain: int, streams: int, retrying: int) -> list[asyncio.Task[None]]:
        """Starts so many of each."""
        kinds = [self.plain] * plain + [self.streams] * streams + [self.retrying] * retrying
        return [asyncio.create_task(kind()) for kind in kinds]


async def _stop(server: Server, seconds: float, rounds: int) -> dict[str, Any]:
    ends: list[float] = []
    starts: list[float] = []
    load = _Load(server.address)
    tasks = load.start(plain=64, streams=8, retrying=8)
    for _ in range(rounds):
        await asyncio.sleep(seconds / rounds)
        code, stop_s = await asyncio.to_thread(server.stop)
        check(code == 0, f"the exit code is {code}")
        ends.append(stop_s)
        starts.append(await asyncio.to_thread(server.start))
    await asyncio.sleep(3)
    load.ends = True
    await asyncio.gather(*tasks)
    check(not load.lost, f"lost {load.lost[:3]}")
    check(not load.unfinished_streams, f"{load.unfinished_streams} streams were cut off")
    return {
        "rounds": rounds,
        "codes": dict(load.codes),
        "unfinished_streams": load.unfinished_streams,
        "answers_to_retrying_callers": load.answers,
        "lost_by_retrying_callers": len(load.lost),
        "slowest_retrying_call_s": round(load.slowest_s, 2),
        "stop_s": [round(value, 2) for value in ends],
        "start_s": [round(value, 2) for value in starts],
    }


async def _kill(server: Server, seconds: float, rounds: int) -> dict[str, Any]:
    load = _Load(server.address)
    tasks = load.start(plain=0, streams=0, retrying=35)
    starts: list[float] = []
    for _ in range(rounds):
        await asyncio.sleep(seconds / rounds)
        await asyncio.to_thread(server.kill)
        starts.append(await asyncio.to_thread(server.start))
    await asyncio.sleep(3)
    load.ends = True
    await asyncio.gather(*tasks)
    check(not load.lost, f"lost {len(load.lost)}: {load.lost[:3]}")
    return {
        "rounds": rounds,
        "callers": 35,
        "answers": load.answers,
        "lost": len(load.lost),
        "slowest_call_s": round(load.slowest_s, 2),
        "start_s": [round(value, 2) for value in starts],
    }


def stop(seconds: float, *, rounds: int = 4) -> dict[str, Any]:
    """Stops a server by SIGTERM under mixed load, and starts it again, `rounds` times."""
    with running() as server:
        return asyncio.run(_stop(server, seconds, rounds))


def kill(seconds: float, *, rounds: int = 4) -> dict[str, Any]:
    """Kills a server under load, and starts it again, `rounds` times."""
    with running() as server:
        return asyncio.run(_kill(server, seconds, rounds))
