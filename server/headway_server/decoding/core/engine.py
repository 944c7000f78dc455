"""The thread that decodes, one step after another, and its end on the event loop (docs/engine.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from headway_server.decoding.core.outbox import Outbox
from headway_server.decoding.core.pace import EnginePace
from headway_server.decoding.core.scheduler import Scheduler
from headway_server.decoding.core.step import StepError, Stepper, step_error
from headway_server.decoding.core.waiting import PriorityScope
from headway_server.decoding.interfaces import Decoder, DraftVerifier, Encoder
from headway_server.decoding.sequence import Delta, Sequence, SequenceResult
from headway_server.errors import DrainingError
from headway_server.observers import NO_OBSERVER, ModelId, ModelUsage, Observer
from headway_server.runtime import BusyLanes, Heartbeat, join_threads, own_niceness, set_own_niceness
from headway_server.runtime.threads import CLOSE_TIMEOUT_S

_DRAINING = "the server is shutting down; try another one"
_STOPPED = "the model has stopped; restart the server"


class Engine:
    """Runs sequences through a decoder, and their sources through an encoder if there is one.

    Public methods belong to the event loop, except for `close`, which any thread may call; private ones belong to the
    engine's thread, except where they say otherwise.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        encoder: Encoder | None = None,
        max_encoder_tokens: int = 4096,
        stream_interval_ms: float = 0.0,
        verifier: DraftVerifier | None = None,
        busy_lanes: BusyLanes | None = None,
        priority_scope: PriorityScope = "caller",
        name: str = "engine",
        observer: Observer = NO_OBSERVER,
        model: ModelId | None = None,
        suppressed_ids: tuple[int, ...] = (),
    ) -> None:
        """Makes an engine with every slot free; `start` lets it run.

        Args:
            decoder: The runner. Only the engine's thread calls it from now on.
            encoder: Reads the sources of sequences; log-probabilities are computed then. None: sequences have none.
            max_encoder_tokens: Tokens of an encoder batch, padding included.
            stream_interval_ms: Least time between two deltas of a stream.
            verifier: Runs drafts in the decoder's slots; None drafts nothing.
            busy_lanes: Counts the engine among those that share the cores; None: it shares them with nobody.
            priority_scope: Whose sequences one of higher priority passes.
            name: Of the thread.
            observer: Is told of every run and of sequences that leave the queue.
            model: Names the model in these events.
            suppressed_ids: Tokens that are never generated.
        """
        self._decoder = decoder
        self._encoder = encoder
        self._max_encoder_tokens = max_encoder_tokens
        self._stream_interval_ms = stream_interval_ms
        self._verifier = verifier
        self._busy_lanes = busy_lanes
        self._priority_scope: PriorityScope = priority_scope
        self.pace = EnginePace()
        """How fast it goes."""
        self._name = name
        self._observer = observer
        self._model = model or ModelId(name=name, version="")
        self._suppressed_ids = suppressed_ids
        self._heartbeat = Heartbeat()
        self._niceness = own_niceness()  # of the thread that loads the model
        self._inbox: SimpleQueue[list[Sequence] | None] = SimpleQueue()
        self._open: set[Sequence] = set()  # submitted and not answered; the event loop's
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stepper: Stepper | None = None
        self._thread: Thread | None = None
        self._gate = Lock()  # nothing enters the inbox once the engine is closed
        self._is_closed = False
        self._is_broken = False

    def __repr__(self) -> str:
        return f"Engine({self._name}, {self._stepper!r})"

    @property
    def num_slots(self) -> int:
        """Slots that run at once."""
        return self._decoder.num_slots

    @property
    def is_alive(self) -> bool:
        """True from `start` to `close`, unless the thread has ended by itself."""
        return self._thread is not None and not self._is_closed

    def stalled_s(self) -> float:
        """Returns for how many seconds the present step has been running; 0.0 if there is nothing to do."""
        return self._heartbeat.stalled_s()

    def usage(self) -> ModelUsage:
        """Returns how many sequences wait, and how much of the slots is in use. Any thread may ask."""
        num_positions = self.num_slots * self._decoder.max_length
        if self._stepper is None:
            return ModelUsage(num_waiting=0, num_slots=self.num_slots, num_positions=num_positions)
        scheduler = self._stepper.scheduler
        running = scheduler.running
        return ModelUsage(
            num_waiting=len(scheduler.waiting),
            num_slots=self.num_slots,
            num_used_slots=self.num_slots - scheduler.num_free,
            num_positions=num_positions,
            num_used_positions=sum(sequence.num_written * sequence.num_beams for sequence in running),
        )

    def start(self) -> None:
        """Starts the thread. Called on the event loop that results are to go to."""
        assert self._thread is None, "an engine is started once"
        self._loop = asyncio.get_running_loop()
        outbox = Outbox(self._loop, stream_interval_ms=self._stream_interval_ms)
        self._stepper = Stepper(
            self._decoder,
            encoder=self._encoder,
            max_encoder_tokens=self._max_encoder_tokens,
            name=self._name,
            outbox=outbox,
            verifier=self._verifier,
            priority_scope=self._priority_scope,
            pace=self.pace,
            observer=self._observer,
            model=self._model,
            suppressed_ids=self._suppressed_ids,
        )
        self._thread = Thread(target=self._loop_forever, args=(self._stepper, outbox), name=self._name, daemon=True)
        self._thread.start()

    def submit(self, sequences: list[Sequence]) -> None:
        """Queues sequences, to be admitted in this order.

        Raises:
            DrainingError: The engine was closed.
            StepError: The thread has ended by itself.
        """
        now = time.monotonic()
        for sequence in sequences:
            assert sequence.num_beams <= self.num_slots, "requests are checked for what the slots hold"
            assert (sequence.source is None) == (self._encoder is None), (
                "an encoder reads sources, and nothing else does"
            )
            sequence.arrived_at = now
        with self._gate:
            if self._is_broken:
                raise StepError(_STOPPED)
            if self._is_closed:
                raise DrainingError(_DRAINING)
            self._open.update(sequences)
            self._inbox.put(sequences)
        for sequence in sequences:
            sequence.reply.result.add_done_callback(partial(self._close_one, sequence))

    async def run(self, sequences: list[Sequence]) -> list[SequenceResult]:
        """Submits sequences and waits for all of them. When one fails, or the caller goes, all of them end.

        Raises:
            DeadlineError: The deadline passed.
            DrainingError: The engine was closed.
            StepError: The model could not be run.
        """
        self.submit(sequences)
        try:
            return await asyncio.gather(*(sequence.reply.result for sequence in sequences))
        finally:
            cancel(sequences)

    async def stream(self, sequence: Sequence) -> AsyncGenerator[Delta, None]:
        """Submits a sequence that wants deltas and yields them; its reply holds the result afterwards.

        Raises:
            DeadlineError: The deadline passed.
            DrainingError: The engine was closed.
            StepError: The model could not be run.
        """
        self.submit([sequence])
        try:
            async with aclosing(sequence.reply.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            cancel([sequence])
            sequence.reply.result.cancel()  # nobody reads a result that comes now; one that is there stays

    def stop(self) -> None:
        """Tells the thread to end after its present step."""
        with self._gate:
            self._is_closed = True
            self._inbox.put(None)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Ends the thread after its present step. Sequences that are not finished fail with DrainingError.

        A step that hangs cannot be interrupted: after `timeout_s` its thread is left behind and its sequences fail all
        the same.

        Returns:
            True if the thread has ended.
        """
        self.stop()
        if self._thread is None or join_threads([self._thread], owner=self._name, timeout_s=timeout_s):
            return True
        self._fail_open(DrainingError(_DRAINING))
        return False

    def _loop_forever(self, stepper: Stepper, outbox: Outbox) -> None:
        set_own_niceness(self._niceness)
        ending: BaseException | None = None
        try:
            while self._receive(stepper.scheduler):
                self._heartbeat.beat()
                stepper.step()
        except BaseException as error:  # not even the loop can go on
            ending = error
        finally:
            self._end(stepper, outbox, ending)

    def _receive(self, scheduler: Scheduler) -> bool:
        """Queues what has arrived, and waits for it if there is nothing to do; False once the engine is closed."""
        is_open = True
        if not scheduler.has_work:
            self._heartbeat.rest()
            if self._busy_lanes is not None:
                self._busy_lanes.set(0)
        try:
            message = self._inbox.get(block=not scheduler.has_work)
            if self._busy_lanes is not None:
                self._busy_lanes.set(1)
            while True:
                if message is None:
                    is_open = False
                else:
                    scheduler.waiting.add(message)
                message = self._inbox.get_nowait()
        except Empty:
            return is_open

    def _end(self, stepper: Stepper, outbox: Outbox, error: BaseException | None) -> None:
        """Refuses what comes from now on, and fails all that runs, waits or has been submitted."""
        self._heartbeat.rest()
        if self._busy_lanes is not None:
            self._busy_lanes.set(0)
        with self._gate:
            self._is_closed, self._is_broken = True, error is not None
        outbox.flush()
        if error is None:
            self._fail_open(DrainingError(_DRAINING))
        else:
            self._fail_open(step_error(error))
            stepper.log("the engine has stopped", error)
        stepper.scheduler.reset()
        stepper.scheduler.waiting.clear()

    def _close_one(self, sequence: Sequence, _: asyncio.Future[SequenceResult]) -> None:
        """Forgets a sequence that has been answered; on the event loop."""
        self._open.discard(sequence)

    def _fail_open(self, error: Exception) -> None:
        """Fails every sequence that was submitted and not answered. Called by any thread."""
        assert self._loop is not None, "the engine was started"
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._fail_open_now, error)

    def _fail_open_now(self, error: Exception) -> None:
        """Does so on the event loop."""
        for sequence in list(self._open):
            sequence.reply.end(error)


def cancel(sequences: Iterable[Sequence]) -> None:
    """Makes sequences that are not finished leave the engine at its next step."""
    for sequence in sequences:
        sequence.cancelled = True
