"""Calls `StreamGenerateText` from one process and notes when tokens come.

It uses the generated stub alone, on one event loop: the client shares the machine's cores with the server, so what it
takes itself is part of what is measured, and is reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
from prompts import Prompt, PromptSource

from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as pb
from headway.v1 import generation_service_pb2_grpc as pb_grpc
from headway_client.connection import Connection

WARM_UP_ANSWERS = 1
"""Answers of each stream before the measurement begins: the streams are then at different places of theirs."""


@dataclass(slots=True)
class Call:
    """One answer as it came, by `time.perf_counter`."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    """When each token came; tokens of one message came together."""

    @property
    def first_token_s(self) -> float:
        """From asking to the first token."""
        return self.token_times_s[0] - self.sent_s


class StreamCaller:
    """Asks one model of a server."""

    def __init__(self, channel: grpc.aio.Channel, model: str) -> None:
        self._stub = pb_grpc.GenerationServiceStub(channel)
        self._model = model

    async def tokens(self, prompt: Prompt, new_tokens: int, call: Call) -> AsyncIterator[int]:
        """Continues a prompt greedily; notes the times in `call` and yields how many tokens came with each message.

        Raises:
            RuntimeError: The answer ended early.
            grpc.RpcError: The call failed.
        """
        parameters = pb.GenerationParameters(
            max_new_tokens=new_tokens, sampling=common_pb2.SamplingParameters(temperature=0.0)
        )
        request = pb.StreamGenerateTextRequest(model=self._model, prompt=prompt.text, parameters=parameters)
        async for message in self._stub.StreamGenerateText(request):
            now_s = time.perf_counter()
            count = message.new_token_count - len(call.token_times_s)
            if count > 0:
                call.token_times_s += [now_s] * count
                yield count
        if len(call.token_times_s) != new_tokens:
            raise RuntimeError(f"an answer has {len(call.token_times_s)} tokens; {new_tokens} were asked for")

    async def ask(self, prompt: Prompt, new_tokens: int) -> Call:
        """Continues a prompt and waits for all of it."""
        call = Call(time.perf_counter())
        async for _ in self.tokens(prompt, new_tokens, call):
            pass
        return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model of a server."""

    address: str
    model: str

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[StreamCaller]:
        """Connects first, so that this is no part of a measurement."""
        async with Connection(self.address).open_async() as channel:
            await channel.channel_ready()
            yield StreamCaller(channel, self.model)


def measure_streams(
    target: Target, prompts: PromptSource, *, num_streams: int, new_tokens: int, seconds: float
) -> dict[str, float]:
    """Keeps streams busy, each asking again when it has its answer, and measures tokens a second.

    The measured time begins with the first token after `num_streams x new_tokens` others and holds a whole multiple of
    as many: as many prompts are read in it as answers are produced.

    Returns:
        `tokens_per_s`, `first_token_p50_ms`, `token_gap_p50_ms`, `token_gap_p99_ms`, `client_cores` (processor seconds
        a second of this process).
    """
    window = _Window(cycle=num_streams * new_tokens, seconds=seconds)
    calls = asyncio.run(_fill(window, target, prompts, num_streams, new_tokens))
    gaps_ms = gaps_within(calls, window.begun_s, window.ended_s)
    firsts_ms = [call.first_token_s * 1e3 for call in calls if call.token_times_s and call.sent_s >= window.begun_s]
    return {
        "tokens_per_s": window.tokens_per_s,
        "first_token_p50_ms": float(np.median(firsts_ms)),
        "token_gap_p50_ms": float(np.median(gaps_ms)),
        "token_gap_p99_ms": float(np.percentile(gaps_ms, 99)),
        "client_cores": window.client_cores,
    }


async def _fill(
    window: _Window, target: Target, prompts: PromptSource, num_streams: int, new_tokens: int
) -> list[Call]:
    """Lets streams run until the window has what it wants; returns all calls."""
    calls: list[Call] = []
    async with target.connect() as stream_caller:

        async def keep_busy() -> None:
            while True:
                call = Call(time.perf_counter())
                calls.append(call)
                async for count in stream_caller.tokens(prompts.take(1)[0], new_tokens, call):
                    window.add(count, call.token_times_s[-1])

        await run_until(window.has_ended, [keep_busy() for _ in range(num_streams)])
    return calls


class _Window:
    """The measured time, in tokens."""

    def __init__(self, *, cycle: int, seconds: float) -> None:
        self._cycle = cycle
        self._seconds = seconds
        self._count = 0
        self._cpu_s = 0.0
        self._measured = 0
        self.begun_s = float("inf")
        self.ended_s = float("inf")
        self.has_ended = asyncio.Event()

    def add(self, count: int, now_s: float) -> None:
        """Counts tokens that came at `now_s`."""
        before, self._count = self._count, self._count + count
        first = self._cycle * WARM_UP_ANSWERS
        if before < first <= self._count:
            self.begun_s, self._cpu_s = now_s, time.process_time()
        if self.has_ended.is_set() or self._count <= first or before // self._cycle == self._count // self._cycle:
            return
        if now_s - self.begun_s >= self._seconds:
            self.ended_s, self._cpu_s = now_s, time.process_time() - self._cpu_s
            self._measured = self._count - first
            self.has_ended.set()

    @property
    def tokens_per_s(self) -> float:
        """Tokens that came within the time."""
        return self._measured / (self.ended_s - self.begun_s)

    @property
    def client_cores(self) -> float:
        """Processor seconds a second of this process, within the time."""
        return self._cpu_s / (self.ended_s - self.begun_s)


def gaps_within(calls: list[Call], begun_s: float, ended_s: float) -> list[float]:
    """Times between messages with tokens that follow each other in an answer, in ms, where both came within a time."""
    return [
        float(gap) * 1e3
        for call in calls
        for gap in np.diff(np.unique([time_s for time_s in call.token_times_s if begun_s <= time_s <= ended_s]))
    ]


async def run_until(event: asyncio.Event, endless: list[Coroutine[Any, Any, None]]) -> None:
    """Runs what does not end by itself until an event, and cancels it; what fails before fails this too."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in endless]
    waiting = asyncio.ensure_future(event.wait())
    try:
        done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiting}:  # a failure, or an end that has set the event
            task.result()
    finally:
        for task in (waiting, *tasks):
            task.cancel()
        await asyncio.gather(waiting, *tasks, return_exceptions=True)
