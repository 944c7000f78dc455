"""Processes that make the calls of a load test, so that the progress display never delays a call.

Each runs its `Share` of every plan on its own event loop and channel. They are spawned once, and run
one plan after another.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

from headway_client import NO_RETRIES, AsyncClient, HeadwayError
from headway_load.plan import LoadPlan, Workload
from headway_load.recorder import Recorder
from headway_load.runner import LoadRunner, Sender, Share

MAX_PROCESSES = 64
_SNAPSHOT_PERIOD_S = 0.5
_HEAD_START_S = 0.05
"""Delay between the start order to the processes and the start."""


class WorkloadSnapshot(NamedTuple):
    """Measurements of a workload so far."""

    completed_count: int
    failed_count: int
    p50_ms: float
    p99_ms: float
    first_token_p95_ms: float


class Snapshot(NamedTuple):
    """Progress of a test."""

    progress: float
    """Progress, 0 to 1, warm-up included."""
    outstanding_count: int
    workloads: tuple[WorkloadSnapshot, ...]

    @classmethod
    def merged(cls, snapshots: Sequence[Self]) -> Self:
        """Adds up the counts of several processes; takes the highest of each percentile, an upper bound."""
        return cls(
            min(snapshot.progress for snapshot in snapshots),
            sum(snapshot.outstanding_count for snapshot in snapshots),
            tuple(
                WorkloadSnapshot(
                    sum(each.completed_count for each in same),
                    sum(each.failed_count for each in same),
                    max(each.p50_ms for each in same),
                    max(each.p99_ms for each in same),
                    max(each.first_token_p95_ms for each in same),
                )
                for same in zip(*(snapshot.workloads for snapshot in snapshots), strict=True)
            ),
        )


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Measurements of a plan."""

    plan: LoadPlan
    recorders: list[Recorder]
    """One for each workload."""
    elapsed_s: float
    """Length of the measured phase, in seconds."""
    busy_share: float = 0.0
    """CPU share of the busiest process; near 1 it sends late."""
    was_stopped: bool = False
    recorder: Recorder = field(init=False)
    """All workloads together."""

    def __post_init__(self) -> None:
        """Adds up."""
        self.recorder = Recorder.merged(self.recorders)


class LoadProcesses:
    """Processes that run load plans. Leaving the `with` block ends them."""

    def __init__(self, connection: dict[str, Any], count: int = 1) -> None:
        """Starts `count` processes.

        Args:
            connection: Keyword arguments of `AsyncClient`.
            count: Number of processes.

        Raises:
            ImportError: HdrHistogram is not installed.
            ValueError: `count` is out of its range.
        """
        if not 1 <= count <= MAX_PROCESSES:
            raise ValueError(f"processes is {count}; must be from 1 to {MAX_PROCESSES}")
        Recorder()  # tells at once if what it needs is not installed
        self.server = AsyncClient(**connection).server
        context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, connection, Share(index, count)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, plan: LoadPlan, show: Callable[[Snapshot], None] | None = None) -> Outcome:
        """Runs a plan. Ctrl-C starts no more calls, and a second one ends those that run.

        Args:
            plan: The plan.
            show: Called about twice a second while it runs.

        Raises:
            HeadwayError: A call before the test failed: the server is unreachable or refuses such requests.
            ValueError: There are fewer callers or outstanding calls than processes, or an option cannot be sent.
        """
        count = len(self._pipes)
        places = plan.max_outstanding if plan.concurrency is None else plan.concurrency
        if places < count:
            name = "outstanding calls" if plan.is_open else "callers"
            raise ValueError(f"{places} {name} cannot be shared by {count} processes")
        self._tell(plan)
        for pipe in self._pipes:
            self._receive(pipe)  # it has called
        self._tell(time.monotonic() + _HEAD_START_S)
        snapshots: dict[Connection, Snapshot] = {}
        ended: dict[Connection, tuple[list[Recorder], float, float]] = {}
        with self._stopped_by_interrupt() as stops:
            while len(ended) < count:
                ready = wait(pipe for pipe in self._pipes if pipe not in ended)
                for pipe in (pipe for pipe in self._pipes if pipe in ready):
                    message = self._receive(pipe)
                    if isinstance(message, Snapshot):
                        snapshots[pipe] = message
                    else:
                        ended[pipe] = message
                if show is not None and len(snapshots) == count:
                    show(Snapshot.merged(list(snapshots.values())))
        shares = list(ended.values())
        return Outcome(
            plan=plan,
            recorders=[Recorder.merged(same) for same in zip(*(share[0] for share in shares), strict=True)],
            elapsed_s=max(share[1] for share in shares),
            busy_share=max(share[2] for share in shares),
            was_stopped=bool(stops),
        )

    def _tell(self, message: object) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # an ended process tells the reason
                pipe.send(message)

    def _receive(self, pipe: Connection) -> Any:
        """Returns a process's message; raises its error."""
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            raise HeadwayError("a process of the load test was ended from outside") from None
        if isinstance(message, BaseException):
            raise message
        return message

    @contextmanager
    def _stopped_by_interrupt(self) -> Iterator[list[int]]:
        stops: list[int] = []

        def stop(number: int, _: FrameType | None) -> None:
            stops.append(number)
            self._tell(None)

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield stops
        finally:
            signal.signal(signal.SIGINT, before)

    def close(self) -> None:
        """Ends the processes, even busy ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5)
            process.terminate()
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LoadProcesses {len(self._processes)} on {self.server}>"


def _work(pipe: Connection, connection: dict[str, Any], share: Share) -> None:
    """Runs plans in a process until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent handles it
    # asyncio's preferred selectors wait in whole milliseconds, so calls would be up to one late.
    precise = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector()))
    with suppress(asyncio.CancelledError), precise as runner:
        runner.run(_Worker(pipe, connection, share).serve())


