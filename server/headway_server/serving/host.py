"""The loaded models: loading, unloading and replacing them while calls run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast

import structlog

from headway_server.bundles import (
    NAME,
    ROUTES_FILE,
    Fingerprint,
    ListedBundle,
    TrustedKeys,
    find_bundles,
    fingerprint_of,
    open_bundle,
    path_key,
)
from headway_server.errors import (
    BundleError,
    BundleRejectedError,
    DrainingError,
    InvalidInputError,
    MachineBusyError,
    MemoryUnavailableError,
    ModelNotFoundError,
    ServerError,
    StoreError,
    StoreUnavailableError,
    no_panics,
)
from headway_server.observers import NO_OBSERVER, Call, ModelEvent, ModelId, Observer
from headway_server.runtime import Runtime, available_bytes, close_together, give_back_memory, join_threads, run_nicely
from headway_server.serving.abilities import Ability, KindT, PairAbility, PartnerT
from headway_server.serving.families import Families, ServedModel, served_families
from headway_server.serving.finding import ModelFinder, names_of, path_of, quoted, task_of
from headway_server.serving.images import ImageMemory, PreparedImages
from headway_server.serving.own_thread import run_in_own_thread
from headway_server.serving.routes import Alias, Route, Routes, read_routes, write_routes
from headway_server.serving.watch import Look, StoreWatch
from headway_server.settings import ServerSettings

_Result = TypeVar("_Result")
_Event: TypeAlias = Literal["loading", "ready", "unloading", "unloaded", "failed"]

_NOTHING_IS_LOADED: Final = "the server is shutting down; nothing is loaded any more"
_SETTLING_S: Final = 1.0
"""Longest wait for the second scan of a new bundle, in seconds."""
_SMALL_SHARE: Final = 0.01
"""Share of the available memory that the files of a bundle have at most, to be loaded beside others at start."""
_LONGEST_PAUSE_S: Final = 3600.0
"""Delays before retries of a bundle that failed because of the machine, in seconds."""
_OF_MACHINE: Final = (MachineBusyError, MemoryUnavailableError, MemoryError, OSError)
"""Errors of the machine rather than the bundle: too busy, too little memory, unreadable storage."""

_log = structlog.get_logger(__name__)


class ModelState(StrEnum):
    """State of a bundle in the store."""

    LOADING = "loading"
    """Loading for the first time."""
    READY = "ready"
    """Serving calls. With a reason: loading a newer copy failed, and the old one stays."""
    UNLOADING = "unloading"
    """Finishing its calls; new calls do not find it."""
    FAILED = "failed"
    """Was ready and ended by itself: a bug or a broken machine."""
    REJECTED = "rejected"
    """Loading failed."""
    INCOMPLETE = "incomplete"
    """Incomplete, perhaps still being copied. Loaded once it is complete and unchanged."""
    AVAILABLE = "available"
    """In the store but not loaded: unloaded by a call, or beyond the number of versions served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleStatus:
    """Status of a bundle."""

    path: str
    """Path in the store: `<model>/<version>`."""
    state: ModelState
    reason: str | None = None
    """Reason of a rejection, of incompleteness or failure, or of a newer copy's rejection."""

    @property
    def name(self) -> str:
        """Of the model."""
        return self.path.partition("/")[0]

    @property
    def version(self) -> str:
        """Of the model."""
        return _version_of(self.path)


@dataclass(slots=True, eq=False)
class _Hosted:
    """A loaded model and the calls that use it."""

    model: ServedModel
    manifest: str = ""
    """SHA-256 of the manifest."""
    num_calls: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    def take(self) -> None:
        self.num_calls += 1
        self.idle.clear()

    def leave(self) -> None:
        self.num_calls -= 1
        if not self.num_calls:
            self.idle.set()


class _Loaded(NamedTuple):
    """A loaded model, and the time of loading."""

    model: ServedModel
    seconds: float


