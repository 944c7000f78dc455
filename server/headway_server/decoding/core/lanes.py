"""Several engines of one model, each on a core of its own when all have work (docs/lanes.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as Elements
from contextlib import aclosing, contextmanager

from headway_server.decoding.beam_search.hypothesis import MAX_BEAMS
from headway_server.decoding.core.engine import Engine, cancel
from headway_server.decoding.reply import Piece
from headway_server.decoding.sequence import Sequence, SequenceResult

FEWEST_SLOTS = MAX_BEAMS
"""Slots of a lane at least: the widest search fits into each."""


class Lanes:
    """Sends every sequence to the engine that has least to do, of those that run. Methods belong to the event loop.

    A sequence stays where it was sent, so one that was sent later, of higher priority too, may be done earlier where
    another engine is quicker.
    """

    def __init__(self, engines: Elements[Engine]) -> None:
        """Takes at least one engine; `start` lets them run."""
        self._engines = engines
        self._loads = [0] * len(engines)  # slots that the sequences take that were sent and are not done

    def __repr__(self) -> str:
        return f"Lanes({', '.join(map(repr, self._engines))})"

    @property
    def num_slots(self) -> int:
        """Slots that one sequence can have at most."""
        return min(engine.num_slots for engine in self._engines)

    @property
    def is_alive(self) -> bool:
        """Whether every engine runs what is submitted."""
        return all(engine.is_alive for engine in self._engines)

    def start(self) -> None:
        """Starts the engines. Called on the event loop that results are to go to."""
        for engine in self._engines:
            engine.start()

    def close(self) -> None:
        """Ends the engines after their present steps. Sequences that are not finished fail with DrainingError."""
        for engine in self._engines:
            engine.close()

    async def run(self, sequences: list[Sequence]) -> list[SequenceResult]:
        """Runs sequences and waits for all of them; when one fails, or the caller goes, none goes on.

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

    async def stream(self, sequence: Sequence) -> AsyncGenerator[Piece, None]:
        """Runs a sequence that wants pieces and yields them; its reply holds the result afterwards.

        Raises:
            DeadlineError: The deadline passed.
            DrainingError: The engines were closed.
            StepError: The model could not be run.
        """
        with self._sent([sequence]) as groups:
            async with aclosing(self._engines[next(iter(groups))].stream(sequence)) as pieces:
                async for piece in pieces:
                    yield piece

    @contextmanager
    def _sent(self, sequences: Elements[Sequence]) -> Iterator[dict[int, list[int]]]:
        """Chooses a lane for each sequence, by index, and counts them there as long as the context lasts."""
        groups: dict[int, list[int]] = {}
        alive = [lane for lane, engine in enumerate(self._engines) if engine.is_alive]
        for index, sequence in enumerate(sequences):
            lane = min(alive or range(len(self._engines)), key=self._loads.__getitem__)  # none alive: it says why
            groups.setdefault(lane, []).append(index)
            self._loads[lane] += sequence.num_beams
        try:
            yield groups
        finally:
            for lane, group in groups.items():
                self._loads[lane] -= sum(sequences[index].num_beams for index in group)
