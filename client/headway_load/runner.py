"""Runs a load test, as an open or a closed loop.

In the open loop, due times are fixed beforehand, and latency counts from the due time. A stall of the server also
delays the calls behind it. Counting from the sending would leave out their wait ("coordinated omission"). In the closed
loop a call is due when its caller is free. A stall counts only for the calls that meet it; the delay of later ones is
not measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headway_client import Answer, AsyncClient, CallError, ProtocolError
from headway_load.objectives import time_limits
from headway_load.plan import Input, LoadPlan, Workload
from headway_load.recorder import OK, CallRecord, Recorder

_PAUSE_AFTER_FAILURE_S = 0.01


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of a plan: every `count`-th call or caller, from number `index`."""

    index: int = 0
    count: int = 1

    def of(self, number: int) -> int:
        """Returns this part of a number of callers or slots."""
        return len(range(self.index, number, self.count))


_ALL = Share()


class Sender:
    """Makes the calls of a plan and records their outcome."""

    def __init__(self, client: AsyncClient, plan: LoadPlan, share: Share = _ALL) -> None:
        """Calls through `client`, with the inputs of each workload in turn."""
        self._workloads = plan.workloads
        self._stride = share.count
        self._next = [share.index * workload.batch_size for workload in plan.workloads]
        self._calls: list[Any] = [getattr(client, workload.method) for workload in plan.workloads]
        self._timeout_s = plan.timeout_s

    async def probe(self) -> None:
        """Makes one unrecorded call of each workload.

        Raises:
            HeadwayError: A call failed.
            ValueError: An option has a wrong type or value.
        """
        for number, workload in enumerate(self._workloads):
            options = workload.input_options[0] if workload.input_options else {}
            record = CallRecord(workload=number, intended_s=0.0)
            try:
                await self._answer(list(workload.inputs[: workload.batch_size]), options, record)
            except TypeError as error:
                raise ValueError(f"{workload.name}: {error}") from error

    async def send(self, call: CallRecord) -> None:
        """Makes one call. A failure is recorded as an outcome."""
        clock = asyncio.get_running_loop().time
        inputs, options = self._take(call.workload)
        call.input_count = len(inputs)
        call.sent_s = clock()
        try:
            answer = await self._answer(inputs, options, call)
        except CallError as error:
            call.outcome = error.code.name
        except ProtocolError:
            call.outcome = "PROTOCOL_ERROR"
        else:
            call.model = answer.model
            call.token_count = sum(getattr(result, "new_token_count", 0) for result in answer)
        call.ended_s = clock()

    def _take(self, number: int) -> tuple[list[Input], Mapping[str, Any]]:
        """Returns the inputs of the workload's next call, and their options."""
        workload = self._workloads[number]
        first, count = self._next[number] % len(workload.inputs), len(workload.inputs)
        self._next[number] = first + workload.batch_size * self._stride
        inputs = [workload.inputs[(first + offset) % count] for offset in range(workload.batch_size)]
        return inputs, workload.input_options[first] if workload.input_options else {}

    async def _answer(self, inputs: list[Input], options: Mapping[str, Any], call: CallRecord) -> Answer[Any]:
        workload: Workload = self._workloads[call.workload]
        method, options = self._calls[call.workload], {**workload.options, **options, "timeout_s": self._timeout_s}
        if not workload.stream:
            return await method(inputs, **options)  # type: ignore[no-any-return]  # a method by its name
        clock = asyncio.get_running_loop().time
        async with method(inputs[0], **options) as stream:
            async for delta in stream:
                call.token_times_s.append((clock(), delta.new_token_count))
            return stream.answer  # type: ignore[no-any-return]  # as above


