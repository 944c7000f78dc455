"""Runs the items of all calls to one model in batches.

As many batches run at a time as the model has lanes, and one more thread has the next one ready. While a lane is idle,
all waiting items are taken once the event loop is idle, and divided among the idle lanes. Calls read meanwhile join
them, and no item waits for a batch to fill. While all lanes are busy, the remaining thread takes a batch early only if
it is full. A smaller batch would exclude calls that arrive soon. Items whose caller has gone or is too late are dropped
when their batch's turn comes.

Calls wait on the event loop; batches run in threads. `PendingCall` belongs to the loop, all else here to the threads.

N is the number of a call's items.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import structlog

from headway_server.batching.graph import Tensors
from headway_server.batching.queue import BatchQueue, Entry
from headway_server.errors import DeadlineError, InvalidInputError, ModelRunError, is_failure
from headway_server.observers import (
    NO_OBSERVER,
    BatchEvent,
    BatchMember,
    ModelId,
    ModelUsage,
    Observer,
    QueueEvent,
    current_call,
)
from headway_server.runtime import Session
from headway_server.runtime.threads import Turns
from headway_server.runtime.worker import Pending, Worker, run_error

Result = TypeVar("Result")
Reader = Callable[[Tensors, int], Result]
"""Makes the result of an item from its outputs and its index in the call; called on a batcher's thread."""

_LONGEST_GATHERING_S: Final = 2e-3
"""Maximum delay of items while the event loop is busy, so that items read next join the batch."""
_IDLE_TURN_S: Final = 30e-6
"""A turn of the event loop that takes less had nothing else to do."""
_IDLE_TURNS: Final = 4
"""Idle turns of the event loop that end the delay; gRPC passes on received data after a moment."""

_log = structlog.get_logger(__name__)


_Run: TypeAlias = tuple[list[Entry], Tensors | InvalidInputError]
"""Entries that ran together, and their outputs or the reason why there are none."""


class BatchError(ModelRunError):
    """The model could not be run; the log says why. A bug or a broken machine, never the caller's fault."""


class Graph(Protocol):
    """Graph of a batcher; implemented by `BatchGraph`. Methods are called from the batcher's threads."""

    def collate(self, items: Sequence[Tensors]) -> Tensors:
        """Makes the inputs of a batch."""

    def run(self, inputs: Tensors, outputs: Sequence[str]) -> Tensors:
        """Runs the graph for the named outputs; called by one thread per lane concurrently.

        Raises:
            InvalidInputError: The inputs of some item are wrong. The items of the batch then run one by one.
        """

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


class PendingCall(Pending[None]):
    """A call that waits for its results, which may come from several batches. Belongs to the event loop."""

    def __init__(self, num_items: int, outputs: tuple[str, ...], read: Reader[Any] | None) -> None:
        super().__init__()
        self.outputs = outputs
        self.read = read
        self.arrived_at = time.monotonic()
        self.call = current_call()
        self.results: list[Any] = [None] * num_items
        self.runs: list[ItemTimes | None] = [None] * num_items
        self._num_missing = num_items

    @property
    def is_over(self) -> bool:
        """True if it is answered, failed, or its caller has disconnected. Thread-safe."""
        return self.result.done()

    def put(self, index: int, result: Any, times: ItemTimes) -> None:
        """Takes the result of one item."""
        self.results[index], self.runs[index] = result, times
        self._num_missing -= 1
        if not self._num_missing:
            self.end(None)


