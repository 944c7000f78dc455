"""Scans of the store: bundles in it, bundles no longer changing, and removed bundles."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from headway_server.bundles import Fingerprint, ListedBundle, list_store
from headway_server.errors import StoreError, StoreUnavailableError
from headway_server.serving.own_thread import run_in_own_thread
from headway_server.serving.routes import Routes, read_routes

_LOOKS_UNTIL_GONE = 2

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The result of a scan."""

    bundles: Mapping[str, ListedBundle]
    """Bundles by path, `<model>/<version>`; an unreadable model has only its name as the path."""
    resting: frozenset[str]
    """Paths of bundles unchanged since the last scan."""
    gone: frozenset[str]
    """Known paths missing in this scan and the last one, in a store that is not empty."""
    routes: Routes | StoreError
    """The routes of the file, or the reason why it cannot be read."""


class StoreWatch:
    """Scans a store and compares successive scans. For the event loop's thread only."""

    def __init__(self, store: Path, routes_file: Path, timeout_s: float) -> None:
        """Prepares to scan.

        Args:
            store: Folder of the store.
            routes_file: File of the routes.
            timeout_s: Timeout of a scan in seconds.
        """
        self._store = store
        self._routes_file = routes_file
        self._timeout_s = timeout_s
        self._looking: asyncio.Future[tuple[dict[str, ListedBundle], Routes | StoreError]] | None = None
        self._last: Mapping[str, ListedBundle] = {}
        self._num_missed: dict[str, int] = {}
        self.problem: str | None = None
        """Reason why the last scan failed; None if it succeeded."""

    async def look(self, known: Mapping[str, Fingerprint | None]) -> Look:
        """Scans the store in its own thread, since a network mount may stall.

        Args:
            known: Fingerprints of known bundles by path; None for a bundle without one.

        Raises:
            StoreUnavailableError: The store cannot be read, or not in time. A hanging scan keeps its thread, and no
                second scan starts beside it.
        """
        try:
            bundles, routes = await self._look(known)
        except StoreError as error:
            if self.problem != str(error):
                _log.error("the store cannot be read; loaded models stay served", reason=str(error))
            self.problem = str(error)
            raise StoreUnavailableError(str(error)) from error
        if self.problem is not None:
            _log.info("the store can be read again")
        self.problem = None
        resting = frozenset(path for path, bundle in bundles.items() if self._last.get(path) == bundle)
        self._last = bundles
        missing = {path for path in known if path not in bundles and path.partition("/")[0] not in bundles}
        if not bundles:  # more likely an unmounted volume than an emptied store
            missing = set()
        self._num_missed = {path: self._num_missed.get(path, 0) + 1 for path in missing}
        gone = frozenset(path for path, number in self._num_missed.items() if number >= _LOOKS_UNTIL_GONE)
        return Look(bundles=bundles, resting=resting, gone=gone, routes=routes)

    async def _look(
        self, known: Mapping[str, Fingerprint | None]
    ) -> tuple[dict[str, ListedBundle], Routes | StoreError]:
        if self._looking is None:
            tried = {path: fingerprint for path, fingerprint in known.items() if fingerprint is not None}
            self._looking = run_in_own_thread(
                partial(_look_at, self._store, self._routes_file, tried), name="look at store"
            )
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
