"""More calls than the server can answer: calls in time, and what becomes of the others.

Closed-loop callers tell about how many calls the server can answer. Calls then begin by a Poisson process, whatever
becomes of them, each with the same deadline; goodput counts answers in time while calls come. The peak is the best
goodput among rates that rise until calls are left unanswered, and at the best of these rates once more after the
overload. In the overload calls come at a multiple of the peak, and at once after that at half of it, when every call
should be answered again, and soon as quickly as at that rate before.

Callers and server share the machine. Callers are a process of their own that yields to the server (nice 10), and a call
brings several inputs where the model is quick, so that the model and not the making of calls is what is overloaded.
"""

import asyncio
import io
import math
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
from PIL import Image
from tests.drills.server import Server, check, running

from headway.v1 import embedding_service_pb2 as embeddings_pb
from headway.v1 import embedding_service_pb2_grpc as embeddings_grpc
from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import image_classification_service_pb2 as images_pb
from headway.v1 import image_classification_service_pb2_grpc as images_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc
from headway.v1 import translation_service_pb2 as translation_pb
from headway.v1 import translation_service_pb2_grpc as translation_grpc

Send = Callable[..., Awaitable[Any]]
_NUM_CHANNELS = 8
_NUM_CLOSED = 24
_FIRST_RATE = 0.8
"""The peak is looked for from this rate on, of what the closed loop got, ..."""
_NEXT_RATE = 1.15
"""... each time at so many times the rate before, ..."""
_ANSWERED = 0.85
"""... until less than this share of the calls is answered in time."""
_MAX_RATES = 8
_AFTER_S = 6.0
_SHORT_S = 0.25
"""Recovery is looked for in parts of so many seconds."""


class _Service(NamedTuple):
    """What is called."""

    stub: Callable[[grpc.aio.Channel], Any]
    method: str
    request: Any
    deadline_s: float
    """Of each call, unless there is another one."""


def _services() -> dict[str, _Service]:
    texts = [f"{number}. " + "Oil prices fall as supplies rise. " * 8 for number in range(16)]
    return {
        "generation": _Service(
            generation_grpc.GenerationServiceStub,
            "GenerateText",
            generation_pb.GenerateTextRequest(prompts=["To be, or not to be"]),
            5,
        ),
        "translation": _Service(
            translation_grpc.TranslationServiceStub,
            "TranslateText",
            translation_pb.TranslateTextRequest(texts=["A man is riding a bike."] * 16, model="multi30k-en-de"),
            2,
        ),
        "texts": _Service(
            texts_grpc.TextClassificationServiceStub,
            "ClassifyText",
            texts_pb.ClassifyTextRequest(texts=texts, model="ag-news"),
            1,
        ),
        "tokens": _Service(
            texts_grpc.TextClassificationServiceStub,
            "ClassifyTokens",
            texts_pb.ClassifyTokensRequest(texts=texts),
            1,
        ),
        "embeddings": _Service(
            embeddings_grpc.EmbeddingServiceStub,
            "EmbedText",
            embeddings_pb.EmbedTextRequest(texts=texts, model="ag-news"),
            1,
        ),
        "images": _Service(
            images_grpc.ImageClassificationServiceStub,
            "ClassifyImage",
            images_pb.ClassifyImageRequest(images=[_picture()] * 16),
            1,
        ),
    }


SERVICES = ("generation", "translation", "texts", "tokens", "embeddings", "images")


def _picture() -> bytes:
    data = io.BytesIO()
    Image.effect_noise((64, 64), 60).convert("RGB").save(data, "PNG")
    return data.getvalue()


