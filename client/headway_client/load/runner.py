"""Runs a load test: the open and the closed loop.

In the open loop calls are due at times drawn beforehand, and every latency is counted from the time a call was due.
A server that stalls delays the calls behind the stall too, and their callers wait; a tester that counts from the
moment of sending would leave these waits out ("coordinated omission").
"""

from __future__ import annotations

import asyncio
from typing import Any

from headway_client.load.arrivals import poisson_arrivals
from headway_client.load.plan import LoadPlan
from headway_client.load.recorder import OK, CallRecord, Recorder
from headway_client.load.sender import Sender


class LoadRunner:
    """One load test; it stops by itself after warm-up, duration and at most one timeout of a call."""

    def __init__(self, plan: LoadPlan, sender: Sender) -> None:
        """Prepares the test; `recorder` can be read while it runs."""
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
        """An error that is no failure of a call: it must not pass for a measurement."""

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
        """Begins no more calls; those that are running are waited for. Called again, it ends them."""
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            return
        for call in self._calls:
            call.cancel()

    def progress(self) -> float:
        """Part of warm-up and duration that has passed, 0 to 1."""
        if not self._end_s:
            return 0.0
        whole_s = self.plan.warmup_s + self.plan.duration_s
        return min(1.0, max(0.0, 1 - (self._end_s - self._clock()) / whole_s))

    def __repr__(self) -> str:
        """Plan and progress."""
        return f"<LoadRunner {self.plan.task} {self.progress():.0%}, {len(self._calls)} outstanding>"

    async def _open_loop(self) -> None:
        """Begins every call when it is due, or as soon after as the bound on outstanding calls lets it."""
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
        """Waits for a slot, at most until the end of the test."""
        try:
            async with asyncio.timeout_at(self._end_s):
                await slots.acquire()
        except TimeoutError:
            return False
        return True

    def _begin(self, due_s: float, slots: asyncio.Semaphore) -> None:
        self._watch(asyncio.create_task(self._call(due_s))).add_done_callback(lambda _: slots.release())

    def _watch(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Keeps a task until it ends; an unforeseen error ends the test."""

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
                # A server that refuses at once must not make this a busy loop.
                await asyncio.sleep(0.01)

    async def _call(self, due_s: float) -> bool:
        """Makes one call and records it; tells whether it failed."""
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