@dataclass(slots=True)
class _Entry:
    """A bundle known to the host."""

    state: ModelState
    hosted: _Hosted | None = None
    """Set while it is ready."""
    reason: str | None = None
    tried: Fingerprint | None = None
    """Fingerprint of its files at the last attempt to load it."""
    is_asked_for: bool | None = None
    """True: loaded by a call; False: unloaded by a call; None: the settings decide."""
    num_unfinished: int = 0
    """Successive failures because of the machine."""
    next_try_at: float = 0.0
    """Time of the next retry, by `time.monotonic`; a call may retry sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleLoader:
    """Loads bundles of the store of the settings. Usable from several threads at a time."""

    runtime: Runtime
    settings: ServerSettings
    families: Families = field(default_factory=served_families)

    @property
    def routes_file(self) -> Path:
        """File of the routes."""
        return _routes_file(self.settings)

    def fingerprint(self, path: str) -> Fingerprint:
        """Returns the fingerprint of the bundle at `path` in the store.

        Raises:
            BundleError: The folder cannot be read.
            ModelNotFoundError: There is no such bundle.
        """
        try:
            return fingerprint_of(self.settings.store / path)
        except (FileNotFoundError, NotADirectoryError):
            raise ModelNotFoundError(f"the store has no bundle {path}") from None
        except OSError as error:
            raise BundleError(f"cannot be read ({error.strerror})") from error

    def load(self, path: str, observer: Observer) -> ServedModel:
        """Loads the bundle at `path` in the store; errors are those of its family's loader."""
        key_file = self.settings.versions.require_signed
        trusted = None if key_file is None else TrustedKeys.read(key_file)  # each time, so that keys can change
        bundle = open_bundle(self.settings.store / path, trusted)
        manifest = bundle.manifest
        family = self.families.get(manifest.task)
        if family is None:
            raise BundleError(f"{bundle.path}: is for {manifest.task}, which this server does not serve")
        settings = self.settings.for_model(manifest.name)
        runtime = self.runtime.suiting(manifest, settings.precision).with_set_lanes(settings.lanes)
        own = self.settings.models.get(manifest.name)
        niceness = 0 if own is None else -own.priority
        return run_nicely(niceness, partial(family.load, bundle, runtime, settings, observer))


def read_store(settings: ServerSettings) -> tuple[list[str], Routes]:
    """Returns the paths of a store's bundles, `<model>/<version>`, and its routes; checks the trusted keys too.

    Raises:
        StoreError: The store is missing or has no bundle, or the file of routes or of trusted keys is invalid.
    """
    if settings.versions.require_signed is not None:
        TrustedKeys.read(settings.versions.require_signed)
    routes = read_routes(_routes_file(settings))
    return [folder.relative_to(settings.store).as_posix() for folder in find_bundles(settings.store)], routes


def _prepared_images(settings: ServerSettings) -> PreparedImages:
    memory = ImageMemory(max_mib=settings.max_prepared_mib, ttl_s=settings.image_ttl)
    return PreparedImages(memory, limits=settings.image_limits)


def _routes_file(settings: ServerSettings) -> Path:
    return settings.versions.routes_file or settings.store / ROUTES_FILE


