"""What callers can keep others from by opening much, sending half, reading nothing, or going away.

While each of these is done to it the server must answer others, and have what it had before once it is over.
"""

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from threading import Event
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.drills.server import Server, check, running

from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc

_TEXTS = texts_pb.ClassifyTextRequest(texts=["Oil prices fall as supplies rise."], model="ag-news")
_OWN = [("grpc.use_local_subchannel_pool", 1)]


async def _neighbour(server: Server) -> dict[str, float]:
    """Makes calls and health checks on connections of their own; returns the slowest of each, in milliseconds."""
    slowest = {"health_ms": 0.0, "call_ms": 0.0, "generation_ms": 0.0}
    for _ in range(5):
        async with grpc.aio.insecure_channel(server.address, options=_OWN) as channel:
            calls = {
                "health_ms": health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10),
                "call_ms": texts_grpc.TextClassificationServiceStub(channel).ClassifyText(_TEXTS, timeout=10),
                "generation_ms": generation_grpc.GenerationServiceStub(channel).GenerateText(
                    generation_pb.GenerateTextRequest(
                        prompts=["To be"], parameters=generation_pb.GenerationParameters(max_new_tokens=10)
                    ),
                    timeout=20,
                ),
            }
            for name, call in calls.items():
                began = time.monotonic()
                await call
                slowest[name] = max(slowest[name], round(1e3 * (time.monotonic() - began), 1))
    return slowest