class Batcher(Worker):
    """Batches the items of all calls to one model."""

    def __init__(
        self,
        graph: Graph,
        *,
        budget: int,
        model: ModelId,
        session: Session | None = None,
        max_padding: int | None = None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """Prepares a batcher.

        Args:
            graph: Graph of the batches.
            budget: Maximum `longest x count` of a batch.
            model: For the threads, the log and the observer.
            session: Session of `graph`, with the useful number of concurrent runs; None: one run.
            max_padding: From the warm-up of `graph`.
            observer: Notified of items that leave the queue and of batches that were run.
        """
        self._num_lanes = 1 if session is None else session.num_lanes
        super().__init__(
            f"batcher-{model.name}",
            BatchError,
            num_threads=self._num_lanes + 1,
            busy_lanes=None if session is None else session.cores.busy_lanes(),
        )
        self._graph = graph
        self._model = model
        self._observer = observer
        self._queue = BatchQueue(budget, max_padding)  # guarded by the lock, as the counts below and the busy lanes
        self._num_taken = 0  # batches that were taken and have not run to their end
        self._is_gathering = False  # the event loop is busy and may submit more items
        self._lanes = Turns(self._num_lanes)

    def usage(self) -> ModelUsage:
        """Returns the number of items waiting for a batch."""
        return ModelUsage(num_waiting=len(self._queue))

    async def submit(
        self,
        items: Sequence[Tensors],
        lengths: Sequence[int],
        *,
        outputs: Sequence[str],
        read: Reader[Result] | None = None,
        deadline: float | None,
        caller: str = "",
        counts: Sequence[int] | None = None,
        groups: Sequence[Hashable] | None = None,
    ) -> BatchedResults[Result]:
        """Waits for the results of a call's items. If the caller disconnects, items that have not run are dropped.

        Args:
            items: The inputs of each item, at least one.
            lengths: Cost of each in the budget's unit, as the longest item of its batch.
            outputs: Which outputs of the graph are wanted.
            read: Makes each item's result from its outputs, off the event loop; None: the outputs are the result.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            caller: Who waits: the calls of one caller wait behind each other.
            counts: Rows of each item; None: one.
            groups: Group of each item; items of different groups do not share a batch. None: all are of one.

        Raises:
            BatchError: The model could not be run, or its outputs could not be read.
            InvalidInputError: The graph cannot take the inputs.
            DeadlineError: The deadline passed before all items ran.
            DrainingError: The batcher was closed.
        """
        call = PendingCall(len(items), tuple(outputs), read)
        entries = [
            Entry(item=item, length=length, call=call, index=index, deadline=deadline, count=count, group=group)
            for index, (item, length, count, group) in enumerate(
                zip(items, lengths, counts or [1] * len(items), groups or [None] * len(items), strict=True)
            )
        ]
        try:
            with self._accept(call):
                self._queue.add(entries, caller)
                self._count_busy()
                if not self._is_gathering:
                    self._is_gathering = True
                    now = time.perf_counter()
                    asyncio.get_running_loop().call_soon(self._gather, now, now, 0)
            await call.result
        except BaseException as error:
            with self._changed:
                dropped = self._queue.remove(entries)
                self._count_busy()
            self._report_left(dropped, "expired" if isinstance(error, DeadlineError) else "cancelled")
            raise
        return BatchedResults(results=call.results, runs=cast("list[ItemTimes]", call.runs))

    def _gather(self, began: float, last: float, num_idle: int) -> None:
        """Lets the threads take waiting items once the event loop is idle, or after the maximum delay.

        Args:
            began: When the first item was added, by `time.perf_counter`.
            last: When the event loop's last turn was.
            num_idle: Turns since then in which it had nothing else to do.
        """
        now = time.perf_counter()
        num_idle += now - last < _IDLE_TURN_S
        if num_idle < _IDLE_TURNS and now - began < _LONGEST_GATHERING_S and not self._is_closed:
            asyncio.get_running_loop().call_soon(self._gather, began, now, num_idle)
            return
        with self._changed:
            self._is_gathering = False
            self._changed.notify()

    def _wake(self) -> None:
        if waiting := self._queue.remove_all():
            self._post(_fail, waiting, self.end_error())
        self._count_busy()
        self._changed.notify_all()

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._run(batch)

    def _next_batch(self) -> list[Entry] | None:
        """Waits for a batch; None when the batcher is closed or has failed."""
        with self._changed:
            while not self._is_closed and not self._has_failed:
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
        """Counts the lanes with work before a batch runs, which limits it to its share of the cores."""
        self._set_busy(min(self._num_lanes, self._num_taken + len(self._queue)))

    def _can_take(self) -> bool:
        """True if a thread may take a batch now: to run it where a lane is idle, or to have it ready if it is full."""
        if self._num_taken < self._num_lanes:
            return bool(self._queue) and (not self._is_gathering or self._queue.fills_batch)
        return self._num_taken == self._num_lanes and self._queue.fills_batch

    def _run(self, batch: list[Entry]) -> None:
        """Runs one batch and hands its results, or its error, to the event loop."""
        try:
            runs, started, finished = self._run_in_turn(batch)
            computed = [(entry, row) for wanted, outputs in runs for entry, row in self._split(wanted, outputs)]
        except BaseException as error:  # the batch's callers get any error, and the thread continues
            if not is_failure(error):
                raise
            _log.error("a batch failed", model=self._model.name, num_items=len(batch), exc_info=error)
            self._post(_fail, batch, run_error(BatchError))
            return
        done: list[tuple[Entry, Any]] = []
        for entry, row in computed:
            try:
                read = _call_of(entry).read
                done.append((entry, row if read is None else read(row, entry.index)))
            except BaseException as error:  # this call's outputs could not be read; the others' may be right
                if not is_failure(error):
                    raise
                _log.error("an answer could not be read", model=self._model.name, exc_info=error)
                self._post(_fail, [entry], run_error(BatchError))
        if done:
            self._post(_deliver, done, started, finished)

    def _run_in_turn(self, batch: list[Entry]) -> tuple[list[_Run], float, float]:
        """Prepares a batch and runs it when a lane is free, without cancelled items.

        Returns:
            Its runs, one unless inputs are wrong, and when they began and ended.
        """
        try:
            with self._heartbeat.working():
                inputs = self._graph.collate([entry.item for entry in batch])
            with self._lanes, self._heartbeat.working():
                started = time.monotonic()
                wanted = self._still_wanted(batch, started)
                if not wanted:
                    return [], started, started
                if len(wanted) < len(batch):
                    inputs = self._graph.collate([entry.item for entry in wanted])
                self._report_left(wanted, "started", started)
                names = dict.fromkeys(name for entry in wanted for name in _call_of(entry).outputs)
                runs = self._compute(wanted, inputs, list(names))
                finished = time.monotonic()
        finally:
            with self._changed:
                self._num_taken -= 1
                self._count_busy()
                if self._can_take():
                    self._changed.notify()
        self._report_batch(wanted, started, finished)
        return runs, started, finished

    def _compute(self, wanted: list[Entry], inputs: Tensors, names: list[str]) -> list[_Run]:
        """Runs a batch; if inputs of an item are wrong, every item alone, so that the others are answered."""
        try:
            return [(wanted, self._graph.run(inputs, names))]
        except InvalidInputError as error:
            if len(wanted) == 1:
                return [(wanted, error)]
        return [run for entry in wanted for run in self._compute([entry], self._graph.collate([entry.item]), names)]

    def _split(self, wanted: list[Entry], outputs: Tensors | InvalidInputError) -> list[tuple[Entry, Tensors]]:
        """Takes the outputs of a run apart; a failed one ends its calls."""
        if isinstance(outputs, InvalidInputError):
            self._post(_fail, wanted, outputs)
            return []
        return list(zip(wanted, self._graph.split(outputs, [entry.item for entry in wanted]), strict=True))

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
        longest, num_items = max(entry.length for entry in entries), sum(entry.count for entry in entries)
        self._observer.batch_finished(
            BatchEvent(
                model=self._model,
                num_items=num_items,
                length=longest,
                num_padded=longest * num_items - sum(entry.work for entry in entries),
                started_at=started,
                run_s=finished - started,
                members=partial(_members, entries),
            )
        )

    def __repr__(self) -> str:
        return f"Batcher({self._model.name}, {self.state}, {self._queue!r}, {self._num_taken} batches at work)"


def _members(entries: Sequence[Entry]) -> list[BatchMember]:
    """Returns the calls that have entries in a batch."""
    counts: Counter[PendingCall] = Counter()
    for entry in entries:
        counts[_call_of(entry)] += entry.count
    return [
        BatchMember(pending.call, pending.arrived_at, count)
        for pending, count in counts.items()
        if pending.call is not None
    ]


def _call_of(entry: Entry) -> PendingCall:
    assert isinstance(entry.call, PendingCall)
    return entry.call


def _deliver(done: Sequence[tuple[Entry, Any]], started: float, finished: float) -> None:
    for entry, result in done:
        call = _call_of(entry)
        call.put(entry.index, result, ItemTimes(call.arrived_at, started, finished))


def _fail(entries: Sequence[Entry], error: Exception) -> None:
    for entry in entries:
        _call_of(entry).end(error)
