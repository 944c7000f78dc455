"""The thread that decodes, one step after another, and its end on the event loop (docs/engine.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from headway_server.decoding.core.step import StepError, Stepper
from headway_server.decoding.sequence import Delta, Sequence, SequenceResult
from headway_server.observers import ModelUsage
from headway_server.runtime import BusyLanes
from headway_server.runtime.worker import SteppingWorker


class Engine(SteppingWorker[list[Sequence]]):
    """Runs sequences through a decoder, and their sources through an encoder if there is one."""

    def __init__(self, stepper: Stepper, *, busy_lanes: BusyLanes | None = None) -> None:
        """Makes an engine; `start` lets it run.

        Args:
            stepper: With every slot free. Only the engine's thread calls it from now on.
            busy_lanes: Counter of the lanes that share the cores; None: the engine has them alone.
        """
        super().__init__(stepper.name, StepError, busy_lanes=busy_lanes)
        self._stepper = stepper
        stepper.outbox.post = self._post
        self.pace = stepper.pace
        """Pace of the engine."""

    def __repr__(self) -> str:
        return f"Engine({self.name}, {self._stepper!r})"

    @property
    def num_slots(self) -> int:
        """Slots that run at once."""
        return self._stepper.scheduler.num_slots

    @property
    def has_work(self) -> bool:
        """True if there is any sequence."""
        return self._stepper.scheduler.has_work

    def usage(self) -> ModelUsage:
        """Returns the number of waiting sequences and the usage of the slots."""
        scheduler = self._stepper.scheduler
        return ModelUsage(
            num_waiting=len(scheduler.waiting),
            num_slots=self.num_slots,
            num_used_slots=self.num_slots - scheduler.num_free,
            num_positions=self.num_slots * self._stepper.max_length,
            num_used_positions=sum(sequence.num_written * sequence.num_beams for sequence in scheduler.running),
        )

    def submit(self, sequences: list[Sequence]) -> None:
        """Queues sequences, to be admitted in this order.

        Raises:
            DrainingError: The engine was closed.
            StepError: The thread has stopped.
        """
        now = time.monotonic()
        for sequence in sequences:
            assert sequence.num_beams <= self.num_slots, "requests are checked against the slots"
            assert (sequence.source is not None) == self._stepper.reads_sources, (
                "an encoder reads sources, and nothing else does"
            )
            sequence.arrived_at = now
        self._submit([sequence.reply for sequence in sequences], sequences)

    async def run(self, sequences: list[Sequence]) -> list[SequenceResult]:
        """Submits sequences and waits for all. If one fails, or the caller disconnects, all are cancelled.

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
        """Submits a streamed sequence and yields its deltas; its reply has the result afterwards.

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
            sequence.reply.result.cancel()  # no effect on a finished result

    def _take_in(self, message: list[Sequence]) -> None:
        self._stepper.scheduler.waiting.add(message)

    def _step(self) -> None:
        self._stepper.step()

    def _release(self) -> None:
        self._stepper.outbox.flush()
        self._stepper.scheduler.reset()
        self._stepper.scheduler.waiting.clear()


def cancel(sequences: Iterable[Sequence]) -> None:
    """Makes sequences that are not finished leave the engine at its next step."""
    for sequence in sequences:
        sequence.cancelled = True
