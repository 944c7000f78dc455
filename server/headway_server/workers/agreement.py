"""Shared state of the workers: bundles loaded and unloaded by calls, and the routes.

It is a file in the server's private folder, with a generation in shared memory (`Counts`), which every worker polls.
For a change, a worker takes the lock, changes its own models, writes the file, increments the generation, and waits
until all others have followed. A new worker starts with the file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

from headway_server.errors import DrainingError
from headway_server.serving.counts import FIRST_GENERATION, Counts
from headway_server.serving.routes import Routes

_FILE: Final = "agreed.json"
_WAIT_S: Final = 0.005
"""Interval of polling for the lock and for the others' generations, in seconds."""


class _Asked(BaseModel):
    is_wanted: bool
    generation: int


class Agreed(BaseModel):
    """Changes by calls since the start of the server, each with its generation."""

    model_config = ConfigDict(frozen=True)

    generation: int = FIRST_GENERATION
    bundles: dict[str, _Asked] = {}
    """Bundles loaded or unloaded by a call, by path in the store."""
    scanned: int = 0
    """Generation of the last scan by a call; 0: none."""
    routed: int = 0
    """Generation of the last change of the routes; 0: none."""
    routes: Routes = Routes()
    """The routes after that change."""
    routes_in_file: Routes = Routes()
    """The file of the routes at that change; other content is a later change."""

    @property
    def asked_for(self) -> dict[str, bool]:
        """See `ModelHost.open`."""
        return {path: asked.is_wanted for path, asked in self.bundles.items()}

    def routes_over(self, in_file: Routes) -> Routes:
        """See `ModelHost.open`."""
        return self.routes if self.routed and in_file == self.routes_in_file else in_file

    def with_bundles(self, wanted: Mapping[str, bool]) -> Self:
        """Returns the next generation, in which bundles were loaded (True) or unloaded."""
        generation = self.generation + 1
        asked = {path: _Asked(is_wanted=is_wanted, generation=generation) for path, is_wanted in wanted.items()}
        return self.model_copy(update={"generation": generation, "bundles": {**self.bundles, **asked}})

    def with_scan(self) -> Self:
        """Returns the next generation, after a scan of the store."""
        generation = self.generation + 1
        return self.model_copy(update={"generation": generation, "scanned": generation})

    def with_routes(self, routes: Routes, routes_in_file: Routes) -> Self:
        """Returns the next generation, with these routes."""
        generation = self.generation + 1
        changes = {"routed": generation, "routes": routes, "routes_in_file": routes_in_file}
        return self.model_copy(update={"generation": generation, **changes})


class Agreement:
    """A worker's access to the shared state. For the event loop's thread only."""

    def __init__(self, folder: Path, counts: Counts, *, index: int, supervisor: int) -> None:
        """Joins the workers.

        Args:
            folder: The server's private folder.
            counts: The shared counts.
            index: Index of this worker.
            supervisor: Process id of the supervisor; without it, a worker stops waiting.
        """
        self.counts = counts
        self._folder = folder
        self._index = index
        self._supervisor = supervisor
        self._turn = asyncio.Lock()

    def read(self) -> Agreed:
        """Reads the shared state."""
        try:
            return Agreed.model_validate_json((self._folder / _FILE).read_bytes())
        except FileNotFoundError:
            return Agreed()

    def begin(self) -> Agreed:
        """Returns the initial state of this worker; publishes it if its writer ended before doing so."""
        agreed = self.read()
        is_unpublished = agreed.generation > self.counts.generation
        if is_unpublished:  # only then, since others may be incrementing
            self.counts.generation = agreed.generation
        self.set_followed(agreed.generation)
        return agreed

    def write(self, agreed: Agreed) -> None:
        """Writes the shared state atomically. Others read it once the generation is incremented.

        Raises:
            OSError: It cannot be written.
        """
        staged = self._folder / f"{_FILE}.new"  # the writer holds the lock
        staged.write_text(agreed.model_dump_json())
        staged.replace(self._folder / _FILE)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Locks the shared state against changes by other calls in any worker.

        Raises:
            DrainingError: The server is shutting down.
        """
        async with self._turn:
            while not self.counts.try_lock():
                self._check_supervisor()
                await asyncio.sleep(_WAIT_S)
            try:
                yield
            finally:
                self.counts.unlock()

    def set_followed(self, generation: int, problem: str = "") -> None:
        """Records that this worker has followed, or the reason why not."""
        if problem:
            self._problem(self._index).write_text(problem)
        self.counts.set_followed(generation, failed=bool(problem))

    async def others(self, generation: int, limit_s: float) -> list[str]:
        """Waits until all workers have followed, including loading ones; returns their problems.

        Raises:
            DrainingError: The server is shutting down.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        while (lagging := self.counts.lagging(generation)) and loop.time() < until:
            self._check_supervisor()
            await asyncio.sleep(_WAIT_S)
        problems = [f"worker {index}: {self._problem(index).read_text()}" for index in self.counts.failed(generation)]
        return problems + [f"worker {index}: did not answer for {limit_s:g} s" for index in lagging]

    def _problem(self, index: int) -> Path:
        return self._folder / f"problem-{index}"

    def _check_supervisor(self) -> None:
        if os.getppid() != self._supervisor:
            raise DrainingError("the server is shutting down; no more changes")

    def __repr__(self) -> str:
        return f"Agreement(generation {self.counts.generation}, {self._folder})"
