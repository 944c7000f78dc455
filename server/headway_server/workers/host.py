"""The models of a worker. A change by a call applies to all workers before the call is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import structlog

from headway_server.errors import BundleRejectedError, ServerError
from headway_server.serving.families import ServedModel
from headway_server.serving.finding import path_of
from headway_server.serving.host import BundleStatus, ModelHost
from headway_server.serving.images import PreparedImages
from headway_server.serving.routes import Alias, Route, Routes
from headway_server.workers.agreement import Agreed, Agreement

_Result = TypeVar("_Result")
_Change: TypeAlias = Callable[[], Coroutine[Any, Any, _Result]]
_Note: TypeAlias = Callable[[Agreed, _Result], Agreed]

_LOOK_S: Final = 0.05
"""Interval of polling the generation, in seconds."""
_RETRY_S: Final = 1.0

_log = structlog.get_logger(__name__)


class WorkerHost(ModelHost):
    """The models of a worker, which follows the others."""

    _agreement: Agreement
    _agreed: Agreed

    def join(self, agreement: Agreement, agreed: Agreed, images: PreparedImages) -> None:
        """Joins the workers; called before `start`.

        Args:
            agreement: Access to the shared state.
            agreed: Initial state of this worker.
            images: Prepared images shared by the workers.
        """
        self._agreement = agreement
        self._agreed = agreed
        self._catching_up = asyncio.Lock()
        self.images = images

    def start(self) -> None:
        """See `ModelHost`; begins to follow."""
        super().start()
        self._spawn(self._poll_agreement())

    async def load(self, name: str, version: str = "") -> ServedModel:
        """See `ModelHost`."""
        return await self._together(
            partial(super().load, name, version), lambda agreed, model: agreed.with_bundles({path_of(model): True})
        )

    async def unload(self, name: str, version: str = "", *, timeout_s: float | None = None) -> None:
        """See `ModelHost`."""
        await self._together(
            partial(super().unload, name, version, timeout_s=timeout_s),
            lambda agreed, _: agreed.with_bundles(dict.fromkeys(self._known(name, version), False)),
        )

    async def scan(self) -> tuple[BundleStatus, ...]:
        """See `ModelHost`."""
        return await self._together(super().scan, lambda agreed, _: agreed.with_scan())

    async def set_route(self, name: str, route: Route) -> str | None:
        """See `ModelHost`."""
        return await self._together(partial(super().set_route, name, route), self._note_routes)

    async def set_alias(self, name: str, alias: Alias | None) -> str | None:
        """See `ModelHost`."""
        return await self._together(partial(super().set_alias, name, alias), self._note_routes)

    def unhealthy(self, *, stall_timeout_s: float) -> dict[str, str]:
        """See `ModelHost`; includes other workers, so that each answers for the server."""
        own = super().unhealthy(stall_timeout_s=stall_timeout_s)
        self._agreement.counts.set_unhealthy(len(own))
        elsewhere = self._agreement.counts.unhealthy_elsewhere()
        return own | {
            f"worker {index}": f"{number} of its models are out of order; its own lines of the log name them"
            for index, number in elsewhere.items()
        }

    def _note_routes(self, agreed: Agreed, _: object) -> Agreed:
        return agreed.with_routes(self.routes, self._routes_in_file)

    async def _together(self, change: _Change[_Result], note: _Note[_Result]) -> _Result:
        """Makes a change here and in all other workers, under the lock.

        Args:
            change: Makes the change here.
            note: Adds it to the shared state.

        Raises:
            BundleRejectedError: Another worker could not follow; the message has the reasons.
            DrainingError: The server is shutting down.
        """
        return await self._run(self._in_turn(change, note))

    async def _in_turn(self, change: _Change[_Result], note: _Note[_Result]) -> _Result:
        assert self._loader is not None, "workers have a store"
        async with self._agreement.turn():
            await self._catch_up()
            result = await change()
            agreed = note(self._agreed, result)
            try:
                await asyncio.to_thread(self._agreement.write, agreed)
            except OSError as error:
                _log.error("other workers do not get a change", reason=error.strerror)
                problems = [f"they do not get the change ({error.strerror})"]
            else:
                self._agreed = agreed
                self._agreement.counts.generation = agreed.generation
                self._agreement.set_followed(agreed.generation)
                settings = self._loader.settings
                problems = await self._agreement.others(
                    agreed.generation, settings.versions.load_timeout + settings.drain_timeout
                )
        if problems:
            raise BundleRejectedError(f"done by one worker of this server and not by others: {'; '.join(problems)}")
        return result

    async def _poll_agreement(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._agreement.counts.generation != self._agreed.generation:
                try:
                    await self._catch_up()
                except Exception:
                    _log.exception("what other workers have changed cannot be read; it is tried again")
                    await asyncio.sleep(_RETRY_S)

    async def _catch_up(self) -> None:
        """Applies the changes of other workers."""
        async with self._catching_up:
            agreed = await asyncio.to_thread(self._agreement.read)
            since, self._agreed = self._agreed.generation, agreed
            if agreed.generation > since:
                problems = await self._follow(agreed, since)
                self._agreement.set_followed(agreed.generation, "; ".join(problems))

    async def _follow(self, agreed: Agreed, since: int) -> list[str]:
        """Applies the changes after a generation; returns problems."""
        changes: list[Callable[[], Coroutine[Any, Any, object]]] = []
        for path, asked in agreed.bundles.items():
            if asked.generation > since:
                name, _, version = path.partition("/")
                self._ask_for(path, is_wanted=asked.is_wanted)
                changes.append(partial(super().load if asked.is_wanted else super().unload, name, version))
        if agreed.scanned > since:
            changes.append(super().scan)
        if agreed.routed > since:
            changes.append(partial(self._take_agreed_routes, agreed.routes, agreed.routes_in_file))
        problems = []
        for change in changes:
            try:
                await change()
            except ServerError as error:
                problems.append(str(error))
            except Exception:
                _log.exception("could not follow another worker of this server")
                problems.append("the server's log says why")
        return problems

    async def _take_agreed_routes(self, routes: Routes, in_file: Routes) -> None:
        """Applies the routes of another worker.

        Raises:
            ModelNotFoundError: A new route refers to a version not loaded here.
        """
        before, self.routes, self._routes_in_file = self.routes, routes, in_file
        self._num_route_changes += 1  # so that a running scan of the store does not override them
        _log.info("routes changed", routes=routes.model_dump(exclude_defaults=True))
        for name, route in routes.models.items() - before.models.items():
            self._check_versions(name, route.default_version, route.canary_version)
        for _, alias in routes.aliases.items() - before.aliases.items():
            self._check_versions(alias.model, alias.version)
