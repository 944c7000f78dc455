"""The thread that decodes, one step after another, and its end on the event loop (docs/engine.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from headway_server.decoding.core.outbox import Outbox
from headway_server.decoding.core.scheduler import Scheduler
from headway_server.decoding.core.step import StepError, Stepper
from headway_server.decoding.interfaces import Decoder, Encoder
from headway_server.decoding.reply import Piece
from headway_server.decoding.sequence import Sequence, SequenceResult
from headway_server.decoding.speculation.prompt_lookup import DraftVerifier
from headway_server.errors import DrainingError
from headway_server.runtime import Seats

_DRAINING = "the server is shutting down; try another one"


class Engine:
    """Runs sequences through a decoder, for translation after an encoder.

    Public methods belong to the event loop, private ones to the thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        encoder: Encoder | None = None,
        max_encoder_tokens: int = 4096,
        stream_interval_ms: float = 0.0,
        verifier: DraftVerifier | None = None,
        seats: Seats | None = None,
        name: str = "engine",
    ) -> None:
        """Makes an engine with every slot free; `start` lets it run.

        Args:
            decoder: The runner; the engine's thread alone calls it from now on.
            encoder: For translation: sequences are sentences that it reads, and log-probabilities are computed.
            max_encoder_tokens: Tokens of an encoder batch, padding counted.
            stream_interval_ms: Least time between two pieces of a stream.
            verifier: Runs drafts in the decoder's slots; None drafts nothing.
            seats: Among those that share the cores; None where it shares them with nobody.
            name: Name of the thread.
        """
        self._decoder = decoder
        self._encoder = encoder
        self._max_encoder_tokens = max_encoder_tokens
        self._stream_interval_ms = stream_interval_ms
        self._verifier = verifier
        self._seats = seats
        self._name = name
        self._inbox: SimpleQueue[list[Sequence] | None] = SimpleQueue()
        self._stepper: Stepper | None = None
        self._thread: Thread | None = None
        self._gate = Lock()  # nothing enters the inbox once the engine is closed
        self._is_closed = False
        self._is_broken = False

    def __repr__(self) -> str:
        return f"Engine({self._name}, {self._stepper!r})"

    @property
    def num_slots(self) -> int:
        """Sequences that can run at once."""
        return self._decoder.num_slots

    @property
    def is_alive(self) -> bool:
        """Whether it runs what is submitted: from `start` to `close`, unless the thread has ended by itself."""
        return self._thread is not None and not self._is_closed

    def start(self) -> None:
        """Starts the thread. Called on the event loop that results are to go to."""
        assert self._thread is None, "an engine is started once"
        outbox = Outbox(asyncio.get_running_loop(), stream_interval_ms=self._stream_interval_ms)
        self._stepper = Stepper(
            self._decoder,
            encoder=self._encoder,
            max_encoder_tokens=self._max_encoder_tokens,
            name=self._name,
            outbox=outbox,
            verifier=self._verifier,
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
            sequence.arrived_at = now
        with self._gate:
            if self._is_broken:
                raise StepError("the model has stopped; restart the server")
            if self._is_closed:
                raise DrainingError(_DRAINING)
            self._inbox.put(sequences)

    async def run(self, sequences: list[Sequence]) -> list[SequenceResult]:
        """Submits sequences and waits for all of them; when one fails, or the caller goes, none goes on.

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

    async def stream(self, sequence: Sequence) -> AsyncGenerator[Piece, None]:
        """Submits a sequence that wants pieces and yields them; its reply holds the result afterwards.

        Raises:
            DeadlineError: The deadline passed.
            DrainingError: The engine was closed.
            StepError: The model could not be run.
        """
        self.submit([sequence])
        try:
            async with aclosing(sequence.reply.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            cancel([sequence])
            sequence.reply.result.cancel()  # nobody reads what comes now; nothing happens where it is there already

    def close(self) -> None:
        """Ends the thread after its present step. Sequences that are not finished fail with DrainingError."""
        with self._gate:
            self._is_closed = True
            self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def _loop_forever(self, stepper: Stepper, outbox: Outbox) -> None:
        ending: BaseException | None = None
        try:
            while self._receive(stepper.scheduler):
                stepper.step()
        except BaseException as error:  # not even the loop can go on; nobody may be left waiting for it
            ending = error
        finally:
            self._end(stepper, outbox, ending)

    def _receive(self, scheduler: Scheduler) -> bool:
        """Queues what has arrived, and waits for it where there is nothing else to do. False: the engine is closed."""
        is_open = True
        if self._seats is not None and not scheduler.has_work:
            self._seats.take(0)
        try:
            message = self._inbox.get(block=not scheduler.has_work)
            if self._seats is not None:
                self._seats.take(1)
            while True:
                if message is None:
                    is_open = False
                else:
                    scheduler.add(message)
                message = self._inbox.get_nowait()
        except Empty:
            return is_open

    def _end(self, stepper: Stepper, outbox: Outbox, error: BaseException | None) -> None:
        """Refuses what comes from now on, and fails all that runs, waits or has been submitted."""
        if self._seats is not None:
            self._seats.take(0)
        with self._gate:
            self._is_closed, self._is_broken = True, error is not None
        scheduler = stepper.scheduler
        with suppress(Empty):
            while True:
                scheduler.add(self._inbox.get_nowait() or [])
        sequences = [*scheduler.reset(), *scheduler.waiting]
        scheduler.waiting.clear()
        if error is None:
            for sequence in sequences:
                outbox.add_end(sequence.reply, DrainingError(_DRAINING))
        else:
            stepper.report("the engine has stopped", sequences, error)
        outbox.flush()


def cancel(sequences: Iterable[Sequence]) -> None:
    """Lets sequences that are not finished leave the engine at its next step."""
    for sequence in sequences:
        sequence.cancelled = True
