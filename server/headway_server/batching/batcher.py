"""Runs the batches of one model: as many at a time as it has lanes, while one more thread prepares what comes next.

While a lane is idle, whatever waits is taken at once, in equal shares by those that are; nothing waits for a batch to
fill. While all run, the thread that is left takes a batch early only if it is full: a smaller one would close the door
on callers that are about to come. Who has gone or is too late by the time a batch's turn comes is left out of it.
Short items of a caller who is alone are run on the event loop (`inline_gate.py`).

N is the number of a call's items, B that of a batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.batching.inline_gate import InlineGate
from headway_server.batching.pending_call import BatchedResults, ItemTimes, PendingCall
from headway_server.batching.queue import BatchQueue, Entry
from headway_server.batching.run_costs import UNKNOWN_COSTS, RunCosts
from headway_server.errors import DeadlineError, DrainingError, InternalError, RequestError
from headway_server.runtime import Cores, Session

Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)
Feeds: TypeAlias = dict[str, NDArray[Any]]
Rows: TypeAlias = Sequence[NDArray[np.float32]] | NDArray[np.float32]
"""One array an item; their shapes need not be the same."""

_log = structlog.get_logger(__name__)

_JOIN_TIMEOUT_S = 10.0


class BatchError(InternalError):
    """The model could not be run; the log says why. A bug or a broken machine, never the caller's fault."""


class BatchModel(Protocol[Item_contra]):
    """What a batcher runs; its methods are called from the batcher's threads, and from the event loop's.

    What they hand to each other is the model's own business.
    """

    def collate(self, items: Sequence[Item_contra]) -> Any:
        """Prepares B items to be run."""

    def run(self, prepared: Any) -> Any:
        """Runs the graph on what was prepared. Called by as many threads at a time as there are lanes."""

    def finish(self, outputs: Any) -> Rows:
        """Makes the B results of what was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A batch that was run."""

    entries: list[Entry[Any]]
    """Those that were still wanted; if there are none, nothing was run."""
    outputs: Any
    start: float
    end: float


