"""The loop that decodes: one thread, one step after another (docs/engine.md).

Shapes: R running sequences (slots 0 to R-1), V vocabulary.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread

import numpy as np
import structlog

from headway_server.engine.interfaces import Decoder, Encoder
from headway_server.engine.outbox import Outbox
from headway_server.engine.reply import Piece
from headway_server.engine.sampler import SampledTokens, Sampler
from headway_server.engine.scheduler import Move, Scheduler
from headway_server.engine.sequence import Sequence, SequenceResult, Stage
from headway_server.errors import DrainingError

_log = structlog.get_logger(__name__)

_DRAINING = "the server is shutting down; try another one"
_STEP_FAILED = "a step failed"


class StepError(RuntimeError):
    """A step failed for a reason that is not the caller's: a bug, or a machine out of memory."""


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
        name: str = "engine",
    ) -> None:
        """Makes an engine with every slot free; `start` lets it run.

        Args:
            decoder: The runner; the engine's thread alone calls it from now on.
            encoder: For translation: sequences are sentences that it reads, and log-probabilities are computed.
            max_encoder_tokens: Tokens of an encoder batch, padding counted.
            name: Name of the thread.
        """
        self._decoder = decoder
        self._encoder = encoder
        self._max_encoder_tokens = max_encoder_tokens
        self._name = name
        self._scheduler = Scheduler(num_slots=decoder.num_slots, prefill_chunk=decoder.prefill_chunk)
        self._sampler = Sampler(
            num_slots=decoder.num_slots, vocab_size=decoder.vocab_size, with_log_probabilities=encoder is not None
        )
        self._token_ids = np.zeros(decoder.num_slots, np.int64)  # of each slot: the token that the next step reads
        self._positions = np.zeros(decoder.num_slots, np.int64)  # and its position
        self._sources_changed = False
        self._inbox: SimpleQueue[list[Sequence] | None] = SimpleQueue()
        self._outbox: Outbox | None = None
        self._thread: Thread | None = None
        self._gate = Lock()  # nothing enters the inbox once the engine is closed
        self._is_closed = False
        self._is_broken = False

    def __repr__(self) -> str:
        return f"Engine({self._name}, {self._scheduler!r})"

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
        self._outbox = Outbox(asyncio.get_running_loop())
        self._thread = Thread(target=self._loop_forever, args=(self._outbox,), name=self._name, daemon=True)
        self._thread.start()

    def submit(self, sequences: list[Sequence]) -> None:
        """Queues sequences, to be admitted in this order.

        Raises:
            DrainingError: The engine was closed.
            StepError: The thread has ended by itself.
        """
        now = time.monotonic()
        for sequence in sequences:
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

    def _loop_forever(self, outbox: Outbox) -> None:
        ending: BaseException | None = None
        try:
            while self._receive():
                try:
                    self._step(outbox)
                except Exception as error:  # whatever it is, the engine goes on without the sequences of this step
                    self._recover(error, outbox)
                outbox.flush()
        except BaseException as error:  # not even the loop can go on; nobody may be left waiting for it
            ending = error
        finally:
            self._end(outbox, ending)

    def _end(self, outbox: Outbox, error: BaseException | None) -> None:
        """Refuses what comes from now on, and fails all that runs, waits or has been submitted."""
        with self._gate:
            self._is_closed, self._is_broken = True, error is not None
        with suppress(Empty):
            while True:
                self._scheduler.add(self._inbox.get_nowait() or [])
        sequences = [*self._scheduler.reset(), *self._scheduler.waiting]
        self._scheduler.waiting.clear()
        if error is None:
            for sequence in sequences:
                outbox.add_end(sequence.reply, DrainingError(_DRAINING))
        else:
            self._report("the engine has stopped", sequences, error, outbox)
        outbox.flush()

    def _receive(self) -> bool:
        """Queues what has arrived, and waits for it where there is nothing else to do. False: the engine is closed."""
        is_open = True
        try:
            message = self._inbox.get(block=not self._scheduler.has_work)
            while True:
                if message is None:
                    is_open = False
                else:
                    self._scheduler.add(message)
                message = self._inbox.get_nowait()
        except Empty:
            return is_open

    def _step(self, outbox: Outbox) -> None:
        """Drops who has gone, admits, prefills one chunk at most, decodes every running sequence once."""
        now = time.monotonic()
        if overdue := self._scheduler.overdue(now):
            for sequence in overdue:
                outbox.add_end(sequence.reply, sequence.overdue_error())
            self._retire(overdue)
        if self._encoder is None:
            self._scheduler.admit(now)
            self._prefill(outbox)
        else:
            self._admit_sources(self._encoder, now, outbox)
        self._decode(outbox)

    def _prefill(self, outbox: Outbox) -> None:
        """Reads one chunk of a prompt; after the last one, the sequence gets its first token and joins the batch."""
        chunk = self._scheduler.next_chunk()
        if chunk is None:
            return
        sequence = chunk.sequence
        try:
            logits = self._decoder.prefill(sequence.slot, sequence.input_ids[chunk.start : chunk.stop], chunk.start)
        except Exception as error:  # the running sequences are not touched by it
            self._fail([sequence], error, outbox)
            return
        sequence.num_prefilled = chunk.stop
        if chunk.is_last:
            self._join(sequence, position=chunk.stop - 1)
            self._hand_out(self._sampler.sample(logits[np.newaxis], sequence.slot), sequence.slot, outbox)
            outbox.flush()  # the first token does not wait for the decode step that follows

    def _admit_sources(self, encoder: Encoder, now: float, outbox: Outbox) -> None:
        """Encodes waiting sentences in one batch; they join with the next decode step."""
        admitted = self._scheduler.admit_sources(now, self._max_encoder_tokens)
        if not admitted:
            return
        try:
            encoded = encoder.encode([sequence.input_ids for sequence in admitted])
            for sequence, cross in zip(admitted, encoded, strict=True):
                assert sequence.first_id is not None, "a translation begins with a token of its own"
                sequence.cross = cross
                self._join(sequence, position=0)
                self._token_ids[sequence.slot] = sequence.first_id
        except Exception as error:  # some may have joined; the queue knows none of them any more
            self._fail(admitted, error, outbox)
            return
        self._sources_changed = True

    def _join(self, sequence: Sequence, position: int) -> None:
        self._scheduler.join(sequence)
        self._sampler.assign(sequence.slot, sequence.parameters)
        self._positions[sequence.slot] = position

    def _decode(self, outbox: Outbox) -> None:
        """Runs every running sequence by one token."""
        num_running = len(self._scheduler.running)
        if self._sources_changed:
            self._decoder.set_sources([sequence.cross for sequence in self._scheduler.running])
            self._sources_changed = False
        if num_running == 0:
            return
        logits = self._decoder.decode(self._token_ids[:num_running], self._positions[:num_running])  # (R, V)
        self._hand_out(self._sampler.sample(logits), 0, outbox)

    def _hand_out(self, sampled: SampledTokens, first_slot: int, outbox: Outbox) -> None:
        """Gives each slot from `first_slot` its token, hands out what that completes, and retires who has finished."""
        num_rows = len(sampled.token_ids)
        slots = slice(first_slot, first_slot + num_rows)
        self._token_ids[slots] = sampled.token_ids
        self._positions[slots] += 1
        finished: list[Sequence] = []
        not_finite: list[Sequence] = []
        broken: list[tuple[Sequence, Exception]] = []
        rows = zip(
            self._scheduler.running[slots],
            sampled.token_ids.tolist(),
            sampled.log_probabilities.tolist(),
            sampled.is_valid.tolist(),
            strict=True,
        )
        for sequence, token_id, log_probability, is_valid in rows:
            if not is_valid:
                not_finite.append(sequence)
                continue
            try:
                if outbox.add_token(sequence, token_id, log_probability):
                    finished.append(sequence)
            except Exception as error:  # its text cannot be made: not the other rows' business
                broken.append((sequence, error))
        if finished:
            self._retire(finished)
        if not_finite:
            self._fail(not_finite, FloatingPointError("the model's logits are not finite"), outbox)
        for sequence, reason in broken:
            self._fail([sequence], reason, outbox)

    def _retire(self, sequences: Iterable[Sequence]) -> None:
        """Frees the slots of sequences whose end was handed out."""
        for move in self._scheduler.retire(sequences):
            self._make(move)
        self._sources_changed = self._encoder is not None

    def _make(self, move: Move) -> None:
        if move.sequence.num_cached:
            self._decoder.move(move.source, move.target, move.sequence.num_cached)
        if move.sequence.stage is Stage.RUNNING:
            self._sampler.move(move.source, move.target)
            self._token_ids[move.target] = self._token_ids[move.source]
            self._positions[move.target] = self._positions[move.source]

    def _fail(self, sequences: list[Sequence], error: Exception, outbox: Outbox) -> None:
        """Ends sequences that the model could not be run for."""
        self._report(_STEP_FAILED, sequences, error, outbox)
        self._retire(sequences)

    def _recover(self, error: Exception, outbox: Outbox) -> None:
        """Ends every sequence that has a slot: what the slots hold is not known after a step broke off."""
        self._report(_STEP_FAILED, self._scheduler.reset(), error, outbox)
        self._sources_changed = self._encoder is not None

    def _report(self, event: str, sequences: list[Sequence], error: BaseException, outbox: Outbox) -> None:
        """Hands out the failure, and only then logs it: a log that cannot be written keeps nobody waiting."""
        for sequence in sequences:
            failure = StepError("the model could not be run; the server's log says why")
            failure.__cause__ = error
            outbox.add_end(sequence.reply, failure)
        outbox.flush()
        with suppress(Exception):
            _log.error(event, engine=self._name, num_sequences=len(sequences), exc_info=error)


def cancel(sequences: Iterable[Sequence]) -> None:
    """Lets sequences that are not finished leave the engine at its next step."""
    for sequence in sequences:
        sequence.cancelled = True