class _Recorder:
    """What became of calls."""

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.ok_s: list[float] = []
        self.ok_at: list[float] = []
        self.due_at: list[float] = []
        self.refused_s: list[float] = []
        self.failed_due_at: list[float] = []

    async def send(self, call: Send, timeout_s: float) -> None:
        began = time.monotonic()
        try:
            await call(timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            self.codes[error.code().name] += 1
            self.failed_due_at.append(began)
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.refused_s.append(time.monotonic() - began)
        else:
            ended = time.monotonic()
            self.codes["OK"] += 1
            self.ok_s.append(ended - began)
            self.ok_at.append(ended)
            self.due_at.append(began)


class _Phase(NamedTuple):
    """Calls at a rate."""

    offered_per_s: float
    goodput_per_s: float
    server_cores: float
    """Processor time of the server, of the whole."""
    caller_cores: float
    recorder: _Recorder
    ended_at: float
    """When the last call was due."""


class _Load:
    """Calls one service of a server."""

    def __init__(self, server: Server, calls: list[Send], deadline_s: float) -> None:
        self._server = server
        self._calls = calls
        self._deadline_s = deadline_s
        self._seed = 0

    async def closed(self, seconds: float) -> float:
        """Calls from as many callers as keep the server busy; returns the rate of answers."""
        recorder, end = _Recorder(), time.monotonic() + seconds

        async def caller(number: int) -> None:
            while time.monotonic() < end:
                await recorder.send(self._calls[number % len(self._calls)], 60)

        began = time.monotonic()
        await asyncio.gather(*map(caller, range(_NUM_CLOSED)))
        return recorder.codes["OK"] / (time.monotonic() - began)

    async def open(self, rate: float, seconds: float, *, waits: bool = True) -> _Phase:
        """Begins calls at a rate; goodput is measured past the first seconds, in which the queue fills.

        Args:
            rate: Calls a second.
            seconds: For how long.
            waits: True waits until the last call has ended.
        """
        self._seed += 1
        recorder, generator = _Recorder(), random.Random(self._seed)
        tasks: set[asyncio.Task[None]] = set()
        began = due = time.monotonic()
        first = began + min(self._deadline_s, seconds / 3)
        cpu_s: tuple[float, float] | None = None
        while (due := due + generator.expovariate(rate)) < began + seconds:
            if (wait_s := due - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            if cpu_s is None and due >= first:
                cpu_s = self._server.cpu_s, time.process_time()
            call = self._calls[generator.randrange(len(self._calls))]
            task = asyncio.create_task(recorder.send(call, self._deadline_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        ended, was = time.monotonic(), cpu_s or (0.0, 0.0)
        measured_s = ended - first
        server_cores = (self._server.cpu_s - was[0]) / measured_s
        caller_cores = (time.process_time() - was[1]) / measured_s
        if tasks and waits:
            await asyncio.wait(tasks)
        goodput = sum(first < at <= ended for at in recorder.ok_at) / measured_s
        return _Phase(rate, goodput, server_cores, caller_cores, recorder, ended)


@asynccontextmanager
async def _memory(server: Server) -> AsyncIterator[list[float]]:
    """Gives the server's memory, in MiB, once a second."""
    samples: list[float] = []

    async def look() -> None:
        while True:
            samples.append(server.rss_mib)
            await asyncio.sleep(1)

    task = asyncio.create_task(look())
    try:
        yield samples
    finally:
        task.cancel()


async def _run(server: Server, name: str, seconds: float, factor: float, deadline_s: float | None) -> dict[str, Any]:
    service = _services()[name]
    deadline_s = deadline_s or service.deadline_s
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(server.address, options=options) for _ in range(_NUM_CHANNELS)]
    request = service.request.SerializeToString()
    calls = [_sends(getattr(service.stub(channel), service.method), request) for channel in channels]
    load, part_s = _Load(server, calls, deadline_s), min(20.0, max(3 * deadline_s, seconds / 10))
    await load.closed(2)
    closed_per_s = await load.closed(part_s / 2)
    peaks = [await load.open(_FIRST_RATE * closed_per_s, part_s)]
    while len(peaks) < _MAX_RATES and peaks[-1].goodput_per_s >= _ANSWERED * peaks[-1].offered_per_s:
        peaks.append(await load.open(_NEXT_RATE * peaks[-1].offered_per_s, part_s))
    best = max(peaks, key=lambda phase: phase.goodput_per_s)
    half = await load.open(best.goodput_per_s / 2, max(3.0, part_s / 2))
    usual_s = _percentile_s(half.recorder.ok_s, 99) or 0.0
    async with _memory(server) as memory_mib:
        over = await load.open(factor * best.goodput_per_s, seconds, waits=False)
    after = await load.open(best.goodput_per_s / 2, _AFTER_S)
    peaks.append(await load.open(best.offered_per_s, part_s))
    peak = max(phase.goodput_per_s for phase in peaks)
    for channel in channels:
        await channel.close()
    third = max(1, len(memory_mib) // 3)
    return {
        "drill": "overload",
        "service": name,
        "seconds": seconds,
        "factor": factor,
        "deadline_s": deadline_s,
        "closed_per_s": round(closed_per_s, 1),
        "peaks": {f"{phase.offered_per_s:.1f}": round(phase.goodput_per_s, 1) for phase in peaks},
        "peak_per_s": round(peak, 1),
        "offered_per_s": round(over.offered_per_s, 1),
        "goodput_per_s": round(over.goodput_per_s, 1),
        "goodput_of_peak": round(over.goodput_per_s / peak, 3),
        "server_cores": [round(best.server_cores, 2), round(over.server_cores, 2)],
        "caller_cores": [round(best.caller_cores, 2), round(over.caller_cores, 2)],
        "accepted_p50_ms": _percentile(over.recorder.ok_s, 50),
        "accepted_p99_ms": _percentile(over.recorder.ok_s, 99),
        "refused_p50_ms": _percentile(over.recorder.refused_s, 50),
        "refused_p99_ms": _percentile(over.recorder.refused_s, 99),
        "refused_within_100_ms": _share(over.recorder.refused_s, 0.1),
        "codes": dict(over.recorder.codes),
        "rss_mib": [round(max(memory_mib[:third])), round(max(memory_mib[-third:]))],
        "half_peak_p99_ms": _percentile(half.recorder.ok_s, 99),
        "all_answered_after_s": round(max([over.ended_at, *after.recorder.failed_due_at]) - over.ended_at, 2),
        "usual_after_s": _recovery_s(after, over.ended_at, usual_s),
        "codes_after": dict(after.recorder.codes),
    }


def _sends(method: Any, request: bytes) -> Send:
    """Returns what sends one call; its request is serialized once."""
    # The generated stubs serialize at every call, which for large requests costs the callers more than the server.
    method._request_serializer = None
    return lambda timeout: method(request, timeout=timeout)


def _recovery_s(after: _Phase, ended_at: float, usual_s: float) -> float | None:
    """Returns after how long the calls that began were as quick as usual, but for one in a hundred; None: not yet."""
    calls = list(zip(after.recorder.due_at, after.recorder.ok_s, strict=True))
    late = [due for due, took_s in calls if took_s > 1.5 * usual_s]
    num_parts = round(_AFTER_S / _SHORT_S)
    for part in range(num_parts):
        from_s = ended_at + part * _SHORT_S
        rest = sum(due >= from_s for due, _ in calls)
        if rest and sum(due >= from_s for due in late) <= rest / 50:
            return part * _SHORT_S
    return None


def _share(values: list[float], limit: float) -> float | None:
    """Returns the share of values up to a limit."""
    return round(sum(value <= limit for value in values) / len(values), 3) if values else None


def _percentile_s(values: list[float], percent: float) -> float | None:
    """Returns a percentile of seconds."""
    ordered = sorted(values)
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1] if ordered else None


def _percentile(values: list[float], percent: float) -> float | None:
    """Returns a percentile of seconds, in milliseconds."""
    value = _percentile_s(values, percent)
    return None if value is None else round(1e3 * value, 1)


def overload(
    service: str, seconds: float, *, factor: float = 3.0, deadline_s: float | None = None, threads: int = 1
) -> dict[str, Any]:
    """Overloads a server on the shipped models with calls of one service; returns the figures.

    Callers would be on other machines: the server computes on one core, and its threads go before those of the callers.

    Raises:
        DrillError: There is no such service.
    """
    check(service in SERVICES, f"there is no service {service!r}; there are {', '.join(SERVICES)}")
    with running("--threads", str(threads)) as server:
        os.nice(10)
        return asyncio.run(_run(server, service, seconds, factor, deadline_s))
