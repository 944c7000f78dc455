"""Runs a load test, as an open or a closed loop.

In the open loop, calls are due at times that are drawn beforehand, and latency counts from the time a call was due. A
stall of the server also delays the calls behind it, and their callers wait. Counting from the moment of sending would
leave out their wait ("coordinated omission").
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

from headway_client.async_client import AsyncClient
from headway_client.errors import CallError, ProtocolError
from headway_client.load.plan import LoadPlan
from headway_client.load.recorder import OK, CallRecord, Recorder
from headway_client.results import Answer

Input = str | bytes


def poisson_arrivals(rate_per_s: float, start_s: float, end_s: float, seed: int) -> Iterator[float]:
    """Yields the times of a Poisson process from `start_s` to `end_s`, in seconds. A seed gives the same times.

    The gaps between independent callers are distributed exponentially, so that calls come in bursts; evenly spaced
    calls would flatter a server.
    """
    generator = random.Random(seed)  # noqa: S311 (load, not secrets)
    due_s = start_s + generator.expovariate(rate_per_s)
    while due_s < end_s:
        yield due_s
        due_s += generator.expovariate(rate_per_s)


class Sender:
    """Makes the calls of a plan and notes what comes back."""

    def __init__(self, client: AsyncClient, plan: LoadPlan, inputs: Sequence[Input]) -> None:
        """Calls by `client`, with the inputs in turn.

        Raises:
            ValueError: There are no inputs.
        """
        if not inputs:
            raise ValueError("a load test needs at least one input")
        self._plan = plan
        self._inputs = inputs
        self._next = 0
        self._call: Any = getattr(client, f"stream_{plan.task.method}" if plan.stream else plan.task.method)
        names = ("model", "model_version", "max_new_tokens", "beam_size", "timeout_s")
        self._options = {name: value for name in names if (value := getattr(plan, name)) is not None}

    async def probe(self) -> None:
        """Makes one call that is not recorded.

        Raises:
            HeadwayError: It failed.
        """
        await self._answer(self._take(), CallRecord(intended_s=0.0))

    async def send(self, call: CallRecord) -> None:
        """Makes one call. A failure is a result too."""
        clock = asyncio.get_running_loop().time
        inputs = self._take()
        call.input_count = len(inputs)
        call.sent_s = clock()
        try:
            answer = await self._answer(inputs, call)
        except CallError as error:
            call.outcome = error.code.name
        except ProtocolError:
            call.outcome = "PROTOCOL_ERROR"
        else:
            call.model = answer.model
            call.token_count = sum(getattr(result, "new_token_count", 0) for result in answer)
        call.ended_s = clock()

    def _take(self) -> list[Input]:
        """Returns the inputs of the next call."""
        first, count = self._next, len(self._inputs)
        self._next = (first + self._plan.batch_size) % count
        return [self._inputs[(first + offset) % count] for offset in range(self._plan.batch_size)]

    async def _answer(self, inputs: list[Input], call: CallRecord) -> Answer[Any]:
        if not self._plan.stream:
            return await self._call(inputs, **self._options)  # type: ignore[no-any-return]  # a method by its name
        clock = asyncio.get_running_loop().time
        async with self._call(inputs[0], **self._options) as stream:
            async for delta in stream:
                call.token_times_s.append((clock(), delta.new_token_count))
            return stream.answer  # type: ignore[no-any-return]  # as above


class LoadRunner:
    """One load test. It ends by itself after warm-up, duration and at most one timeout of a call."""

    def __init__(self, plan: LoadPlan, sender: Sender) -> None:
        """Prepares the test. `recorder` can be read while it runs."""
        self.plan = plan
        self.recorder = Recorder()
        self.elapsed_s = 0.0
        """Length of the measured phase, in seconds."""
        self._sender = sender
        self._start_s = 0.0
        self._end_s = 0.0
        self._calls: set[asyncio.Task[Any]] = set()
        self._driver: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        """An error that is not the failure of a call, and must not count as a measurement."""

    async def run(self) -> Recorder:
        """Runs the test to its end, or until `stop`."""
        self._start_s = self._clock() + self.plan.warmup_s
        self._end_s = self._start_s + self.plan.duration_s
        self.recorder.start_s, self.recorder.end_s = self._start_s, self._end_s
        self._driver = asyncio.create_task(self._open_loop() if self.plan.rate_per_s else self._closed_loop())
        try:
            await asyncio.wait([self._driver])
            self.recorder.end_s = min(self._end_s, self._clock())
            if self._calls:
                await asyncio.wait(self._calls)
            if self._fault is not None:
                raise self._fault
        finally:
            for task in (self._driver, *self._calls):
                task.cancel()
        self.elapsed_s = max(0.0, self.recorder.end_s - self._start_s)
        return self.recorder

    def stop(self) -> None:
        """Starts no more calls and waits for the running ones. A second time, ends these too."""
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            return
        for call in self._calls:
            call.cancel()

    def progress(self) -> float:
        """Returns the part of warm-up and duration that has passed, 0 to 1."""
        if not self._end_s:
            return 0.0
        whole_s = self.plan.warmup_s + self.plan.duration_s
        return min(1.0, max(0.0, 1 - (self._end_s - self._clock()) / whole_s))

    def __repr__(self) -> str:
        """Plan and progress."""
        return f"<LoadRunner {self.plan.task} {self.progress():.0%}, {len(self._calls)} outstanding>"

    async def _open_loop(self) -> None:
        """Starts each call when it is due, or as soon after as the limit of outstanding calls allows."""
        plan, recorder = self.plan, self.recorder
        slots = asyncio.Semaphore(plan.max_outstanding)
        assert plan.rate_per_s is not None
        for due_s in poisson_arrivals(plan.rate_per_s, self._start_s - plan.warmup_s, self._end_s, plan.seed):
            await asyncio.sleep(max(0.0, due_s - self._clock()))
            measured = due_s >= self._start_s
            if slots.locked() and measured:
                recorder.limit_count += 1
            if not await self._acquire(slots):
                recorder.not_sent_count += measured
                continue
            self._begin(due_s, slots)
        await asyncio.sleep(max(0.0, self._end_s - self._clock()))

    async def _acquire(self, slots: asyncio.Semaphore) -> bool:
        """Waits for a free slot, at most until the end of the test. Returns whether there was one."""
        try:
            async with asyncio.timeout_at(self._end_s):
                await slots.acquire()
        except TimeoutError:
            return False
        return True

    def _begin(self, due_s: float, slots: asyncio.Semaphore) -> None:
        self._watch(asyncio.create_task(self._call(due_s))).add_done_callback(lambda _: slots.release())

    def _watch(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Keeps a task until it ends. An unforeseen error ends the test."""

        def ended(task: asyncio.Task[Any]) -> None:
            self._calls.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self._fault = task.exception()
                self.stop()

        self._calls.add(task)
        task.add_done_callback(ended)
        return task

    async def _closed_loop(self) -> None:
        """Keeps every caller busy until the end."""
        assert self.plan.concurrency is not None
        for _ in range(self.plan.concurrency):
            self._watch(asyncio.create_task(self._caller()))
        await asyncio.sleep(max(0.0, self._end_s - self._clock()))

    async def _caller(self) -> None:
        assert self._driver is not None
        while self._clock() < self._end_s and not self._driver.done():
            if await self._call(self._clock()):
                # A server that refuses at once must not turn this into a busy loop.
                await asyncio.sleep(0.01)

    async def _call(self, due_s: float) -> bool:
        """Makes one call and records it. Returns whether it failed."""
        call = CallRecord(intended_s=due_s)
        self.recorder.outstanding_count += 1
        try:
            await self._sender.send(call)
        finally:
            self.recorder.outstanding_count -= 1
        self.recorder.add(call)
        return call.outcome != OK

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()