class Batcher(Generic[Item]):
    """Batches the items of all calls to one model."""

    def __init__(
        self,
        model: BatchModel[Item],
        *,
        budget: int,
        name: str,
        session: Session | None = None,
        costs: RunCosts = UNKNOWN_COSTS,
        prepare: Callable[[Item], Item] | None = None,
    ) -> None:
        """Prepares a batcher.

        Args:
            model: What runs the batches.
            budget: Most that `longest x count` of a batch may be.
            name: Of the model, for the threads and the log.
            session: That `model` runs: how many runs there may be at a time; None: one.
            costs: What is worth a run of its own, and what is run on the event loop.
            prepare: What each item that is still wanted goes through before `collate`, where that is called; an
                error of it fails its call alone, and a `RequestError` is what that call is told.
        """
        self._model = model
        self._prepare = prepare
        self._name = name
        self._queue: BatchQueue[Item] = BatchQueue(budget, costs.most_padding)
        self._inline = InlineGate(costs.most_inline)
        self._changed = threading.Condition()  # guards the queue, what is below and the seats
        self._num_taken = 0  # batches that were taken and have not run to their end
        self._num_preparing = 0  # of these, whose items are being prepared
        self._closed = False
        self._num_lanes = 1 if session is None else session.num_lanes
        self._lanes = threading.Semaphore(self._num_lanes)
        self._seats = (Cores(1) if session is None else session.cores).seats()
        self._threads = [
            threading.Thread(target=self._work, name=f"batcher-{name}-{number}", daemon=True)
            for number in range(self._num_lanes + 1)
        ]

    def start(self) -> None:
        """Starts the threads; the event loop that calls is the one that results are handed to."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether batches are run: from `start` to `close`."""
        return any(thread.is_alive() for thread in self._threads) and not self._closed

    async def submit(self, items: Sequence[Item], lengths: Sequence[int], *, deadline: float | None) -> BatchedResults:
        """Waits for the results of a call's items. If the caller goes, what has not run is dropped.

        A single caller's item is run here and now, if that is short.

        Args:
            items: At least one.
            lengths: What each takes of the budget when it is its batch's longest.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            BatchError: The model could not be run.
            DeadlineError: The deadline passed before all items ran.
            DrainingError: The batcher was closed.
        """
        if len(items) == 1 and self._takes_inline(lengths[0], deadline):
            return self._run_inline(items[0])
        call = PendingCall(len(items))
        entries = [
            Entry(item=item, length=length, call=call, index=index, deadline=deadline)
            for index, (item, length) in enumerate(zip(items, lengths, strict=True))
        ]
        with self._changed:
            if self._closed:
                raise _closed_error()
            self._queue.add(entries)
            self._count_busy()
            self._changed.notify()
        try:
            await call.future
        except BaseException:
            with self._changed:
                self._queue.remove(entries)
                self._count_busy()
            raise
        return call.results()

    def _takes_inline(self, length: int, deadline: float | None) -> bool:
        """Whether the only item of a call is run here; its batch is then counted as taken, and so is a lane."""
        now = time.monotonic()
        with self._changed:
            is_idle = self._num_taken == 0 and not self._queue
            if not self._inline.admits(length, is_idle=is_idle) or self._closed:
                return False
            if (deadline is not None and deadline <= now) or not self._lanes.acquire(blocking=False):
                return False
            self._num_taken += 1
            self._count_busy()
        return True

    def _run_inline(self, item: Item) -> BatchedResults:
        """Runs one item in this thread.

        Raises:
            BatchError: It cannot be prepared for a reason of the server's own, or the model could not be run.
            RequestError: It cannot be prepared.
        """
        arrived = time.monotonic()
        try:
            prepared = self._model.collate([item if self._prepare is None else self._prepare(item)])
            start = time.monotonic()
            outputs = self._model.run(prepared)
            end = time.monotonic()
            [row] = self._model.finish(outputs)
        except RequestError:
            raise
        except Exception as error:
            _log.error("a batch failed", model=self._name, num_items=1, exc_info=error)
            raise _batch_error() from error
        finally:
            self._lanes.release()
            with self._changed:
                self._num_taken -= 1
                self._count_busy()
            self._inline.note_end()
        return BatchedResults(rows=[row], runs=[ItemTimes(arrived, start, end)])

    def close(self) -> None:
        """Fails every call that still waits and ends the threads after what they are running.

        May be called from any thread; the event loop's own would keep running calls from hearing of their results.
        """
        with self._changed:
            self._closed = True
            waiting = self._queue.remove_all()
            self._count_busy()
            self._changed.notify_all()
        if waiting:
            self._post(_fail, waiting, _closed_error())
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_TIMEOUT_S)

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._run(batch)

    def _next_batch(self) -> list[Entry[Item]] | None:
        """Waits for a batch; None when the batcher is closed."""
        with self._changed:
            while not self._closed:
                if self._can_take():
                    batch, expired = self._queue.take(time.monotonic(), max(1, self._num_lanes - self._num_taken))
                    self._tell_expired(expired)
                    self._num_taken += bool(batch)
                    self._count_busy()
                    if batch:
                        if self._can_take():  # what a call brought is worth several batches, and it woke one thread
                            self._changed.notify()
                        return batch
                else:
                    self._changed.wait()
        return None

    def _count_busy(self) -> None:
        """Tells the cores how many lanes have work: before a batch is run, so that its run knows of the others'."""
        self._seats.take(min(self._num_lanes, self._num_taken + len(self._queue)))

    def _can_take(self) -> bool:
        """Whether a thread may take a batch now: to run it, or to have it ready, where it is full or a lane is idle."""
        if self._num_taken < self._num_lanes:
            return bool(self._queue)
        return self._num_taken == self._num_lanes and (
            self._queue.fills_batch or (self._num_preparing > 0 and bool(self._queue))
        )

    def _run(self, batch: list[Entry[Item]]) -> None:
        """Runs one batch and hands its results, or its error, to the event loop."""
        try:
            done = self._run_in_turn(batch)
            rows = self._model.finish(done.outputs) if done.entries else ()
        except Exception as error:  # whatever it is, it belongs to the callers of this batch and not to the thread
            _log.error("a batch failed", model=self._name, num_items=len(batch), exc_info=error)
            self._post(_fail, batch, _batch_error())
        else:
            if done.entries:
                self._post(_deliver, done.entries, rows, done.start, done.end)

    def _run_in_turn(self, batch: list[Entry[Item]]) -> _Done:
        """Prepares a batch and runs it when there is a lane.

        Whom it was prepared for and who has gone since is left out, so that nobody pays for it.
        """
        try:
            if self._prepare is not None:
                with self._preparing():
                    batch = self._prepare_each(batch, self._prepare)
                if not batch:
                    return _Done(entries=[], outputs=None, start=0.0, end=0.0)
            prepared = self._model.collate([entry.item for entry in batch])
            with self._lanes:
                start = time.monotonic()
                wanted = self._still_wanted(batch, start)
                if wanted and len(wanted) < len(batch):
                    prepared = self._model.collate([entry.item for entry in wanted])
                outputs = self._model.run(prepared) if wanted else None
                return _Done(entries=wanted, outputs=outputs, start=start, end=time.monotonic())
        finally:
            with self._changed:
                self._num_taken -= 1
                self._count_busy()
                self._changed.notify()

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Notes that a batch's items are being prepared, so that its lane is idle."""
        with self._changed:
            self._num_preparing += 1
            if self._can_take():
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._num_preparing -= 1

    def _prepare_each(self, batch: list[Entry[Item]], prepare: Callable[[Item], Item]) -> list[Entry[Item]]:
        """Prepares the items of a batch that somebody waits for and returns the entries of those that could be.

        What cannot be prepared is its own call's trouble, whatever the reason.
        """
        prepared: list[Entry[Item]] = []
        failed: set[object] = set()
        for entry in batch:
            if entry.call in failed or not self._still_wanted([entry], time.monotonic()):
                continue
            try:
                entry.item = prepare(entry.item)
            except Exception as error:
                failed.add(entry.call)
                if isinstance(error, RequestError):
                    self._post(_fail, [entry], error)
                else:
                    _log.error("an item could not be prepared", model=self._name, exc_info=error)
                    self._post(_fail, [entry], _batch_error())
            else:
                prepared.append(entry)
        return [entry for entry in prepared if entry.call not in failed]

    def _still_wanted(self, batch: list[Entry[Item]], now: float) -> list[Entry[Item]]:
        """Returns the entries somebody waits for; calls whose deadline has passed are told."""
        live = [entry for entry in batch if not _call_of(entry).is_over]
        self._tell_expired([entry for entry in live if entry.is_expired(now)])
        return [entry for entry in live if not entry.is_expired(now)]

    def _tell_expired(self, entries: list[Entry[Item]]) -> None:
        if entries:
            self._post(_fail, entries, DeadlineError("the deadline passed while the call was waiting"))

    def _post(self, function: Any, *arguments: object) -> None:
        """Calls `function` on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def __repr__(self) -> str:
        return f"Batcher({self._queue!r}, {self._num_taken} batches running)"


def _batch_error() -> BatchError:
    return BatchError("the model could not be run; the server's log says why")


def _closed_error() -> DrainingError:
    return DrainingError("the server is shutting down; call another one, or this one when it is back")


def _call_of(entry: Entry[Any]) -> PendingCall:
    assert isinstance(entry.call, PendingCall)
    return entry.call


def _deliver(batch: list[Entry[Any]], rows: Rows, start: float, end: float) -> None:
    for entry, row in zip(batch, rows, strict=True):
        _call_of(entry).put(entry.index, row, start, end)


def _fail(batch: list[Entry[Any]], error: Exception) -> None:
    for entry in batch:
        _call_of(entry).fail(error)