class ModelHost(ModelFinder[ServedModel]):
    """The loaded models of a server. For the event loop's thread only, once the loop runs.

    A call keeps its model until it ends: a model unloaded or replaced is closed after its last call, or after their
    timeout.
    """

    def __init__(
        self,
        models: Iterable[ServedModel] = (),
        *,
        loader: BundleLoader | None = None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """Takes loaded models that are not started.

        Args:
            models: The models.
            loader: Loads further models; None: no further models.
            observer: Observes every change.
        """
        self._loader = loader
        self._observer = observer
        self._entries: dict[str, _Entry] = {}
        self._leaving: set[_Hosted] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changing = asyncio.Lock()  # one at a time: each checks the available memory
        self._overdue: tuple[str, asyncio.Task[None]] | None = None  # still occupying memory
        self._looking, self._scanning, self._routing = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._watch = (
            None
            if loader is None
            else StoreWatch(loader.settings.store, loader.routes_file, loader.settings.versions.scan_timeout)
        )
        self._polling: asyncio.Task[None] | None = None
        self._loading: set[threading.Thread] = set()
        self._num_settling = 0
        self.images = PreparedImages() if loader is None else _prepared_images(loader.settings)
        """Prepared images, for all models that read images."""
        self.routes = Routes()
        self._routes_in_file = self.routes
        self._routes_problem: str | None = None
        self._num_route_changes = 0
        self._writing: asyncio.Future[None] | None = None
        self._is_started = self._is_closed = False
        for model in models:
            self._put(path_of(model), model)

    @classmethod
    def open(
        cls,
        runtime: Runtime,
        settings: ServerSettings,
        *,
        families: Families | None = None,
        observer: Observer = NO_OBSERVER,
        asked_for: Mapping[str, bool] | None = None,
        routes_over: Callable[[Routes], Routes] | None = None,
    ) -> Self:
        """Loads the newest versions of each model in the store, as many as the settings say.

        A bundle that cannot be loaded is rejected; the others are served.

        Args:
            runtime: Device and threads.
            settings: The server's.
            families: Families by task; None: those of `tasks/table.py`.
            observer: Observes every change.
            asked_for: By path in the store, True to load a bundle and False to leave it out, whatever the settings say;
                None: none.
            routes_over: Returns the routes to use in place of those of the file; None: the file's.

        Raises:
            StoreError: The store is missing, none of its bundles can be loaded, or the file of the routes or of the
                trusted keys is wrong.
        """
        found, routes = read_store(settings)
        loader = BundleLoader(runtime=runtime, settings=settings, families=families or served_families())
        host = cls(loader=loader, observer=observer)
        host._routes_in_file = routes
        host.routes = routes if routes_over is None else routes_over(routes)
        models, turns = _by_model(found), _LoadingTurns(loader)
        pool = ThreadPoolExecutor(turns.num_threads, thread_name_prefix="load")
        try:
            for opening in [pool.submit(host._open_model, paths, asked_for or {}, turns) for paths in models]:
                opening.result()
        except BaseException:  # a signal to end, too: what loads now is left behind
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        if not host.models and host.rejected:
            first, *others = host.rejected
            more = f"; the log says why {len(others)} more cannot" if others else ""
            raise StoreError(
                f"store {settings.store}: none of its bundles can be served: {first.path}: {first.reason}{more}"
            )
        return host

    def _open_model(self, paths: Sequence[str], asked_for: Mapping[str, bool], turns: _LoadingTurns) -> None:
        """Loads the newest versions of a model, as many as the settings say; on one of several threads.

        Args:
            paths: Of its versions, the newest first.
            asked_for: As in `open`.
            turns: Of all threads.
        """
        num_ready = 0
        for path in paths:
            with turns.changing:
                entry = self._entries[path] = _Entry(ModelState.AVAILABLE, is_asked_for=asked_for.get(path))
                if not self._is_wanted(path, entry, num_ready):
                    continue
                entry.state = ModelState.LOADING
            try:
                with turns.of(path), no_panics():
                    loaded = self._load(path)
            except Exception as error:  # a bad bundle must not prevent the others
                with turns.changing:
                    self._note_failure(path, error)
            else:
                with turns.changing:
                    self._put(path, loaded.model)
                    self._report_ready(path, loaded)
                num_ready += 1

    @property
    def bundles(self) -> tuple[BundleStatus, ...]:
        """Every known bundle, by path."""
        return tuple(self._status(path, self._entries[path]) for path in sorted(self._entries, key=path_key))

    @property
    def rejected(self) -> tuple[BundleStatus, ...]:
        """Rejected bundles, by path."""
        return tuple(bundle for bundle in self.bundles if bundle.state is ModelState.REJECTED)

    @property
    def families(self) -> Families:
        """What models of each task can do."""
        return super().families if self._loader is None else self._loader.families

    def find_able(self, ability: Ability[KindT], name: str, version: str) -> KindT:
        """`find` with the type of models that have the ability."""
        return cast("KindT", self.find(ability, name, version))

    def find_able_pair(self, ability: PairAbility[KindT, PartnerT], name: str, version: str) -> tuple[KindT, PartnerT]:
        """`find_pair` with the types of both models."""
        return cast("tuple[KindT, PartnerT]", self.find_pair(ability, name, version))

    def _keep_open(self, model: ServedModel, call: Call) -> None:
        hosted = self._entries[path_of(model)].hosted
        if hosted is not None:
            hosted.take()
            call.callbacks.append(hosted.leave)

    # Changing

    async def load(self, name: str, version: str = "") -> ServedModel:
        """Loads a bundle of the store in a thread, beside running calls; returns it ready.

        A loaded model is replaced by the store's current copy without failing a call: running calls keep the old one,
        new calls find the new one. Both take memory until the old one is closed. Loading continues if the caller stops
        waiting. The version stays loaded, however many are newer.

        Args:
            name: Name of the model.
            version: Version of the model; empty for the latest in the store.

        Raises:
            BundleRejectedError: It cannot be loaded. The version loaded before stays; `bundles` has the reason.
            DrainingError: The host was closed meanwhile.
            InvalidInputError: The name or the version is not well-formed.
            ModelNotFoundError: The store has no such bundle.
            StoreUnavailableError: This host has no store, or it does not answer.
        """
        _check_name("model", name)
        if version:
            _check_name("model_version", version)
        else:
            version = _latest(name, (await self._look()).bundles)
        return await self._run(self._load_asked(f"{name}/{version}"))

    async def unload(self, name: str, version: str = "", *, timeout_s: float | None = None) -> None:
        """Unloads a model, and closes it when its calls have ended.

        It stays unloaded until `load` or a restart of the server. For a model that is not loaded, this is all.

        Args:
            name: Name of the model.
            version: Version of the model; empty for all.
            timeout_s: Seconds for its calls to end; then they fail. None: the settings' drain timeout.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        paths = self._known(name, version)
        if not paths:
            asked = f"{name}/{version}" if version else name
            raise ModelNotFoundError(f"there is no model {quoted(asked)}; loaded are {names_of(self.models)}")
        for path in paths:
            self._ask_for(path, is_wanted=False)
        changes = [self._spawn(self._take_out(path, timeout_s)) for path in paths]
        await asyncio.shield(asyncio.gather(*changes))

    async def scan(self) -> tuple[BundleStatus, ...]:
        """Scans the store now: loads new and changed bundles, unloads removed ones; returns the bundles that changed.

        Rejected and incomplete bundles are among them, with their reasons.

        Raises:
            StoreUnavailableError: This host has no store, or it does not answer.
        """
        return await self._run(self._scan(is_asked_for=True))

    def scan_soon(self) -> None:
        """Starts a scan; the log has its result. Called on the event loop."""
        _log.info("looking at the store")
        self._spawn(self._scan_by_request())

    async def _scan_by_request(self) -> None:
        with suppress(StoreUnavailableError):  # logged where it was found
            changed = await self._scan(is_asked_for=True)
            _log.info("looked at the store", changed=[f"{bundle.path} {bundle.state}" for bundle in changed])

    async def set_route(self, name: str, route: Route) -> str | None:
        """Sets the route of a model.

        Args:
            name: Name of the model.
            route: Route to loaded versions; an empty one means the latest.

        Returns:
            Reason why
            the change will not survive a restart; None if it will.

        Raises:
            ModelNotFoundError: There is no such model, or a version is not loaded.
            StoreUnavailableError: An earlier change is still being written.
        """
        if route != Route() or name not in self.routes.models:
            self._check_versions(name, route.default_version, route.canary_version)
        return await self._run(self._change_routes(lambda routes: routes.with_route(name, route)))

    async def set_alias(self, name: str, alias: Alias | None) -> str | None:
        """Sets or removes an alias; returns the same as `set_route`.

        Args:
            name: The alias.
            alias: Its model and version; None: remove it.

        Raises:
            InvalidInputError: The name is not well-formed.
            ModelNotFoundError: There is no such model, loaded version or alias.
            StoreUnavailableError: An earlier change is still being written.
        """
        _check_name("alias", name)
        if alias is not None:
            self._check_versions(alias.model, alias.version)
        elif name not in self.routes.aliases:
            raise ModelNotFoundError(f"there is no alias {quoted(name)}")
        return await self._run(self._change_routes(lambda routes: routes.with_alias(name, alias)))

    def _known(self, name: str, version: str) -> list[str]:
        """Returns the paths of the known bundles of a model; without a version, of all."""
        return [path for path in self._entries if path.partition("/")[::2] == (name, version or _version_of(path))]

    def _ask_for(self, path: str, *, is_wanted: bool) -> None:
        """Overrides the settings for a bundle: served or not."""
        self._entries.setdefault(path, _Entry(ModelState.AVAILABLE)).is_asked_for = is_wanted

    def _check_versions(self, name: str, *versions: str | None) -> None:
        loaded = [model.bundle.manifest.version for model in self.models if model.bundle.manifest.name == name]
        self._named(name, next(iter(loaded), ""))
        for version in filter(None, versions):
            self._named(name, version)

    async def _change_routes(self, change: Callable[[Routes], Routes]) -> str | None:
        async with self._routing:
            if self._writing is not None and not self._writing.done():
                raise StoreUnavailableError("an earlier change of the routes is still being written; try again later")
            routes = change(self.routes)
            self._num_route_changes += 1
            self.routes = routes
            _log.info("routes changed", routes=routes.model_dump(exclude_defaults=True))
            if self._loader is None:
                return "the server has no store to write it to"
            versions = self._loader.settings.versions
            self._writing = run_in_own_thread(
                partial(write_routes, self._loader.routes_file, routes), name="write routes"
            )
            self._writing.add_done_callback(partial(self._note_written, routes))
            done, _ = await asyncio.wait({self._writing}, timeout=versions.scan_timeout)
            if not done:
                reason = f"the store has not answered for {versions.scan_timeout:g} s"
            elif (error := self._writing.exception()) is None:
                return None
            else:
                reason = str(error)
            _log.warning("routes last until the server stops", reason=reason)
            return reason

    def _note_written(self, routes: Routes, writing: asyncio.Future[None]) -> None:
        if not writing.cancelled() and writing.exception() is None:
            self._routes_in_file = routes

    async def _load_asked(self, path: str) -> ServedModel:
        if (entry := self._entries.get(path)) is not None:
            entry.is_asked_for = True
        model = await self._replace(path)
        self._entries[path].is_asked_for = True
        return model

    async def _replace(self, path: str) -> ServedModel:
        async with self._changing:
            self._check_open()
            entry = self._entries.setdefault(path, _Entry(ModelState.AVAILABLE))
            if entry.hosted is None:
                entry.state, entry.reason = ModelState.LOADING, None
            try:
                with no_panics():
                    loaded = await self._load_in_time(path)
            except (ModelNotFoundError, StoreUnavailableError) as error:
                if entry.hosted is None:
                    del self._entries[path]
                else:
                    entry.reason = str(error)
                raise
            except Exception as error:
                raise BundleRejectedError(f"{path}: {self._note_failure(path, error)}") from error
            model = loaded.model
            if self._is_closed:
                await run_in_own_thread(model.close, name=f"close {path}")
                raise DrainingError(_NOTHING_IS_LOADED)
            model.start()
            old = self._put(path, model)
            self._report_ready(path, loaded)
        if old is not None:
            self._spawn(self._close_when_idle(old, path, self._drain_timeout_s))
        return model

    def _check_open(self) -> None:
        if self._is_closed:
            raise DrainingError(_NOTHING_IS_LOADED)

    async def _load_in_time(self, path: str) -> _Loaded:
        """Loads a bundle in its own thread, with a timeout.

        A late load continues in its thread. Until it has ended and its model is closed, no other bundle is loaded,
        since it may still take memory.
        """
        if self._loader is None:
            raise StoreUnavailableError(f"{path}: the server has no store")
        limit_s = self._loader.settings.versions.load_timeout
        if self._overdue is not None:
            overdue, closing = self._overdue
            if not (await asyncio.wait({closing}, timeout=limit_s))[0]:
                raise MachineBusyError(
                    f"is not loaded while {overdue} is, which has taken more than --load-timeout, {limit_s:g} s, and "
                    "goes on; try again when it has ended, or restart the server"
                )
            self._overdue = None
        loading = run_in_own_thread(partial(self._load, path), name=f"load {path}")
        done, _ = await asyncio.wait({loading}, timeout=limit_s)
        if not done:
            self._overdue = path, self._spawn(self._end_late(path, loading))
            raise MachineBusyError(
                f"has not been loaded after {limit_s:g} s; it is tried again when this try has ended. If its storage "
                "or the machine is always so slow, raise --load-timeout"
            )
        return loading.result()

    async def _end_late(self, path: str, loading: asyncio.Future[_Loaded]) -> None:
        """Waits for a load past its timeout and closes its model; the next attempt loads the store's current copy."""
        try:
            loaded = await loading
        except Exception as error:
            entry = self._entries.get(path)
            if entry is not None and entry.num_unfinished:
                self._note_failure(path, error)
            return
        _log.warning("loading a bundle took too long; it is retried", bundle=path, seconds=round(loaded.seconds, 3))
        with suppress(Exception):
            await run_in_own_thread(loaded.model.close, name=f"close {path}")
            del loaded
            await run_in_own_thread(give_back_memory, name="give back memory")

    async def _take_out(self, path: str, timeout_s: float | None) -> None:
        async with self._changing:
            entry = self._entries.get(path)
            if entry is None:
                return
            if entry.hosted is None:
                entry.state, entry.reason = ModelState.AVAILABLE, None
                return
            entry.state, entry.reason = ModelState.UNLOADING, None
            closing = self._close_when_idle(
                entry.hosted, path, self._drain_timeout_s if timeout_s is None else timeout_s
            )
            entry.hosted = None
            self._list_models()
            self._report(path, "unloading")
        await closing
        if entry.state is ModelState.UNLOADING:  # it may have been loaded again meanwhile
            entry.state = ModelState.AVAILABLE

    async def _close_when_idle(self, hosted: _Hosted, path: str, timeout_s: float) -> None:
        """Closes an unloaded model once its calls have ended, and frees its memory."""
        self._leaving.add(hosted)
        try:
            async with asyncio.timeout(timeout_s):
                await hosted.idle.wait()
        except TimeoutError:
            _log.warning("closing a model that is still in use by calls", model=path, running_calls=hosted.num_calls)
        await run_in_own_thread(hosted.model.close, name=f"close {path}")
        self._leaving.discard(hosted)
        del hosted  # the last reference to the model
        await run_in_own_thread(give_back_memory, name="give back memory")
        self._report(path, "unloaded")
        _log.info("model unloaded", model=path)

    def _load(self, path: str) -> _Loaded:
        """Loads a bundle in the current thread; the caller sets its state to ready."""
        assert self._loader is not None
        self._report(path, "loading")
        began = time.monotonic()
        self._loading.add(threading.current_thread())
        try:
            # Only the loading thread changes this.
            self._entries[path].tried = fingerprint = self._loader.fingerprint(path)
            model = self._loader.load(path, self._observer)
            if self._loader.fingerprint(path) != fingerprint:
                model.close()
                raise BundleError("was changed while it was loaded; copy it under another name, then rename it")
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception:
            raise
        except BaseException as error:  # a panic of a Rust library
            raise BundleError("cannot be loaded; the server's log says why") from error
        finally:
            self._loading.discard(threading.current_thread())
        return _Loaded(model, time.monotonic() - began)

    def _report_ready(self, path: str, loaded: _Loaded) -> None:
        model, seconds = loaded
        self._report(path, "ready", seconds=seconds)
        manifest = model.bundle.manifest
        _log.info(
            "model loaded",
            model=manifest.name,
            version=manifest.version,
            task=manifest.task.value,
            variant=model.precision.value,
            device=model.device,
            seconds=round(seconds, 3),
        )

    def _put(self, path: str, model: ServedModel) -> _Hosted | None:
        """Makes new calls find a model; returns the previous one."""
        entry = self._entries.setdefault(path, _Entry(ModelState.READY))
        old = entry.hosted
        entry.hosted = _Hosted(model, "" if entry.tried is None else entry.tried.manifest)
        entry.state, entry.reason, entry.num_unfinished = ModelState.READY, None, 0
        self._list_models()
        return old

    def _list_models(self) -> None:
        models = (entry.hosted.model for entry in self._entries.values() if entry.hosted is not None)
        self.models = tuple(sorted(models, key=lambda model: path_key(path_of(model))))
        self._forget_index()

    def _status(self, path: str, entry: _Entry) -> BundleStatus:
        if self._is_started and entry.hosted is not None and not entry.hosted.model.is_alive:
            return BundleStatus(path=path, state=ModelState.FAILED, reason="ended by itself; the log has the reason")
        return BundleStatus(path=path, state=entry.state, reason=entry.reason)

    def _note_failure(self, path: str, error: Exception) -> str:
        """Records, logs and returns the reason of a rejection."""
        reason = _reason(error, path, None if self._loader is None else self._loader.settings.store)
        entry = self._entries[path]
        entry.reason = reason
        is_of_machine = isinstance(error, _OF_MACHINE) or isinstance(error.__cause__, _OF_MACHINE)
        entry.num_unfinished = entry.num_unfinished + 1 if is_of_machine else 0
        if entry.num_unfinished and self._loader is not None:
            pause_s = self._loader.settings.versions.load_timeout * 2.0 ** (entry.num_unfinished - 1)
            entry.next_try_at = time.monotonic() + min(pause_s, _LONGEST_PAUSE_S)
        if entry.hosted is None:
            entry.state = ModelState.REJECTED
        unexpected = error.__cause__ if isinstance(error, ServerError) else error
        _log.error("bundle rejected", bundle=path, reason=reason, exc_info=unexpected)
        self._report(path, "failed", reason=reason)
        return reason

    def _report(self, path: str, state: _Event, *, seconds: float | None = None, reason: str | None = None) -> None:
        name, _, version = path.partition("/")
        self._observer.model_changed(
            ModelEvent(model=ModelId(name=name, version=version), state=state, seconds=seconds, reason=reason)
        )

    @property
    def _drain_timeout_s(self) -> float:
        return 0.0 if self._loader is None else self._loader.settings.drain_timeout

    async def _run(self, change: Coroutine[Any, Any, _Result]) -> _Result:
        """Awaits a change; it continues if the caller stops waiting."""
        return await asyncio.shield(self._spawn(change))

    def _spawn(self, change: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Following the store

    @property
    def store_problem(self) -> str | None:
        """Reason why the last read of the store or the routes failed; None if it succeeded."""
        return (self._watch.problem if self._watch is not None else None) or self._routes_problem

    async def _poll(self, interval_s: float) -> None:
        while True:
            soon = self._num_settling > 0
            await asyncio.sleep(min(interval_s, _SETTLING_S) if soon else interval_s)
            try:
                await self._scan(is_asked_for=False)
            except StoreUnavailableError:  # logged where it was found
                continue
            except Exception:
                _log.exception("scanning the store failed; it is retried")

    async def _look(self) -> Look:
        if self._watch is None:
            raise StoreUnavailableError("the server has no store")
        num_changes = self._num_route_changes
        async with self._looking:
            look = await self._watch.look({path: entry.tried for path, entry in self._entries.items()})
        if num_changes == self._num_route_changes:  # otherwise the file may have been read before the write
            self._take_routes(look.routes)
        return look

    def _take_routes(self, routes: Routes | StoreError) -> None:
        """Applies the file of the routes if it has changed."""
        problem = str(routes) if isinstance(routes, StoreError) else None
        if problem and problem != self._routes_problem:
            _log.error("the routes stay as they are", reason=problem)
        self._routes_problem = problem
        if not isinstance(routes, StoreError) and routes != self._routes_in_file:
            self.routes = self._routes_in_file = routes
            _log.info("routes changed", routes=routes.model_dump(exclude_defaults=True))

    async def _scan(self, *, is_asked_for: bool) -> tuple[BundleStatus, ...]:
        """Loads and unloads bundles to match the store.

        Args:
            is_asked_for: True for an explicit request: then a bundle need not be seen twice before it is loaded.
        """
        async with self._scanning:
            before = {bundle.path: bundle for bundle in self.bundles}
            hosted = {path: entry.hosted for path, entry in self._entries.items()}
            look = await self._look()
            self._num_settling = 0
            for paths in _by_model(look.bundles):
                await self._follow_model(paths, look, is_asked_for=is_asked_for)
            for path in look.gone:
                self._note_gone(path)
            return tuple(
                bundle
                for bundle in self.bundles
                if before.get(bundle.path) != bundle or hosted.get(bundle.path) is not self._entries[bundle.path].hosted
            )

    async def _follow_model(self, paths: Sequence[str], look: Look, *, is_asked_for: bool) -> None:
        """Loads the versions of a model to be served, and unloads others when newer ones are ready.

        Args:
            paths: Paths of its bundles, the newest first.
            look: Content of the store.
            is_asked_for: See `_scan`.
        """
        num_ready = 0
        for path in paths:
            entry = self._entries.setdefault(path, _Entry(ModelState.AVAILABLE))
            is_wanted = self._is_wanted(path, entry, num_ready)
            is_at_work = self._overdue is not None and self._overdue[0] == path and not self._overdue[1].done()
            rests = is_asked_for or path in look.resting
            if (
                is_wanted
                and not is_at_work
                and self._is_due(entry, look.bundles[path], rests=rests, is_asked_for=is_asked_for)
            ):
                with suppress(BundleRejectedError, ModelNotFoundError):  # recorded in the entry
                    await self._replace(path)
            if entry.hosted is not None and not is_wanted:
                self._spawn(self._take_out(path, None))
            num_ready += entry.hosted is not None

    def _is_wanted(self, path: str, entry: _Entry, num_ready: int) -> bool:
        """True if a version is to be served beside `num_ready` newer ready ones."""
        if entry.is_asked_for is not None:
            return entry.is_asked_for
        assert self._loader is not None
        most = self._loader.settings.versions.max_versions
        return most is None or num_ready < most or self.routes.names(path)

    def _is_due(self, entry: _Entry, found: ListedBundle, *, rests: bool, is_asked_for: bool) -> bool:
        """True if a bundle is to be loaded now: changed since the last attempt, complete and no longer changing.

        An unchanged bundle is due if it was unloaded and is wanted again. After a failure of the machine it is due by
        request or after a delay.
        """
        if found.fingerprint is not None and found.fingerprint == entry.tried:
            if entry.num_unfinished:
                return is_asked_for or time.monotonic() >= entry.next_try_at
            return entry.state is ModelState.AVAILABLE
        if found.problem is not None:
            entry.reason = found.problem
            if entry.hosted is None:
                entry.state = ModelState.INCOMPLETE
            return False
        assert found.fingerprint is not None
        if entry.hosted is not None and entry.hosted.manifest == found.fingerprint.manifest:
            entry.tried, entry.reason = found.fingerprint, None  # the same files, copied again
            return False
        self._num_settling += not rests
        return rests

    def _note_gone(self, path: str) -> None:
        """Unloads a version whose folder was removed, unless a route or a call asked for it."""
        entry = self._entries[path]
        if entry.hosted is None:
            if entry.state not in (ModelState.LOADING, ModelState.UNLOADING):
                del self._entries[path]
        elif entry.is_asked_for or self.routes.names(path):
            entry.reason = "its folder was removed; it stays served because a route names it or a call loaded it"
        else:
            _log.info("the folder of a bundle was removed", bundle=path)
            self._spawn(self._take_out(path, None))

    # Running

    def start(self) -> None:
        """Starts every model; called with the event loop running."""
        self._is_started = True
        for model in self.models:
            model.start()
        if self._loader is not None and (interval_s := self._loader.settings.versions.poll_interval):
            self._polling = self._spawn(self._poll(interval_s))

    def close(self) -> bool:
        """Stops every model, including those being unloaded.

        Waiting inputs fail. Thread-safe. Returns True if every thread has ended.
        """
        self._is_closed = True
        if self._polling is not None:
            with suppress(RuntimeError):  # the loop and its task have ended
                self._polling.get_loop().call_soon_threadsafe(self._polling.cancel)
        models = [*self.models, *(hosted.model for hosted in list(self._leaving))]
        # The interpreter must not exit while a thread runs ONNX Runtime.
        loading = partial(join_threads, list(self._loading), owner="store")
        return close_together([*(model.close for model in models), loading])

    def serving(self, *, stall_timeout_s: float) -> set[Ability[Any]]:
        """Returns the abilities of tasks that have a healthy model."""
        return {
            ability
            for model in self.models
            if model.is_alive and (not stall_timeout_s or model.stalled_s() <= stall_timeout_s)
            for ability in self.families[task_of(model)].abilities
        }

    def unhealthy(self, *, stall_timeout_s: float) -> dict[str, str]:
        """Returns the problems of unhealthy models, by path.

        Unhealthy models ended by themselves, or made no progress for `stall_timeout_s` (0: no limit). A closed model is
        not among them.
        """
        found = {path_of(model): "has ended" for model in self.models if not model.is_alive}
        return found | (self.stalled(stall_timeout_s) if stall_timeout_s else {})

    def stalled(self, limit_s: float) -> dict[str, str]:
        """Returns the models without progress for `limit_s`, by path; thread-safe."""
        return {
            path_of(model): f"has made no progress for {stalled_s:.0f} s"
            for model in self.models
            if model.is_alive and (stalled_s := model.stalled_s()) > limit_s
        }

    def __repr__(self) -> str:
        return f"ModelHost({names_of(self.models)}; {len(self.rejected)} rejected)"


class _LoadingTurns:
    """Turns of the threads that load the bundles of a store at start: small ones together, a large one alone.

    A load checks the available memory before it takes its own.
    """

    def __init__(self, loader: BundleLoader) -> None:
        runtime = loader.runtime
        self.num_threads = runtime.num_threads if runtime.device == "cpu" else 1
        self.changing = threading.Lock()
        """Held while the host is changed."""
        self._store = loader.settings.store
        self._most_bytes = _SMALL_SHARE * (available_bytes(runtime.device) or 0)
        self._permits = threading.Semaphore(self.num_threads)
        self._taking = threading.Lock()

    @contextmanager
    def of(self, path: str) -> Iterator[None]:
        """Waits until the bundle at `path` may be loaded, and holds its turn."""
        count = 1 if self._is_small(path) else self.num_threads
        with self._taking:
            for _ in range(count):
                self._permits.acquire()
        try:
            yield
        finally:
            self._permits.release(count)

    def _is_small(self, path: str) -> bool:
        try:
            return sum(file.stat().st_size for file in (self._store / path).rglob("*")) < self._most_bytes
        except OSError:  # loading it says what is wrong
            return False


def _by_model(paths: Iterable[str]) -> list[list[str]]:
    """Returns the paths of each model's versions, the newest first."""
    models: dict[str, list[str]] = {}
    for path in sorted(paths, key=path_key):
        models.setdefault(path.partition("/")[0], []).insert(0, path)
    return list(models.values())


def _version_of(path: str) -> str:
    return path.partition("/")[2]


def _latest(name: str, paths: Iterable[str]) -> str:
    own = [path for path in paths if path.startswith(f"{name}/")]
    if not own:
        raise ModelNotFoundError(f"the store has no model {quoted(name)}")
    return _version_of(max(own, key=path_key))


def _check_name(field: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidInputError(field, f"is {quoted(name)}; it has 1 to 64 of a-z, 0-9, dot, underscore and hyphen")


def _reason(error: Exception, path: str, store: Path | None) -> str:
    """Returns the reason of a rejection without the store's path, which callers need not know."""
    if not isinstance(error, ServerError):  # its text may contain anything
        return "cannot be loaded; the server's log says why"
    return str(error).replace(f"{store}/", "").removeprefix(f"{path}: ")
