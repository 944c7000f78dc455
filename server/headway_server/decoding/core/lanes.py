"""Several engines of one model, each on its own core while all have work (docs/lanes.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as Elements
from contextlib import aclosing, contextmanager

from headway_server.decoding.core.engine import Engine, cancel
from headway_server.decoding.core.pace import LanesPace
from headway_server.decoding.parameters import MAX_BEAMS
from headway_server.decoding.sequence import Delta, Sequence, SequenceResult
from headway_server.observers import ModelUsage
from headway_server.runtime.threads import CLOSE_TIMEOUT_S

FEWEST_SLOTS = MAX_BEAMS
"""Least slots of a lane, so that the widest search fits into each."""


class Lanes:
    """Sends every sequence to the engine with the least to do. Methods belong to the event loop.

    A sequence stays in the lane it was sent to. So a later one, or one of lower priority, may finish earlier in another
    lane.
    """

    def __init__(self, engines: Elements[Engine]) -> None:
        """Takes one engine or more; `start` lets them run."""
        self._engines = engines
        self.pace = LanesPace([engine.pace for engine in engines], sum(engine.num_slots for engine in engines))
        """How fast they go together."""
        self._loads = [0] * len(engines)  # slots of the sequences that were sent and are not done

    def __repr__(self) -> str:
        return f"Lanes({', '.join(map(repr, self._engines))})"

    @property
    def num_slots(self) -> int:
        """Maximum slots of one sequence."""
        return min(engine.num_slots for engine in self._engines)

    @property
    def is_alive(self) -> bool:
        """True if every engine is running."""
        return all(engine.is_alive for engine in self._engines)

    def start(self) -> None:
        """Starts the engines. Called on the event loop that results are to go to."""
        for engine in self._engines:
            engine.start()

    def stalled_s(self) -> float:
        """Returns the seconds of the longest running step; 0.0 without one."""
        return max(engine.stalled_s() for engine in self._engines)

    def usage(self) -> ModelUsage:
        """Returns the number of waiting sequences and the usage of the slots, over all engines."""
        return sum((engine.usage() for engine in self._engines), start=ModelUsage(num_waiting=0))

    def close(self) -> bool:
        """Ends the engines after their present steps. Sequences that are not finished fail with DrainingError.

        Returns:
            False if an engine's step hangs, so that its thread was left behind.
        """
        for engine in self._engines:
            engine.stop()
        end = time.monotonic() + CLOSE_TIMEOUT_S
        ended = [engine.close(max(0.0, end - time.monotonic())) for engine in self._engines]
        return all(ended)

    async def run(self, sequences: list[Sequence]) -> list[SequenceResult]:
        """Runs sequences and waits for all. If one fails, or the caller disconnects, all are cancelled.

        Raises:
            DeadlineError: The deadline passed.
            DrainingError: The engines were closed.
            StepError: The model could not be run.
        """
        with self._sent(sequences) as groups:
            if len(groups) == 1:
                return await self._engines[next(iter(groups))].run(sequences)
            try:
                runs = (self._engines[lane].run([sequences[i] for i in group]) for lane, group in groups.items())
                by_group = await asyncio.gather(*runs)
            finally:
                cancel(sequences)
        results = {
            i: result
            for group, found in zip(groups.values(), by_group, strict=True)
            for i, result in zip(group, found, strict=True)
        }
        return [results[i] for i in range(len(sequences))]

    async def stream(self, sequence: Sequence) -> AsyncGenerator[Delta, None]:
        """Runs a streamed sequence and yields its deltas; its reply has the result afterwards.

        Raises:
            DeadlineError: The deadline passed.
            DrainingError: The engines were closed.
            StepError: The model could not be run.
        """
        with self._sent([sequence]) as groups:
            async with aclosing(self._engines[next(iter(groups))].stream(sequence)) as deltas:
                async for delta in deltas:
                    yield delta

    @contextmanager
    def _sent(self, sequences: Elements[Sequence]) -> Iterator[dict[int, list[int]]]:
        """Yields the indices of sequences by the lanes chosen for them; counts them there until the context ends."""
        groups: dict[int, list[int]] = {}
        alive = [lane for lane, engine in enumerate(self._engines) if engine.is_alive]
        for index, sequence in enumerate(sequences):
            lane = min(
                alive or range(len(self._engines)), key=self._loads.__getitem__
            )  # if none is alive, it raises why
            groups.setdefault(lane, []).append(index)
            self._loads[lane] += sequence.num_beams
        try:
            yield groups
        finally:
            for lane, group in groups.items():
                self._loads[lane] -= sum(sequences[index].num_beams for index in group)