class LoadRunner:
    """One load test, or a process's share of it.

    It ends after warm-up, duration and at most one timeout of a call.
    """

    def __init__(self, plan: LoadPlan, sender: Sender, share: Share = _ALL) -> None:
        """Prepares the test."""
        self.plan = plan
        self.recorders: list[Recorder] = []
        """Recorders, one for each workload; readable while the test runs."""
        self.outstanding_count = 0
        self.elapsed_s = 0.0
        """Length of the measured phase, in seconds."""
        self._sender = sender
        self._share = share
        self._start_s = 0.0
        self._end_s = 0.0
        self._calls: set[asyncio.Task[Any]] = set()
        self._driver: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        """An unexpected error, as opposed to a failed call; it voids the measurement."""

    @property
    def recorder(self) -> Recorder:
        """All workloads together."""
        return Recorder.merged(self.recorders)

    async def run(self, begin_s: float | None = None) -> Recorder:
        """Runs the test to its end, or until `stop`.

        Args:
            begin_s: Start of the warm-up on the event loop's clock. Default: now.
        """
        plan = self.plan
        self._start_s = (self._clock() if begin_s is None else begin_s) + plan.warmup_s
        self._end_s = self._start_s + plan.duration_s
        self.recorders = [
            Recorder(self._start_s, self._end_s, time_limits(plan.objectives, workload.name))
            for workload in plan.workloads
        ]
        self._driver = asyncio.create_task(self._open_loop() if plan.is_open else self._closed_loop())
        try:
            await asyncio.wait([self._driver])
            end_s = min(self._end_s, self._clock())
            for recorder in self.recorders:
                recorder.end_s = end_s
            if self._calls:
                await asyncio.wait(self._calls)
            if self._fault is not None:
                raise self._fault
            if not self._driver.cancelled():
                self._driver.result()
        finally:
            for task in (self._driver, *self._calls):
                task.cancel()
        self.elapsed_s = max(0.0, end_s - self._start_s)
        return self.recorder

    def stop(self) -> None:
        """Starts no more calls and waits for the running ones. A second call ends these too."""
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            return
        for call in self._calls:
            call.cancel()

    def progress(self) -> float:
        """Returns the elapsed part of warm-up and duration, 0 to 1."""
        if not self._end_s:
            return 0.0
        whole_s = self.plan.warmup_s + self.plan.duration_s
        return min(1.0, max(0.0, 1 - (self._end_s - self._clock()) / whole_s))

    def __repr__(self) -> str:
        """Plan and progress."""
        return f"<LoadRunner {self.plan.describe()}: {self.progress():.0%}, {self.outstanding_count} outstanding>"

    async def _open_loop(self) -> None:
        """Starts each call when it is due, or as soon after as the limit of outstanding calls allows."""
        places = asyncio.Semaphore(self._share.of(self.plan.max_outstanding))
        for due_s, number in islice(self.plan.schedule(self._start_s), self._share.index, None, self._share.count):
            await asyncio.sleep(max(0.0, due_s - self._clock()))
            measured = due_s >= self._start_s
            if places.locked() and measured:
                self.recorders[number].limit_count += 1
            if not await self._acquire(places):
                self.recorders[number].not_sent_count += measured
                continue
            call = CallRecord(workload=number, intended_s=due_s)
            self._watch(asyncio.create_task(self._call(call))).add_done_callback(lambda _: places.release())
        await asyncio.sleep(max(0.0, self._end_s - self._clock()))

    async def _acquire(self, places: asyncio.Semaphore) -> bool:
        """Waits for a free slot, at most until the end of the test; returns True if there was one."""
        try:
            async with asyncio.timeout_at(self._end_s):
                await places.acquire()
        except TimeoutError:
            return False
        return True

    def _watch(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Holds a task until it ends. An unexpected error ends the test."""

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
        begin_s = self._start_s - self.plan.warmup_s
        await asyncio.sleep(max(0.0, begin_s - self._clock()))
        for caller in islice(range(self.plan.concurrency), self._share.index, None, self._share.count):
            self._watch(asyncio.create_task(self._caller(caller)))
        await asyncio.sleep(max(0.0, self._end_s - self._clock()))

    async def _caller(self, caller: int) -> None:
        assert self._driver is not None
        for number in self.plan.choices(caller):
            if self._clock() >= self._end_s or self._driver.done():
                return
            call = CallRecord(workload=number, intended_s=self._clock())
            await self._call(call)
            if call.outcome != OK:  # immediate refusals must not turn this into a busy loop
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _call(self, call: CallRecord) -> None:
        """Makes one call and records it."""
        self.outstanding_count += 1
        try:
            await self._sender.send(call)
        finally:
            self.outstanding_count -= 1
        self.recorders[call.workload].add(call)

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()
