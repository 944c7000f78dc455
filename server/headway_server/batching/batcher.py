"""Runs the items of all calls to one model in batches.

As many batches run at a time as the model has lanes, and one more thread has the next one ready. While a lane is idle,
whatever waits is taken at once, shared out among the idle lanes: nothing waits for a batch to fill. While all lanes are
busy, the thread that is left takes a batch early only if it is full, since a smaller one would shut out callers who
are about to come. Items whose caller has gone or is too late are dropped when their batch's turn comes.

Calls wait on the event loop; batches run in threads. `PendingCall` and `_LoneCaller` belong to the loop, all else here
to the threads. A short item of a caller who is alone is run on the loop itself.

N is the number of a call's items.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

import structlog

from headway_server.batching.graph import NO_COSTS, RunCosts, Tensors
from headway_server.batching.queue import BatchQueue, Entry
from headway_server.errors import DeadlineError, DrainingError, ModelRunError, is_failure
from headway_server.observers import NO_OBSERVER, BatchEvent, BatchMember, ModelId, Observer, QueueEvent, current_call
from headway_server.runtime import (
    CLOSE_TIMEOUT_S,
    Cores,
    Heartbeat,
    Session,
    join_threads,
    own_niceness,
    set_own_niceness,
)

Result = TypeVar("Result")
Reader = Callable[[Tensors, int], Result]
"""Makes the result of an item from its outputs and its place in the call; called on a batcher's thread."""

_LEAST_PAUSE_S: Final = 0.1e-3
"""What the event loop waits at least for the next call of a caller who is alone."""
_CALLS_OF_A_LONE_CALLER: Final = 16
"""Calls in turn after which their caller is taken to be alone."""

_log = structlog.get_logger(__name__)


class BatchError(ModelRunError):
    """The model could not be run; the log says why. A bug or a broken machine, never the caller's fault."""


class Graph(Protocol):
    """What a batcher runs; `BatchGraph` is the one that serves. Methods are called from the batcher's threads."""

    def collate(self, items: Sequence[Tensors]) -> Tensors:
        """Makes the inputs of a batch."""

    def run(self, inputs: Tensors, outputs: Sequence[str]) -> Tensors:
        """Runs the graph for the named outputs, in as many threads at a time as there are lanes."""

    def split(self, outputs: Tensors, items: Sequence[Tensors]) -> Sequence[Tensors]:
        """Takes the outputs of a batch apart, item by item."""


class ItemTimes(NamedTuple):
    """When an item was submitted and when the run it was part of began and ended, by `time.monotonic`."""

    arrived_at: float
    started_at: float
    finished_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedResults(Generic[Result]):
    """The results of a call, in its order."""

    results: list[Result]
    """N of them."""
    runs: list[ItemTimes]
    """One for each."""


