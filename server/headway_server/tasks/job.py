"""A call of a decoding or image generation model, from its permit to its answer.

    admitted ──▶ preparing ──▶ running ──▶ answered
       │             │            │
       └─────────────┴────────────┴──▶ failed, cancelled, past its deadline

A job holds a permit of the model's queue and reserves the bytes of its inputs. It charges its caller for tokens and
measures its time by stage. Only jobs run engines, and each run states its bytes and its tokens. At its end, successful
or not, a job releases everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
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
    """One call: a context manager for the event loop alone."""

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
        """Describes a call; entering the context takes its permit.

        Args:
            engine: Engine of the call.
            admission: Admission of the model by inputs.
            memory: Admission of the model by bytes. A job counts as one input, since a single one may have any size.
            count: Inputs of the call.
            work: Work of each input, in the unit of the admission's pace.
            num_bytes: Initial bytes of the call, without the inputs of its runs.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
        """
        self.deadline = deadline
        self.caller = current_caller()
        """Caller; see `current_caller`."""
        self._engine = engine
        self._admission = admission
        self._memory = memory
        self._count = count
        self._work = work
        self._permits = ExitStack()
        self._permit: Permit
        self._memory_permit: Permit | None = None
        self._num_own_bytes = num_bytes
        self._num_run_bytes = 0
        self._preprocessing_s = 0.0
        self._queue_s = 0.0
        self._runs: list[tuple[float, float]] = []  # start and end of each

    def __enter__(self) -> Self:
        """Takes the permit.

        Raises:
            OverloadedError: The queue is full or too long for the deadline; it gives the time to retry after.
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
        if self._runs:
            self.timings.note(self._count)
        self._permits.__exit__(kind, error, trace)

    def admit(self, count: int) -> Permit:
        """Admits further inputs, until the job ends; errors are those of `__enter__`."""
        work = count * self._work
        permit = self._admission.admit(count, work=work, deadline=self.deadline, caller=self.caller)
        return self._permits.enter_context(permit)

    def reserve(self, num_bytes: int) -> None:
        """Sets the bytes of the job, without the inputs of its runs.

        Raises:
            OverloadedError: The bytes increase, and other calls leave no room for them.
        """
        self._count_bytes(num_bytes, self._num_run_bytes)

    def reserve_more(self, num_bytes: int) -> None:
        """Adds to the bytes of the job; errors are those of `reserve`."""
        self.reserve(self._num_own_bytes + num_bytes)

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
        """Surrounds an engine run.

        Args:
            num_bytes: Bytes of its inputs that are not reserved yet.
            num_read: Input tokens, charged to the caller.
            num_written: Returns the number of output tokens, charged to the caller at the end.
            ends: Futures of the inputs. Each returns the permit of one input when it is done.

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
        lengths: Sequence[int] | None = None,
        groups: Sequence[Hashable] | None = None,
    ) -> BatchedResults[Result]:
        """Runs items on a batcher; without `lengths` its budget counts items. The rest is that of `Batcher.submit`.

        Their times are not added to the job's; `note` adds them.
        """
        with self._running(num_bytes=num_bytes, num_read=num_read):
            return await batcher.submit(
                items,
                lengths or [1] * len(items),
                outputs=outputs,
                read=read,
                deadline=self.deadline,
                caller=self.caller,
                groups=groups,
            )

    def note(self, inputs: Iterable[Timed]) -> None:
        """Adds a finished run of at least one input to the timings of the job."""
        timed = list(inputs)
        self._queue_s = max(self._queue_s, *(one.started_at - one.arrived_at for one in timed))
        self._runs.append((min(one.started_at for one in timed), max(one.finished_at for one in timed)))

    @property
    def timings(self) -> CallTimings:
        """Timings so far. Time between two runs does not count as inference."""
        inference_s = ended_at = 0.0
        for began_at, end_at in sorted(self._runs):
            inference_s += max(0.0, end_at - max(began_at, ended_at))
            ended_at = max(ended_at, end_at)
        return CallTimings(queue_s=self._queue_s, preprocessing_s=self._preprocessing_s, inference_s=inference_s)

    def answer(self, results: list[Result]) -> Answer[Result]:
        """Returns the answer to the call."""
        return Answer(results=results, timings=self.timings)

    def _count_bytes(self, num_own: int, num_run: int) -> None:
        """Replaces the counted bytes; a job without bytes takes no permit."""
        total = num_own + num_run
        if self._memory_permit is not None:
            self._memory_permit.resize(1, total)
        elif total:
            self._memory_permit = self._permits.enter_context(self._memory.admit(1, total, caller=self.caller))
        self._num_own_bytes, self._num_run_bytes = num_own, num_run

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._count} inputs, {self._num_own_bytes} + {self._num_run_bytes} bytes)"


async def gather(parts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Waits for all parts of a call; the first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
