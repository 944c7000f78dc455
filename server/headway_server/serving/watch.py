"""Looks at the store again and again: what is there, what has come to rest, and what has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from headway_server.bundles import Fingerprint, ListedBundle, list_store
from headway_server.errors import StoreError, StoreUnavailableError
from headway_server.serving.apart import run_apart
from headway_server.serving.routes import Routes, read_routes

_LOOKS_UNTIL_GONE = 2

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at the store has found."""

    bundles: Mapping[str, ListedBundle]
    """By path, `<model>/<version>`; a model that cannot be read is there by its name alone."""
    resting: frozenset[str]
    """Paths of bundles that are as they were at the look before."""
    gone: frozenset[str]
    """Known paths that were missing at this look and the one before, in a store that is not empty."""
    routes: Routes | StoreError
    """What the file of the routes holds, or why it cannot be read."""


class StoreWatch:
    """Remembers what the looks before have found. Belongs to the event loop."""

    def __init__(self, store: Path, routes_file: Path, timeout_s: float) -> None:
        """Prepares to look.

        Args:
            store: Folder of the store.
            routes_file: File of the routes.
            timeout_s: Seconds that a look may take.
        """
        self._store = store
        self._routes_file = routes_file
        self._timeout_s = timeout_s
        self._looking: asyncio.Future[tuple[dict[str, ListedBundle], Routes | StoreError]] | None = None
        self._last: Mapping[str, ListedBundle] = {}
        self._num_missed: dict[str, int] = {}
        self.problem: str | None = None
        """Why the last look failed; None where it did not."""

    async def look(self, known: Mapping[str, Fingerprint | None]) -> Look:
        """Looks at the store, in a thread, so that a network mount that stalls holds up nothing else.

        Args:
            known: Fingerprints of the bundles that are known, by path: None for one of which there is none yet.

        Raises:
            StoreUnavailableError: The store cannot be read, or not in time. The thread of a look that hangs is left to
                itself, and there is no second one beside it.
        """
        try:
            bundles, routes = await self._look(known)
        except StoreError as error:
            if self.problem != str(error):
                _log.error("the store cannot be looked at; what is loaded is served on", reason=str(error))
            self.problem = str(error)
            raise StoreUnavailableError(str(error)) from error
        if self.problem is not None:
            _log.info("the store can be looked at again")
        self.problem = None
        resting = frozenset(path for path, bundle in bundles.items() if self._last.get(path) == bundle)
        self._last = bundles
        missing = {path for path in known if path not in bundles and path.partition("/")[0] not in bundles}
        if not bundles:  # an unmounted volume looks like this; nobody empties a store on purpose
            missing = set()
        self._num_missed = {path: self._num_missed.get(path, 0) + 1 for path in missing}
        gone = frozenset(path for path, number in self._num_missed.items() if number >= _LOOKS_UNTIL_GONE)
        return Look(bundles=bundles, resting=resting, gone=gone, routes=routes)

    async def _look(
        self, known: Mapping[str, Fingerprint | None]
    ) -> tuple[dict[str, ListedBundle], Routes | StoreError]:
        if self._looking is None:
            tried = {path: fingerprint for path, fingerprint in known.items() if fingerprint is not None}
            self._looking = run_apart(partial(_look_at, self._store, self._routes_file, tried), name="look at store")
        done, _ = await asyncio.wait({self._looking}, timeout=self._timeout_s)
        if not done:
            raise StoreError(f"the store has not answered for {self._timeout_s:g} s")
        looked, self._looking = self._looking, None
        return looked.result()

    def __repr__(self) -> str:
        return f"StoreWatch({self._store}, {self.problem or f'{len(self._last)} bundles'})"


def _look_at(
    store: Path, routes_file: Path, tried: Mapping[str, Fingerprint]
) -> tuple[dict[str, ListedBundle], Routes | StoreError]:
    bundles = list_store(store, tried)
    try:
        return bundles, read_routes(routes_file)
    except StoreError as error:
        return bundles, error