class PendingCall:
    """A call that waits for its results, which may come from several batches. Belongs to the event loop."""

    def __init__(self, num_items: int, outputs: tuple[str, ...], read: Reader[Any] | None) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outputs = outputs
        self.read = read
        self.arrived_at = time.monotonic()
        self.call = current_call()
        self.results: list[Any] = [None] * num_items
        self.runs: list[ItemTimes | None] = [None] * num_items
        self._num_missing = num_items

    @property
    def is_over(self) -> bool:
        """True if nobody waits for it: answered, failed, or its caller has gone. May be asked from any thread."""
        return self.future.done()

    def put(self, index: int, result: Any, times: ItemTimes) -> None:
        """Takes the result of one item."""
        self.results[index], self.runs[index] = result, times
        self._num_missing -= 1
        if not self._num_missing and not self.future.done():
            self.future.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fails the whole call."""
        if not self.future.done():
            self.future.set_exception(error)


class _LoneCaller:
    """Finds out whether a model has one caller, who waits for each answer before the next call.

    Handing an item to a thread and hearing of it again takes a tenth of a millisecond, which that caller need not wait
    for. Items of several callers go to the threads, which run them together and on other cores than the event loop's.
    A caller is alone while nothing of the model runs when a call comes, and the event loop had nothing to do for a
    moment since it gave the last answer: with a second caller there would have been a call to read. Belongs to the
    event loop.
    """

    def __init__(self) -> None:
        self._idle_s = 0.0  # of this thread, when it gave the last answer
        self._num_calls = 0

    def is_next(self, *, is_idle: bool) -> bool:
        """Notes a call, and returns True if it and enough before it came from a caller who is alone.

        Args:
            is_idle: True if nothing of the model waits or runs.
        """
        is_alone = is_idle and _idle_s() - self._idle_s >= _LEAST_PAUSE_S
        self._num_calls = self._num_calls + 1 if is_alone else 0
        return self._num_calls > _CALLS_OF_A_LONE_CALLER

    def answered(self) -> None:
        """Notes that a call was answered on the event loop."""
        self._idle_s = _idle_s()


def _idle_s() -> float:
    """Returns how long this thread has not been at work, since some moment."""
    return time.perf_counter() - time.thread_time()


class Batcher:
    """Batches the items of all calls to one model."""

    def __init__(
        self,
        graph: Graph,
        *,
        budget: int,
        model: ModelId,
        session: Session | None = None,
        costs: RunCosts = NO_COSTS,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """Prepares a batcher.

        Args:
            graph: What runs the batches.
            budget: Most that `longest x count` of a batch may be.
            model: For the threads, the log and the observer.
            session: What `graph` runs, which says how many runs are worth having at a time; None: one.
            costs: From the warm-up of `graph`.
            observer: Is told what leaves the queue and what was run.
        """
        self._graph = graph
        self._model = model
        self._observer = observer
        self._queue = BatchQueue(budget, costs.max_padding)
        self._max_inline = costs.max_inline
        self._lone_caller = _LoneCaller()
        self._calls: set[PendingCall] = set()  # of the event loop: all that are not over
        self._changed = threading.Condition()  # guards the queue, the counts below and the busy lanes
        self._num_taken = 0  # batches that were taken and have not run to their end
        self._is_closed = False
        self._failure: BaseException | None = None
        self._heartbeat = Heartbeat()
        self._niceness = own_niceness()  # of the thread that loads the model
        self._num_lanes = 1 if session is None else session.num_lanes
        self._lanes = threading.Semaphore(self._num_lanes)
        self._busy_lanes = (Cores(1) if session is None else session.cores).busy_lanes()
        self._threads = [
            threading.Thread(target=self._work, name=f"batcher-{model.name}-{number}", daemon=True)
            for number in range(self._num_lanes + 1)
        ]

    def start(self) -> None:
        """Starts the threads; the event loop that calls is the one that results are handed to."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """True from `start` to `close`, unless a thread has ended by itself."""
        return all(thread.is_alive() for thread in self._threads) and not self._is_closed and self._failure is None

    def stalled_s(self) -> float:
        """Returns for how many seconds the oldest batch at work has been at it; 0.0 where none is. Takes no lock."""
        return self._heartbeat.stalled_s()

    @property
    def num_waiting(self) -> int:
        """Items in the queue."""
        return len(self._queue)

    async def submit(
        self,
        items: Sequence[Tensors],
        lengths: Sequence[int],
        *,
        outputs: Sequence[str],
        read: Reader[Result] | None = None,
        deadline: float | None,
        caller: str = "",
    ) -> BatchedResults[Result]:
        """Waits for the results of a call's items. If the caller goes, what has not run is dropped.

        Args:
            items: The inputs of each item, at least one.
            lengths: What each takes of the budget when it is its batch's longest.
            outputs: Which outputs of the graph are wanted.
            read: Makes each item's result from its outputs, off the event loop; None: the outputs are the result.
            deadline: When the caller stops waiting, by `time.monotonic`.
            caller: Who waits: the calls of one caller wait behind each other.

        Raises:
            BatchError: The model could not be run, or its outputs could not be read.
            DeadlineError: The deadline passed before all items ran.
            DrainingError: The batcher was closed.
        """
        if len(items) == 1 and lengths[0] <= self._max_inline and self._may_run_inline(deadline):
            return self._run_inline(items[0], lengths[0], outputs, read)
        call = PendingCall(len(items), tuple(outputs), read)
        entries = [
            Entry(item=item, length=length, call=call, index=index, deadline=deadline)
            for index, (item, length) in enumerate(zip(items, lengths, strict=True))
        ]
        self._calls.add(call)
        try:
            with self._changed:
                self._check_open()
                self._queue.add(entries, caller)
                self._count_busy()
                self._changed.notify()
            await call.future
        except BaseException as error:
            with self._changed:
                dropped = self._queue.remove(entries)
                self._count_busy()
            self._report_left(dropped, "expired" if isinstance(error, DeadlineError) else "cancelled")
            raise
        finally:
            self._calls.discard(call)
        return BatchedResults(results=call.results, runs=cast("list[ItemTimes]", call.runs))

    def _may_run_inline(self, deadline: float | None) -> bool:
        """Returns True if the caller is alone and a lane is idle, which is then taken, as is a batch."""
        if not self._lone_caller.is_next(is_idle=not self._num_taken and not self._queue):
            return False
        with self._changed:
            is_late = deadline is not None and deadline <= time.monotonic()
            if is_late or self._is_closed or self._failure is not None or not self._lanes.acquire(blocking=False):
                return False
            self._num_taken += 1
            self._count_busy()
        return True

    def _run_inline(
        self, item: Tensors, length: int, outputs: Sequence[str], read: Reader[Result] | None
    ) -> BatchedResults[Result]:
        """Runs one item on the event loop.

        Raises:
            BatchError: The model could not be run, or its outputs could not be read.
        """
        arrived = time.monotonic()
        entry = Entry(item=item, length=length, call=PendingCall(1, tuple(outputs), read), index=0, deadline=None)
        try:
            with self._heartbeat.working():
                inputs = self._graph.collate([item])
                started = time.monotonic()
                found = self._graph.run(inputs, list(outputs))
                finished = time.monotonic()
                [row] = self._graph.split(found, [item])
                result: Any = row if read is None else read(row, 0)
        except Exception as error:
            _log.error("a batch failed", model=self._model.name, num_items=1, exc_info=error)
            raise _batch_error() from error
        finally:
            self._lanes.release()
            with self._changed:
                self._num_taken -= 1
                self._count_busy()
                if self._can_take():
                    self._changed.notify()
            self._lone_caller.answered()
        self._report_left([entry], "started", started)
        self._report_batch([entry], started, finished)
        return BatchedResults(results=[result], runs=[ItemTimes(arrived, started, finished)])

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Fails every call that still waits and ends the threads after what they are running.

        What runs for longer than `timeout_s` is left behind, in the log, and its calls fail. May be called from any
        thread; on the event loop's own, running calls would not hear of their results meanwhile.

        Returns:
            True if the threads have ended.
        """
        with self._changed:
            self._is_closed = True
            waiting = self._queue.remove_all()
            self._count_busy()
            self._changed.notify_all()
        if waiting:
            self._post(_fail, waiting, _closed_error())
        has_ended = join_threads(self._threads, owner=self._model.name, timeout_s=timeout_s)
        if not has_ended:
            self._post(self._fail_calls, _closed_error())
        return has_ended

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed_error()
        if self._failure is not None:
            raise _batch_error()

    def _work(self) -> None:
        set_own_niceness(self._niceness)
        try:
            while (batch := self._next_batch()) is not None:
                self._run(batch)
        except BaseException as error:  # a bug: without this thread, calls would wait for ever
            _log.critical("a batcher has ended by itself", model=self._model.name, exc_info=error)
            with self._changed:
                self._failure = error
                self._queue.remove_all()
                self._changed.notify_all()
            self._post(self._fail_calls, _batch_error())

    def _next_batch(self) -> list[Entry] | None:
        """Waits for a batch; None when the batcher is closed or has failed."""
        with self._changed:
            while not self._is_closed and self._failure is None:
                if not self._can_take():
                    self._changed.wait()
                    continue
                batch, expired = self._queue.take(time.monotonic(), max(1, self._num_lanes - self._num_taken))
                self._drop_expired(expired)
                self._num_taken += bool(batch)
                self._count_busy()
                if batch:
                    if self._can_take():  # a call may bring several batches, and it has woken one thread
                        self._changed.notify()
                    return batch
        return None

    def _count_busy(self) -> None:
        """Tells the cores how many lanes have work, before a batch runs, so that its run knows of the others'."""
        self._busy_lanes.set(min(self._num_lanes, self._num_taken + len(self._queue)))

    def _can_take(self) -> bool:
        """True if a thread may take a batch now: to run it where a lane is idle, or to have it ready if it is full."""
        if self._num_taken < self._num_lanes:
            return bool(self._queue)
        return self._num_taken == self._num_lanes and self._queue.fills_batch

    def _run(self, batch: list[Entry]) -> None:
        """Runs one batch and hands its results, or its error, to the event loop."""
        try:
            wanted, outputs, started, finished = self._run_in_turn(batch)
            rows = self._graph.split(outputs, [entry.item for entry in wanted]) if wanted else ()
        except BaseException as error:  # whatever it is, it is told to the callers of this batch and ends no thread
            if not is_failure(error):
                raise
            _log.error("a batch failed", model=self._model.name, num_items=len(batch), exc_info=error)
            self._post(_fail, batch, _batch_error())
            return
        done: list[tuple[Entry, Any]] = []
        for entry, row in zip(wanted, rows, strict=True):
            try:
                read = _call_of(entry).read
                done.append((entry, row if read is None else read(row, entry.index)))
            except BaseException as error:  # this call's outputs could not be read; the others' may be right
                if not is_failure(error):
                    raise
                _log.error("an answer could not be read", model=self._model.name, exc_info=error)
                self._post(_fail, [entry], _batch_error())
        if done:
            self._post(_deliver, done, started, finished)

    def _run_in_turn(self, batch: list[Entry]) -> tuple[list[Entry], Tensors, float, float]:
        """Prepares a batch and runs it when there is a lane, without the items that nobody waits for any more.

        Returns:
            The entries that were run, their outputs, and when the run began and ended.
        """
        try:
            with self._heartbeat.working():
                inputs = self._graph.collate([entry.item for entry in batch])
            with self._lanes, self._heartbeat.working():
                started = time.monotonic()
                wanted = self._still_wanted(batch, started)
                if not wanted:
                    return [], {}, started, started
                if len(wanted) < len(batch):
                    inputs = self._graph.collate([entry.item for entry in wanted])
                self._report_left(wanted, "started", started)
                names = dict.fromkeys(name for entry in wanted for name in _call_of(entry).outputs)
                outputs = self._graph.run(inputs, list(names))
                finished = time.monotonic()
        finally:
            with self._changed:
                self._num_taken -= 1
                self._count_busy()
                if self._can_take():
                    self._changed.notify()
        self._report_batch(wanted, started, finished)
        return wanted, outputs, started, finished

    def _still_wanted(self, batch: list[Entry], now: float) -> list[Entry]:
        """Returns the entries somebody waits for, and fails the calls whose deadline has passed."""
        gone = [entry for entry in batch if _call_of(entry).is_over]
        if gone:
            self._report_left(gone, "cancelled", now)
            batch = [entry for entry in batch if not _call_of(entry).is_over]
        self._drop_expired([entry for entry in batch if entry.is_expired(now)])
        return [entry for entry in batch if not entry.is_expired(now)]

    def _drop_expired(self, entries: list[Entry]) -> None:
        if entries:
            self._report_left(entries, "expired")
            self._post(_fail, entries, DeadlineError("the deadline passed while the call was waiting"))

    def _fail_calls(self, error: Exception) -> None:
        """Fails all calls, those whose batch is running too. Runs on the event loop."""
        for call in self._calls:
            call.fail(error)

    def _report_left(
        self, entries: Sequence[Entry], reason: Literal["started", "expired", "cancelled"], now: float | None = None
    ) -> None:
        if self._observer is NO_OBSERVER:
            return
        now = time.monotonic() if now is None else now
        for entry in entries:
            self._observer.left_queue(
                QueueEvent(
                    model=self._model,
                    queue_s=now - _call_of(entry).arrived_at,
                    reason=reason,
                    num_waiting=len(self._queue),
                )
            )

    def _report_batch(self, entries: Sequence[Entry], started: float, finished: float) -> None:
        if self._observer is NO_OBSERVER:
            return
        lengths = [entry.length for entry in entries]
        self._observer.batch_finished(
            BatchEvent(
                model=self._model,
                num_items=len(entries),
                length=max(lengths),
                num_padded=max(lengths) * len(lengths) - sum(lengths),
                started_at=started,
                run_s=finished - started,
                members=partial(_members, entries),
            )
        )

    def _post(self, function: Any, *arguments: object) -> None:
        """Calls `function` on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open" if self._failure is None else "failed"
        return f"Batcher({self._model.name}, {state}, {self._queue!r}, {self._num_taken} batches at work)"


def _members(entries: Sequence[Entry]) -> list[BatchMember]:
    """Returns the calls that have entries in a batch."""
    return [
        BatchMember(pending.call, pending.arrived_at, count)
        for pending, count in Counter(map(_call_of, entries)).items()
        if pending.call is not None
    ]


def _batch_error() -> BatchError:
    return BatchError("the model could not be run; the server's log says why")


def _closed_error() -> DrainingError:
    return DrainingError("the server is shutting down; call another one, or this one when it is back")


def _call_of(entry: Entry) -> PendingCall:
    assert isinstance(entry.call, PendingCall)
    return entry.call


def _deliver(done: Sequence[tuple[Entry, Any]], started: float, finished: float) -> None:
    for entry, result in done:
        call = _call_of(entry)
        call.put(entry.index, result, ItemTimes(call.arrived_at, started, finished))


def _fail(entries: Sequence[Entry], error: Exception) -> None:
    for entry in entries:
        _call_of(entry).fail(error)