class _Worker:
    """Inside of such a process. It receives plans, start times, and None to stop; it sends snapshots and results."""

    def __init__(self, pipe: Connection, connection: dict[str, Any], share: Share) -> None:
        self._pipe = pipe
        self._connection = connection
        self._share = share
        self._runner: LoadRunner | None = None
        self._probed: tuple[Workload, ...] = ()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()

    async def serve(self) -> None:
        listening = (asyncio.get_running_loop(), asyncio.current_task())
        threading.Thread(target=self._listen, args=listening, name="load-commands", daemon=True).start()
        async with AsyncClient(**self._connection, retry=NO_RETRIES) as client:
            while True:
                plan = await self._inbox.get()
                result: object
                try:
                    result = await self._run(Sender(client, plan, self._share), plan)
                except Exception as error:  # the parent raises it
                    result = error
                self._pipe.send(result)

    async def _run(self, sender: Sender, plan: LoadPlan) -> tuple[list[Recorder], float, float]:
        if plan.workloads != self._probed:  # once: after an overload the server may refuse for a while
            await sender.probe()
            self._probed = plan.workloads
        self._pipe.send("ready")
        begin_s = await self._inbox.get()
        self._runner = LoadRunner(plan, sender, self._share)
        telling = asyncio.create_task(self._tell_snapshots(self._runner))
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            await self._runner.run(begin_s)
            busy_share = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
            return self._runner.recorders, self._runner.elapsed_s, busy_share
        finally:
            telling.cancel()
            self._runner = None

    async def _tell_snapshots(self, runner: LoadRunner) -> None:
        while True:
            await asyncio.sleep(_SNAPSHOT_PERIOD_S)
            workloads = tuple(
                WorkloadSnapshot(
                    each.completed_count,
                    sum(each.error_counts.values()),
                    each.latency.percentile_ms(50),
                    each.latency.percentile_ms(99),
                    each.first_token.percentile_ms(95),
                )
                for each in runner.recorders
            )
            self._pipe.send(Snapshot(runner.progress(), runner.outstanding_count, workloads))

    def _listen(self, loop: asyncio.AbstractEventLoop, serving: asyncio.Task[None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            try:
                while True:
                    loop.call_soon_threadsafe(self._hear, self._pipe.recv())
            except (EOFError, OSError):  # the parent has ended
                loop.call_soon_threadsafe(serving.cancel)

    def _hear(self, message: object) -> None:
        if message is not None:
            self._inbox.put_nowait(message)
        elif self._runner is not None:
            self._runner.stop()
