"""Stops under load: SIGTERM, and kill -9 with a new start.

Plain callers count the codes that gRPC gives them; callers of the project's client, which tries again until its
deadline, count what they lost. Where the server is killed, each of their calls has an id of its own, which goes with
every attempt: answers are counted by it where they arrive, and in the server's access log.
"""

import asyncio
import json
import time
from collections import Counter
from typing import Any

import grpc
from tests.drills.server import Server, check, running

from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc
from headway_client import AsyncClient, CallError

_TEXTS = texts_pb.ClassifyTextRequest(texts=["Oil prices fall as supplies rise."], model="ag-news")
_NEWS = (
    "Oil prices fall as supplies rise.",
    "The striker scored twice.",
    "A new chip is faster.",
    "Talks on peace go on.",
)
_CALL = "drill"
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
        self.answers_to: Counter[str] = Counter()
        self.wrong = 0
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

    async def retrying(self, caller: int) -> None:
        """Calls as the project's client does by itself."""
        async with AsyncClient(self.address, timeout_s=60) as client:
            expected = [await client.classify_text(text, model="ag-news") for text in _NEWS]
            call = caller
            while not self.ends:
                call += 1
                request_id = f"{_CALL}-{caller}-{call}"
                client._connection.metadata = (("x-request-id", request_id),)
                began = time.monotonic()
                try:
                    answer = await client.classify_text(_NEWS[call % len(_NEWS)], model="ag-news")
                    self.answers += 1
                    self.answers_to[request_id] += 1
                    self.wrong += (
                        answer.results[0].labels[0].label != expected[call % len(_NEWS)].results[0].labels[0].label
                    )
                except CallError as error:
                    self.lost.append(str(error)[:200])
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def start(self, *, plain: int, streams: int, retrying: int) -> list[asyncio.Task[None]]:
        """Starts so many of each."""
        kinds = [self.plain() for _ in range(plain)] + [self.streams() for _ in range(streams)]
        return [asyncio.create_task(each) for each in [*kinds, *map(self.retrying, range(retrying))]]


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
    lives: list[int] = []
    for _ in range(rounds):
        await asyncio.sleep(seconds / rounds)
        await asyncio.to_thread(server.kill)
        lives.append(server.log.stat().st_size)
        starts.append(await asyncio.to_thread(server.start))
    await asyncio.sleep(3)
    load.ends = True
    await asyncio.gather(*tasks)
    await asyncio.sleep(1)  # the log is written behind the calls
    executed = _executed(server, lives)
    twice = [request_id for life in executed for request_id, count in life.items() if count > 1]
    again = [request_id for request_id, count in sum(executed, Counter()).items() if count > 1]
    check(not load.lost, f"lost {len(load.lost)}: {load.lost[:3]}")
    check(set(load.answers_to.values()) == {1}, f"answered more than once: {load.answers_to.most_common(3)}")
    check(not load.wrong, f"{load.wrong} answers were those of other calls")
    check(not twice, f"one life of the server answered {twice[:3]} more than once")
    return {
        "rounds": rounds,
        "callers": 35,
        "answers": load.answers,
        "answered_more_than_once": sum(count > 1 for count in load.answers_to.values()),
        "wrong_answers": load.wrong,
        "executed_by_the_log": sum(map(len, executed)),
        "executed_twice_by_one_life": len(twice),
        "executed_again_after_a_kill": len(again),
        "lost": len(load.lost),
        "slowest_call_s": round(load.slowest_s, 2),
        "start_s": [round(value, 2) for value in starts],
    }


def _executed(server: Server, lives: list[int]) -> list[Counter[str]]:
    """Returns how often each call was answered with OK, by its id, in each life of a server.

    Args:
        server: Writes an access log.
        lives: Where in its log each life but the last ended, in bytes.
    """
    log = server.log.read_bytes()
    executed = []
    for start, stop in zip([0, *lives], [*lives, len(log)], strict=True):
        counts: Counter[str] = Counter()
        for line in log[start:stop].splitlines():
            if b'"code"' in line and line.endswith(b"}"):  # the last line before a kill may be cut off
                call = json.loads(line)
                if call.get("code") == "OK" and str(call.get("request_id", "")).startswith(_CALL):
                    counts[call["request_id"]] += 1
        executed.append(counts)
    return executed


def stop(seconds: float, *, rounds: int = 4) -> dict[str, Any]:
    """Stops a server by SIGTERM under mixed load, and starts it again, `rounds` times."""
    with running() as server:
        return asyncio.run(_stop(server, seconds, rounds))


def kill(seconds: float, *, rounds: int = 4) -> dict[str, Any]:
    """Kills a server under load, and starts it again, `rounds` times."""
    with running("--access-log", "--log-level", "info", "--log-format", "json") as server:
        return asyncio.run(_kill(server, seconds, rounds))