async def _held(server: Server, hold: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> dict[str, Any]:
    """Has something held, asks how neighbours fare, and lets go."""
    await _neighbour(server)  # what is opened for the first connections stays open
    before = {"rss_mib": round(server.rss_mib), "descriptors": server.num_descriptors}
    let_go = await hold()
    held = {"rss_mib": round(server.rss_mib), "descriptors": server.num_descriptors}
    neighbour = await _neighbour(server)
    await let_go()
    await asyncio.sleep(2)
    after = {"rss_mib": round(server.rss_mib), "descriptors": server.num_descriptors}
    check(after["descriptors"] <= before["descriptors"] + 4, f"descriptors {before} -> {after}")
    return {"before": before, "held": held, "after": after, "neighbour": neighbour}


async def _idle(server: Server, count: int) -> dict[str, Any]:
    """Opens channels that do nothing."""
    channels = [grpc.aio.insecure_channel(server.address, options=_OWN) for _ in range(count)]

    async def hold() -> Callable[[], Awaitable[None]]:
        await asyncio.gather(*(channel.channel_ready() for channel in channels))

        async def let_go() -> None:
            await asyncio.gather(*(channel.close() for channel in channels))

        return let_go

    return {"channels": count} | await _held(server, hold)


async def _watches(server: Server, count: int) -> dict[str, Any]:
    """Opens health watches on one connection."""
    channel = grpc.aio.insecure_channel(server.address, options=_OWN)
    stub, codes = health_pb2_grpc.HealthStub(channel), Counter[str]()

    async def watch() -> None:
        try:
            await stub.Watch(health_pb2.HealthCheckRequest(), timeout=60).read()
            codes["accepted"] += 1
        except grpc.aio.AioRpcError as error:
            codes[error.code().name] += 1

    async def hold() -> Callable[[], Awaitable[None]]:
        await asyncio.gather(*(watch() for _ in range(count)))

        async def let_go() -> None:
            await channel.close()

        return let_go

    return {"watches": count, "codes": codes} | await _held(server, hold)


async def _unread(server: Server, count: int) -> dict[str, Any]:
    """Begins streams of 250 tokens that are not read past their first message."""
    options = [*_OWN, ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    channels = [grpc.aio.insecure_channel(server.address, options=options) for _ in range(4)]
    request = generation_pb.StreamGenerateTextRequest(
        prompt="a", parameters=generation_pb.GenerationParameters(max_new_tokens=250)
    )
    streams: list[Any] = []

    async def hold() -> Callable[[], Awaitable[None]]:
        for number in range(count):
            stub = generation_grpc.GenerationServiceStub(channels[number % len(channels)])
            streams.append(stub.StreamGenerateText(request))
        await asyncio.sleep(15)  # until each has had a slot

        async def let_go() -> None:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*(channel.close() for channel in channels))

        return let_go

    return {"streams": count} | await _held(server, hold)


async def _cancelled(server: Server, count: int) -> dict[str, Any]:
    """Cancels calls at once, many at a time, while a neighbour in a process of its own calls on."""
    channel = grpc.aio.insecure_channel(server.address, options=_OWN)
    stub, codes = texts_grpc.TextClassificationServiceStub(channel), Counter[str]()
    before_mib = server.rss_mib
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(1, spawn) as pool:
        ends = manager.Event()
        neighbour = pool.submit(_call_on, server.address, ends)
        for _ in range(count // 500):
            calls = [stub.ClassifyText(_TEXTS, timeout=20) for _ in range(500)]
            await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                codes[type(outcome).__name__] += 1
        ends.set()
        took_ms = sorted(1e3 * seconds for seconds in await asyncio.wrap_future(neighbour))
    await channel.close()
    check(took_ms[-1] < 2_000, f"a neighbour waited {took_ms[-1]:.0f} ms, and made {len(took_ms)} calls")
    after = await _neighbour(server)
    return {
        "calls": count,
        "outcomes": codes,
        "neighbour": {"calls": len(took_ms), "p50_ms": took_ms[len(took_ms) // 2], "slowest_ms": took_ms[-1]},
        "rss_mib": [round(before_mib), round(server.rss_mib)],
        "neighbour_after": after,
    }


def _call_on(address: str, ends: Event) -> list[float]:
    """Makes one call after another until told to end; returns how long each took, in seconds."""
    took_s: list[float] = []
    with grpc.insecure_channel(address, options=_OWN) as channel:
        stub = texts_grpc.TextClassificationServiceStub(channel)
        while not ends.is_set():
            began = time.monotonic()
            stub.ClassifyText(_TEXTS, timeout=20)
            took_s.append(time.monotonic() - began)
            time.sleep(0.02)
    return took_s


async def _burst(server: Server, count: int) -> dict[str, Any]:
    """Begins calls at once on eight connections."""
    channels = [grpc.aio.insecure_channel(server.address, options=_OWN) for _ in range(8)]
    codes: Counter[str] = Counter()

    async def one(number: int) -> None:
        stub = texts_grpc.TextClassificationServiceStub(channels[number % 8])
        try:
            await stub.ClassifyText(_TEXTS, timeout=60)
            codes["OK"] += 1
        except grpc.aio.AioRpcError as error:
            codes[error.code().name] += 1

    await asyncio.gather(*map(one, range(count)))
    await asyncio.gather(*(channel.close() for channel in channels))
    check("CANCELLED" not in codes, f"codes are {codes}")
    return {"calls": count, "codes": codes}


async def _many(server: Server) -> dict[str, Any]:
    """One caller asks for 32 prompts of 16 samples at the highest priority; a neighbour asks for one text."""

    async def one(prompts: int, samples: int, priority: int) -> float:
        began = time.monotonic()
        async with grpc.aio.insecure_channel(server.address, options=_OWN) as channel:
            request = generation_pb.GenerateTextRequest(
                prompts=[f"Scene {number}" for number in range(prompts)],
                sample_count=samples,
                priority=priority,
                parameters=generation_pb.GenerationParameters(max_new_tokens=200),
            )
            await generation_grpc.GenerationServiceStub(channel).GenerateText(request, timeout=120)
        return time.monotonic() - began

    alone_s = await one(1, 1, 0)
    many = asyncio.create_task(one(32, 16, 100))
    await asyncio.sleep(1)
    beside_s = await one(1, 1, 0)
    return {"alone_s": round(alone_s, 2), "beside_s": round(beside_s, 2), "many_s": round(await many, 2)}


def hold(seconds: float) -> dict[str, Any]:
    """Does all of it to one server after another; `seconds` scales how many calls are cancelled."""
    parts: dict[str, tuple[Callable[..., Awaitable[dict[str, Any]]], tuple[int, ...]]] = {
        "idle_channels": (_idle, (1000,)),
        "health_watches": (_watches, (1000,)),
        "unread_streams": (_unread, (544,)),
        "burst": (_burst, (4000,)),
        "cancelled": (_cancelled, (min(50_000, round(500 * seconds)),)),
        "many_samples": (_many, ()),
    }
    results: dict[str, Any] = {}
    for name, (part, arguments) in parts.items():
        with running() as server:
            results[name] = asyncio.run(part(server, *arguments))  # type: ignore[arg-type]
    return results
