"""More calls than the server can answer: calls in time, and what becomes of the others.

The peak is what closed-loop callers get. Then calls begin at a multiple of that rate, whatever becomes of them, each
with the same deadline; then again at half of it, until answers are as quick as before.
"""

import asyncio
import io
import math
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from PIL import Image

from benchmarks.drills.server import Server, running
from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import image_classification_service_pb2 as images_pb
from headway.v1 import image_classification_service_pb2_grpc as images_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc
from headway.v1 import translation_service_pb2 as translation_pb
from headway.v1 import translation_service_pb2_grpc as translation_grpc

Send = Callable[[float], Awaitable[Any]]
_NUM_CHANNELS = 8
_NUM_CLOSED = 64


def _calls(service: str, channel: grpc.aio.Channel) -> Send:
    """Returns what sends one call of a service, with a time limit in seconds."""
    if service == "generation":
        generation = generation_grpc.GenerationServiceStub(channel)
        asked = generation_pb.GenerateTextRequest(prompts=["To be, or not to be"])
        return lambda timeout: generation.GenerateText(asked, timeout=timeout)
    if service == "translation":
        translation = translation_grpc.TranslationServiceStub(channel)
        text = translation_pb.TranslateTextRequest(texts=["A man is riding a bike."], model="multi30k-en-de")
        return lambda timeout: translation.TranslateText(text, timeout=timeout)
    if service == "images":
        images = images_grpc.ImageClassificationServiceStub(channel)
        picture = images_pb.ClassifyImageRequest(images=[_picture()])
        return lambda timeout: images.ClassifyImage(picture, timeout=timeout)
    texts = texts_grpc.TextClassificationServiceStub(channel)
    news = texts_pb.ClassifyTextRequest(texts=["Oil prices fall as supplies rise. " * 8], model="ag-news")
    return lambda timeout: texts.ClassifyText(news, timeout=timeout)


def _picture() -> bytes:
    data = io.BytesIO()
    Image.effect_noise((256, 256), 60).convert("RGB").save(data, "PNG")
    return data.getvalue()


class _Recorder:
    """What became of calls."""

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.ok_s: list[float] = []
        self.ok_at: list[float] = []
        self.refused_s: list[float] = []

    async def send(self, call: Send, timeout_s: float) -> None:
        began = time.monotonic()
        try:
            await call(timeout_s)
        except grpc.aio.AioRpcError as error:
            self.codes[error.code().name] += 1
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.refused_s.append(time.monotonic() - began)
        else:
            self.codes["OK"] += 1
            self.ok_s.append(time.monotonic() - began)
            self.ok_at.append(time.monotonic())


async def _closed(calls: list[Send], seconds: float) -> tuple[float, _Recorder]:
    """Calls from as many callers as keep the server busy; returns the rate of answers."""
    recorder, end = _Recorder(), time.monotonic() + seconds

    async def caller(number: int) -> None:
        while time.monotonic() < end:
            await recorder.send(calls[number % len(calls)], 60)

    began = time.monotonic()
    await asyncio.gather(*map(caller, range(_NUM_CLOSED)))
    return recorder.codes["OK"] / (time.monotonic() - began), recorder


async def _open(calls: list[Send], rate: float, seconds: float, deadline_s: float) -> tuple[float, _Recorder]:
    """Begins calls at a rate, by a Poisson process; returns the rate of answers in time, but for the first seconds."""
    recorder, generator = _Recorder(), random.Random(7)  # noqa: S311 (when calls begin is no secret)
    tasks: set[asyncio.Task[None]] = set()
    began = due = time.monotonic()
    while (due := due + generator.expovariate(rate)) < began + seconds:
        if (wait_s := due - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(recorder.send(calls[generator.randrange(len(calls))], deadline_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        await asyncio.wait(tasks)
    first = began + min(deadline_s, seconds / 3)
    return sum(first < at <= began + seconds for at in recorder.ok_at) / (began + seconds - first), recorder


async def _run(server: Server, service: str, seconds: float, factor: float, deadline_s: float) -> dict[str, Any]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(server.address, options=options) for _ in range(_NUM_CHANNELS)]
    calls = [_calls(service, channel) for channel in channels]
    await _closed(calls, 2)
    peak, closed = await _closed(calls, max(5.0, seconds / 6))
    before_mib = server.rss_mib
    goodput, overloaded = await _open(calls, factor * peak, seconds, deadline_s)
    after_mib = server.rss_mib
    _, recovered = await _open(calls, peak / 4, 2, deadline_s)
    for channel in channels:
        await channel.close()
    return {
        "service": service,
        "seconds": seconds,
        "factor": factor,
        "deadline_s": deadline_s,
        "peak_per_s": round(peak, 1),
        "goodput_per_s": round(goodput, 1),
        "goodput_of_peak": round(goodput / peak, 3),
        "closed_p99_ms": _percentile(closed.ok_s, 99),
        "accepted_p50_ms": _percentile(overloaded.ok_s, 50),
        "accepted_p99_ms": _percentile(overloaded.ok_s, 99),
        "refused_p50_ms": _percentile(overloaded.refused_s, 50),
        "refused_p99_ms": _percentile(overloaded.refused_s, 99),
        "refused_within_100_ms": _share(overloaded.refused_s, 0.1),
        "codes": dict(overloaded.codes),
        "rss_before_mib": round(before_mib),
        "rss_after_mib": round(after_mib),
        "p99_in_the_2_s_after_ms": _percentile(recovered.ok_s, 99),
        "codes_in_the_2_s_after": dict(recovered.codes),
    }


def _share(values: list[float], limit: float) -> float | None:
    """Returns the share of values up to a limit."""
    return round(sum(value <= limit for value in values) / len(values), 3) if values else None


def _percentile(values: list[float], percent: float) -> float | None:
    """Returns a percentile of seconds, in milliseconds."""
    ordered = sorted(values)
    return round(1e3 * ordered[math.ceil(percent / 100 * len(ordered)) - 1], 1) if ordered else None


def overload(service: str, seconds: float, *, factor: float = 3.0, deadline_s: float = 5.0) -> dict[str, Any]:
    """Overloads a server on the shipped models with calls of one service; returns the figures.

    Callers would be on other machines: the server computes on one core, and its threads go before those of the callers.
    """
    with running("--threads", "1") as server:
        os.nice(10)
        return asyncio.run(_run(server, service, seconds, factor, deadline_s))
