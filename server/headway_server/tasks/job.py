"""A call of a model that decodes or draws, from its permit to its answer.

    admitted ──▶ preparing ──▶ running ──▶ answered
       │             │            │
       └─────────────┴────────────┴──▶ failed, cancelled, past its deadline

A job has a place in the model's queue and counts the bytes that it holds. It charges its caller for tokens and measures
where its time goes. Only jobs run engines, and each run names its bytes and its tokens. When a job ends, however it
does, it gives everything back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from headway_server.batching import BatchedResults, Batcher, Tensors
from headway_server.batching.batcher import Reader
from headway_server.serving.answers import Answer, CallTimings, Timed
from headway_server.serving.calls import counted_tokens, current_caller
from headway_server.serving.permits import Admission, Permit

Engine = TypeVar("Engine")
Result = TypeVar("Result")


class Job(Generic[Engine]):
    """One call. A context manager, which belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        memory: Admission,
        *,
        count: int,
        work: float,
        num_bytes: int,
        deadline: float | None,
    ) -> None:
        """Describes a call that asks for its permit when the context is entered.

        Args:
            engine: What runs it, for jobs of a kind.
            admission: Of the model, which counts inputs.
            memory: Of the model, which counts bytes; a job is one of its inputs, since one alone may have any size.
            count: Inputs of the call.
            work: Of each, in the unit of the admission's pace.
            num_bytes: What the call holds from its beginning, beside the inputs of its runs.
            deadline: When the caller stops waiting, by `time.monotonic`.
        """
        self.deadline = deadline
        self.caller = current_caller()
        """Who makes the call; see `current_caller`."""
        self._engine = engine
        self._admission = admission
        self._memory = memory
        self._count = count
        self._work = work
        self._permits = ExitStack()
        self._permit: Permit
        self._holding: Permit | None = None
        self._num_own_bytes = num_bytes
        self._num_run_bytes = 0
        self._preprocessing_s = 0.0
        self._queue_s = 0.0
        self._runs: list[tuple[float, float]] = []  # their beginnings and ends

    def __enter__(self) -> Self:
        """Takes the permit.

        Raises:
            OverloadedError: There is no room, or no time; it says when to come back.
        """
        with ExitStack() as permits:
            self._permits = permits
            self._permit = self.admit(self._count)
            self._count_bytes(self._num_own_bytes, 0)
            self._permits = permits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._permits.__exit__(kind, error, trace)

    def admit(self, count: int) -> Permit:
        """Admits further inputs, until the job ends; errors are those of `__enter__`."""
        work = count * self._work
        permit = self._admission.admit(count, work=work, deadline=self.deadline, caller=self.caller)
        return self._permits.enter_context(permit)

    def hold(self, num_bytes: int) -> None:
        """Changes what the job holds, beside the inputs of its runs.

        Raises:
            OverloadedError: It is more than before, and other calls leave no room for it.
        """
        self._count_bytes(num_bytes, self._num_run_bytes)

    def hold_more(self, num_bytes: int) -> None:
        """Adds to what the job holds; errors are those of `hold`."""
        self.hold(self._num_own_bytes + num_bytes)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Counts the time of the context as preprocessing."""
        began = time.monotonic()
        yield
        self._preprocessing_s += time.monotonic() - began

    @contextmanager
    def _running(
        self,
        *,
        num_bytes: int,
        num_read: int,
        num_written: Callable[[], int] = lambda: 0,
        ends: Iterable[asyncio.Future[Any]] = (),
    ) -> Iterator[None]:
        """Surrounds a run of an engine.

        Args:
            num_bytes: Of its inputs, beside what the job holds already.
            num_read: Tokens that it reads, which the caller is charged for.
            num_written: Returns the tokens that it has written, which the caller is charged for at the end.
            ends: When each is done, the place of one input is given back, though nobody may have read its result yet.

        Raises:
            OverloadedError: Other calls leave no room for the bytes.
        """
        self._count_bytes(self._num_own_bytes, self._num_run_bytes + num_bytes)
        try:
            for end in ends:
                end.add_done_callback(lambda _: self._permit.release(1))
            with counted_tokens(num_read, num_written):
                yield
        finally:
            self._count_bytes(self._num_own_bytes, self._num_run_bytes - num_bytes)

    async def batch(
        self,
        batcher: Batcher,
        items: Sequence[Tensors],
        *,
        outputs: Sequence[str],
        num_bytes: int,
        num_read: int,
        read: Reader[Result] | None = None,
    ) -> BatchedResults[Result]:
        """Runs items of a batcher whose budget counts items; errors and `read` are those of `Batcher.submit`.

        Their times are not those of the job; where they are, they are given to `note`.
        """
        with self._running(num_bytes=num_bytes, num_read=num_read):
            return await batcher.submit(
                items, [1] * len(items), outputs=outputs, read=read, deadline=self.deadline, caller=self.caller
            )

    def note(self, inputs: Iterable[Timed]) -> None:
        """Counts a run that has ended, of one input at least, in the timings of the job."""
        timed = list(inputs)
        self._queue_s = max(self._queue_s, *(one.started_at - one.arrived_at for one in timed))
        self._runs.append((min(one.started_at for one in timed), max(one.finished_at for one in timed)))

    @property
    def timings(self) -> CallTimings:
        """Where the time went so far. What is waited between two runs is no inference."""
        inference_s = ended_at = 0.0
        for began_at, end_at in sorted(self._runs):
            inference_s += max(0.0, end_at - max(began_at, ended_at))
            ended_at = max(ended_at, end_at)
        return CallTimings(queue_s=self._queue_s, preprocessing_s=self._preprocessing_s, inference_s=inference_s)

    def answer(self, results: list[Result]) -> Answer[Result]:
        """Returns the answer to the call."""
        return Answer(results=results, timings=self.timings)

    def _count_bytes(self, num_own: int, num_run: int) -> None:
        """Counts so many bytes in place of those that were counted before; without any, the job does not hold."""
        total = num_own + num_run
        if self._holding is not None:
            self._holding.resize(1, total)
        elif total:
            self._holding = self._permits.enter_context(self._memory.admit(1, total, caller=self.caller))
        self._num_own_bytes, self._num_run_bytes = num_own, num_run

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._count} inputs, {self._num_own_bytes} + {self._num_run_bytes} bytes)"


async def gather(parts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Waits for all parts of a call; the first error ends the others and is the call's."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
