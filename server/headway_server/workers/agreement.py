"""What the workers of a server agree on: which bundles calls have loaded and unloaded, and the routes.

It lies in a file of the server's private folder, and its generation in shared memory (`Counts`), which every worker
looks at. A worker whose call changes something takes the turn, changes its own models, writes the file, counts the
generation up, and waits until all others have followed. A worker that starts begins with what the file says.
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
"""Between looks for the turn, and at how far others have followed."""


class _Asked(BaseModel):
    is_wanted: bool
    generation: int


class Agreed(BaseModel):
    """What calls have changed since the server started, each with the generation that brought it."""

    model_config = ConfigDict(frozen=True)

    generation: int = FIRST_GENERATION
    bundles: dict[str, _Asked] = {}
    """By path below the store: bundles that a call has loaded or unloaded."""
    scanned: int = 0
    """When a call last had the store looked at; 0: never."""
    routed: int = 0
    """When a call last changed the routes; 0: never."""
    routes: Routes = Routes()
    """What it made of them."""
    routes_in_file: Routes = Routes()
    """What the file of the routes held then; another content is a later change."""

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
        """Returns the next generation, in which the store was looked at."""
        generation = self.generation + 1
        return self.model_copy(update={"generation": generation, "scanned": generation})

    def with_routes(self, routes: Routes, routes_in_file: Routes) -> Self:
        """Returns the next generation, in which the routes are these."""
        generation = self.generation + 1
        changes = {"routed": generation, "routes": routes, "routes_in_file": routes_in_file}
        return self.model_copy(update={"generation": generation, **changes})


class Agreement:
    """What one worker has of the agreement. Belongs to the event loop."""

    def __init__(self, folder: Path, counts: Counts, *, index: int, supervisor: int) -> None:
        """Takes part.

        Args:
            folder: Of the server's own.
            counts: Of this worker.
            index: Of this worker.
            supervisor: Process id; a worker that it has left waits for nobody.
        """
        self.counts = counts
        self._folder = folder
        self._index = index
        self._supervisor = supervisor
        self._turn = asyncio.Lock()

    def read(self) -> Agreed:
        """Reads what is agreed on."""
        try:
            return Agreed.model_validate_json((self._folder / _FILE).read_bytes())
        except FileNotFoundError:
            return Agreed()

    def begin(self) -> Agreed:
        """Returns what this worker begins with, and tells others of it where whoever wrote it ended before that."""
        agreed = self.read()
        is_untold = agreed.generation > self.counts.generation
        if is_untold:  # and only then: others may be counting up
            self.counts.generation = agreed.generation
        self.tell_followed(agreed.generation)
        return agreed

    def write(self, agreed: Agreed) -> None:
        """Writes what is agreed on, whole. Others look at it once the generation is counted up.

        Raises:
            OSError: It cannot be written.
        """
        staged = self._folder / f"{_FILE}.new"  # whoever writes has the turn
        staged.write_text(agreed.model_dump_json())
        staged.replace(self._folder / _FILE)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits until no other call changes anything in any worker, and keeps it so.

        Raises:
            DrainingError: The server is shutting down.
        """
        async with self._turn:
            while not self.counts.take_turn():
                self._check_supervisor()
                await asyncio.sleep(_WAIT_S)
            try:
                yield
            finally:
                self.counts.leave_turn()

    def tell_followed(self, generation: int, problem: str = "") -> None:
        """Says that this worker has followed, or why it could not."""
        if problem:
            self._problem(self._index).write_text(problem)
        self.counts.tell_followed(generation, failed=bool(problem))

    async def others(self, generation: int, limit_s: float) -> list[str]:
        """Waits until all workers have followed, those too that are still loading; returns what went wrong.

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
            raise DrainingError("the server is shutting down; nothing is changed any more")

    def __repr__(self) -> str:
        return f"Agreement(generation {self.counts.generation}, {self._folder})"
