"""Which models are here: loading, unloading and replacing them while calls are answered, and finding one for a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar

import structlog

from headway_server.bundles import Task, find_bundles, open_bundle, version_key
from headway_server.errors import (
    BundleError,
    DrainingError,
    InvalidInputError,
    ModelNotFoundError,
    ServerError,
    StoreError,
    WrongTaskError,
    no_panics,
)
from headway_server.observers import NO_OBSERVER, ModelEvent, ModelId, Observer
from headway_server.runtime import Runtime
from headway_server.serving.calls import current_call
from headway_server.serving.families import FAMILIES, Family, ServedModel
from headway_server.settings import ServerSettings

_Result = TypeVar("_Result")
_Event: TypeAlias = Literal["loading", "ready", "unloading", "unloaded", "failed"]

_log = structlog.get_logger(__name__)


class ModelState(StrEnum):
    """What a bundle of the store is to the host."""

    LOADING = "loading"
    """It is being loaded for the first time."""
    READY = "ready"
    """Calls are answered. With a reason, loading a newer copy failed and the old one goes on."""
    UNLOADING = "unloading"
    """No new call finds it; those that use it are finished."""
    FAILED = "failed"
    """It was ready and has ended by itself: a bug or a broken machine."""
    REJECTED = "rejected"
    """It could not be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleStatus:
    """A bundle that the host knows of."""

    path: str
    """Below the store: `<model>/<version>`."""
    state: ModelState
    reason: str | None = None
    """Why it was rejected or has failed, or why a newer copy of it could not be loaded."""


@dataclass(slots=True, eq=False)
class _Hosted:
    """A loaded model and the calls that use it."""

    model: ServedModel
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


@dataclass(slots=True)
class _Entry:
    """What is known of a bundle."""

    state: ModelState
    hosted: _Hosted | None = None
    """Where it is ready."""
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleLoader:
    """Loads bundles of the store of some settings. May be used by any thread, by one at a time."""

    runtime: Runtime
    settings: ServerSettings
    families: Mapping[Task, Family] = field(default_factory=lambda: FAMILIES)

    def load(self, path: str, observer: Observer) -> ServedModel:
        """Loads the bundle in the folder `path` below the store; errors are those of its family's loader."""
        bundle = open_bundle(self.settings.store / path)
        manifest = bundle.manifest
        family = self.families.get(manifest.task)
        if family is None:
            raise BundleError(f"{bundle.path}: is for {manifest.task}, which this server does not serve")
        runtime = self.runtime.suiting(manifest, self.settings.precision)
        return family.load(bundle, runtime, self.settings, observer)


class ModelHost:
    """The models that calls are answered by. Belongs to the event loop once that is running.

    A call keeps the model it has found until it ends: a model that is unloaded or replaced is closed when the last of
    its calls has ended, or when their time is over.
    """

    def __init__(
        self,
        models: Iterable[ServedModel] = (),
        *,
        loader: BundleLoader | None = None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """Takes models that are loaded and not started.

        Args:
            models: The models.
            loader: Loads further ones; None where there are to be none.
            observer: Learns of every change.
        """
        self._loader = loader
        self._observer = observer
        self._entries: dict[str, _Entry] = {}
        self._leaving: set[_Hosted] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changing = asyncio.Lock()  # one at a time: each looks at how much memory there is
        self._is_started = self._is_closed = False
        self.models: tuple[ServedModel, ...] = ()
        """Those that calls can find, by name and version."""
        for model in models:
            self._put(_path(model), model)

    @classmethod
    def open(
        cls,
        runtime: Runtime,
        settings: ServerSettings,
        *,
        families: Mapping[Task, Family] = FAMILIES,
        observer: Observer = NO_OBSERVER,
    ) -> Self:
        """Loads every bundle of the settings' store; one that cannot be loaded is rejected and the others are served.

        Raises:
            StoreError: The store is missing, or none of its bundles can be loaded.
        """
        host = cls(loader=BundleLoader(runtime=runtime, settings=settings, families=families), observer=observer)
        for folder in find_bundles(settings.store):
            path = folder.relative_to(settings.store).as_posix()
            host._entries[path] = _Entry(ModelState.LOADING)
            try:
                with no_panics():
                    model = host._load(path)
            except Exception as error:  # one bad bundle must not keep the others from being served
                host._note_failure(path, error)
            else:
                host._put(path, model)
        if not host.models:
            reasons = "; ".join(f"{bundle.path}: {bundle.reason}" for bundle in host.rejected)
            raise StoreError(f"store {settings.store}: none of its bundles can be served: {reasons}")
        return host

    @property
    def bundles(self) -> tuple[BundleStatus, ...]:
        """Every bundle that the host knows of, by path."""
        return tuple(self._status(path, entry) for path, entry in sorted(self._entries.items()))

    @property
    def rejected(self) -> tuple[BundleStatus, ...]:
        """The bundles that could not be loaded, by path."""
        return tuple(bundle for bundle in self.bundles if bundle.state is ModelState.REJECTED)

    # Finding

    def find(self, task: Task, name: str, version: str) -> ServedModel:
        """Finds the model for a call.

        Args:
            task: What the call asks for.
            name: Of the model; empty for the only one that can.
            version: Of the model; empty for the latest one that can.

        Raises:
            InvalidInputError: The name is empty and several models can.
            ModelNotFoundError: There is no such model or version.
            WrongTaskError: The model, or every model, was made for something else.
        """
        return self._find(f"do {task}", lambda model: _task(model) is task, name, version)

    def find_translation(self, name: str, version: str, source_language: str, target_language: str) -> ServedModel:
        """Finds the model for a translation.

        Args:
            name: Of the model; empty for the only one that translates between the languages.
            version: Of the model; empty for the latest one.
            source_language: BCP 47 code of the texts; empty for the model's.
            target_language: BCP 47 code to translate to; empty for the model's.

        Raises:
            InvalidInputError: The name is empty and several models can; or a language is not one of the model's.
            ModelNotFoundError: There is no such model or version.
            WrongTaskError: The model, or every model, was made for something else.
        """
        candidates = [model for model in self.models if _task(model) is Task.TRANSLATION]
        matching = [model for model in candidates if _wrong_language(model, source_language, target_language) is None]
        if not name and candidates and not matching:
            name = candidates[0].bundle.manifest.name  # which has the wrong languages, and the error below says which
        model = self._find(
            f"do {Task.TRANSLATION}", candidates.__contains__, name, version, prefers=matching.__contains__
        )
        if wrong := _wrong_language(model, source_language, target_language):
            value = source_language if wrong == "source_language" else target_language
            raise InvalidInputError(
                wrong, f"is {_quoted(value)}, for which there is no such model; loaded are {_pairs(candidates)}"
            )
        return model

    def find_embedder(self, tasks: Sequence[Task], nouns: str, name: str, version: str) -> ServedModel:
        """Finds the model for a call that asks for embeddings; errors are those of `find`.

        Args:
            tasks: What models that read such inputs are made for; the first of them that has one is preferred.
            nouns: What the inputs are, for messages: texts, or images.
            name: Of the model; empty for the only one of the preferred task that gives embeddings.
            version: Of the model; empty for the latest one that does.
        """
        by_task = [[m for m in self.models if _task(m) is task and m.bundle.manifest.embedding] for task in tasks]
        return self._find(
            f"embed {nouns}",
            list(chain.from_iterable(by_task)).__contains__,
            name,
            version,
            prefers=next(filter(None, by_task), []).__contains__,
        )

    def get(self, name: str, version: str) -> ServedModel:
        """Finds a model by its name, whatever its task; without a version, the latest one.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        model = self._get(name, version)
        self._note_use(model)
        return model

    def _find(
        self,
        ability: str,
        can: Callable[[ServedModel], bool],
        name: str,
        version: str,
        *,
        prefers: Callable[[ServedModel], bool] = lambda _: True,
    ) -> ServedModel:
        """Finds a model that can do something.

        Args:
            ability: What it must be able to do, for messages, such as "embed texts".
            can: Says whether a model can.
            name: Of the model; empty for the only preferred one.
            version: Of the model; empty for the latest one that can.
            prefers: Says of a model that can whether it is one to take where none is named.
        """
        capable = [model for model in self.models if can(model)]
        if not name:
            names = list(dict.fromkeys(model.bundle.manifest.name for model in filter(prefers, capable)))
            if not names:
                raise WrongTaskError(f"no loaded model can {ability}; loaded are {_names(self.models)}")
            if len(names) > 1:
                raise InvalidInputError(
                    "model", f"is empty and several models can {ability}; name one of {_names(capable)}"
                )
            [name] = names
        model = self._get(name, version)
        if not version:  # an older version may do what the latest was not made for
            model = next((other for other in reversed(capable) if other.bundle.manifest.name == name), model)
        if model not in capable:
            advice = f"ask {_names(capable)}" if capable else "no loaded model can"
            raise WrongTaskError(f"model {_path(model)} is for {_task(model)} and cannot {ability}; {advice}")
        self._note_use(model)
        return model

    def _get(self, name: str, version: str) -> ServedModel:
        versions = [model for model in self.models if model.bundle.manifest.name == name]
        if not versions:
            raise ModelNotFoundError(f"model {_quoted(name)} is not loaded; loaded are {_names(self.models)}")
        if not version:
            return versions[-1]
        for model in versions:
            if model.bundle.manifest.version == version:
                return model
        have = ", ".join(model.bundle.manifest.version for model in versions)
        raise ModelNotFoundError(f"model {name} has no version {_quoted(version)}; loaded are {have}")

    def _note_use(self, model: ServedModel) -> None:
        """Keeps a model open until the call that has found it ends."""
        call, hosted = current_call(), self._entries[_path(model)].hosted
        if call is not None and hosted is not None:
            hosted.take()
            call.callbacks.append(hosted.leave)

    # Changing

    async def load(self, name: str, version: str) -> ServedModel:
        """Loads a bundle of the store, in a thread, while others are served; returns it ready.

        Where the model is loaded already it is replaced by what is in the store now: calls that have found the old one
        keep it, new calls find the new one, and no call fails. Both are in memory until the old one is closed. Goes on
        to its end even if the caller stops waiting.

        Raises:
            BundleError: It cannot be loaded. What was loaded before goes on; `bundles` keeps the reason.
            DrainingError: The host was closed meanwhile.
            RuntimeUnavailableError: There is no variant that can be run here, or it does not fit into memory.
            StoreError: This host has no store.
        """
        return await self._run(self._replace(f"{name}/{version}"))

    async def unload(self, name: str, version: str, *, timeout_s: float | None = None) -> None:
        """Takes a model out, and closes it when the calls that use it have ended. A rejected bundle is forgotten.

        Args:
            name: Of the model.
            version: Of the model.
            timeout_s: Seconds that these calls have; then they fail. None: as many as the settings give to a drain.

        Raises:
            ModelNotFoundError: There is no such model.
        """
        await self._run(self._take_out(f"{name}/{version}", timeout_s))

    async def _replace(self, path: str) -> ServedModel:
        async with self._changing:
            entry = self._entries.get(path)
            if entry is None or entry.hosted is None:
                self._entries[path] = _Entry(ModelState.LOADING)
            try:
                with no_panics():
                    model = await asyncio.to_thread(self._load, path)
            except Exception as error:
                reason = self._note_failure(path, error)
                if isinstance(error, ServerError):
                    raise
                raise BundleError(f"{path}: {reason}") from error
            if self._is_closed:
                await asyncio.to_thread(model.close)
                raise DrainingError("the server is shutting down; nothing is loaded any more")
            model.start()
            old = self._entries[path].hosted
            self._put(path, model)
        if old is not None:
            self._spawn(self._close_when_idle(old, path, self._drain_timeout_s))
        return model

    async def _take_out(self, path: str, timeout_s: float | None) -> None:
        async with self._changing:
            entry = self._entries.get(path)
            if entry is None:
                raise ModelNotFoundError(f"model {_quoted(path)} is not here; loaded are {_names(self.models)}")
            hosted, entry.hosted = entry.hosted, None
            if hosted is None:
                del self._entries[path]
                return
            entry.state = ModelState.UNLOADING
            self._list_models()
            self._report(path, "unloading")
        await self._close_when_idle(hosted, path, self._drain_timeout_s if timeout_s is None else timeout_s)
        if self._entries.get(path) is entry:  # it may have been loaded anew meanwhile
            del self._entries[path]

    async def _close_when_idle(self, hosted: _Hosted, path: str, timeout_s: float) -> None:
        """Closes a model that no new call finds."""
        self._leaving.add(hosted)
        try:
            async with asyncio.timeout(timeout_s):
                await hosted.idle.wait()
        except TimeoutError:
            _log.warning("closing a model that calls still use", model=path, running_calls=hosted.num_calls)
        await asyncio.to_thread(hosted.model.close)
        self._leaving.discard(hosted)
        self._report(path, "unloaded")
        _log.info("model unloaded", model=path)

    def _load(self, path: str) -> ServedModel:
        """Loads a bundle, in whichever thread this is."""
        if self._loader is None:
            raise StoreError(f"{path}: this server was started without a store to load it from")
        self._report(path, "loading")
        began = time.monotonic()
        model = self._loader.load(path, self._observer)
        seconds = time.monotonic() - began
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
        return model

    def _put(self, path: str, model: ServedModel) -> None:
        self._entries[path] = _Entry(ModelState.READY, hosted=_Hosted(model))
        self._list_models()

    def _list_models(self) -> None:
        models = (entry.hosted.model for entry in self._entries.values() if entry.hosted is not None)
        self.models = tuple(sorted(models, key=_name_and_version))

    def _status(self, path: str, entry: _Entry) -> BundleStatus:
        if self._is_started and entry.hosted is not None and not entry.hosted.model.is_alive:
            return BundleStatus(path=path, state=ModelState.FAILED, reason="has ended by itself; the log says why")
        return BundleStatus(path=path, state=entry.state, reason=entry.reason)

    def _note_failure(self, path: str, error: Exception) -> str:
        """Keeps and logs the reason why a bundle could not be loaded, and returns it."""
        reason = _reason(error, path, None if self._loader is None else self._loader.settings.store)
        entry = self._entries[path]
        entry.reason = reason
        if entry.hosted is None:
            entry.state = ModelState.REJECTED
        unexpected = None if isinstance(error, ServerError) else error
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
        """Waits for a change, which is made even if the caller stops waiting."""
        return await asyncio.shield(self._spawn(change))

    def _spawn(self, change: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Running

    def start(self) -> None:
        """Starts every model; called with the event loop running."""
        self._is_started = True
        for model in self.models:
            model.start()

    def close(self) -> bool:
        """Stops every model, those too that are being unloaded; what still waits for one fails.

        May be called from any thread. True if every thread has ended.
        """
        self._is_closed = True
        models = [*self.models, *(hosted.model for hosted in list(self._leaving))]
        return not [model for model in models if not model.close()]

    def serving(self, *, stall_timeout_s: float) -> set[Task]:
        """Returns the tasks that a healthy model is ready for."""
        return {
            _task(model)
            for model in self.models
            if model.is_alive and (not stall_timeout_s or model.stalled_s() <= stall_timeout_s)
        }

    def ailing(self, *, stall_timeout_s: float) -> dict[str, str]:
        """Returns what is wrong with models that ought to answer calls, by path.

        These have ended by themselves, or their work has made no progress for longer than `stall_timeout_s` (0: any
        time is fine). A model that was closed on purpose is not among them.
        """
        found = {}
        for model in self.models:
            if not model.is_alive:
                found[_path(model)] = "has ended"
            elif stall_timeout_s and (stalled_s := model.stalled_s()) > stall_timeout_s:
                found[_path(model)] = f"has made no progress for {stalled_s:.0f} s"
        return found

    def __repr__(self) -> str:
        return f"ModelHost({_names(self.models)}; {len(self.rejected)} rejected)"


def _reason(error: Exception, path: str, store: Path | None) -> str:
    """Says why a bundle cannot be loaded; where the store lies is not the business of those who list models."""
    if not isinstance(error, ServerError):  # its text may hold anything
        return "cannot be loaded; the server's log says why"
    return str(error).removeprefix(f"{store}/{path}: ").replace(f"{store}/", "")


def _task(model: ServedModel) -> Task:
    return model.bundle.manifest.task


def _path(model: ServedModel) -> str:
    """Returns where the bundle of a model is below its store."""
    return f"{model.bundle.manifest.name}/{model.bundle.manifest.version}"


def _name_and_version(model: ServedModel) -> tuple[str, tuple[tuple[int, int, str], ...]]:
    return model.bundle.manifest.name, version_key(model.bundle.manifest.version)


def _wrong_language(model: ServedModel, source: str, target: str) -> str | None:
    """Returns the field of a request that asks for a language the model does not have; None where there is none."""
    languages = model.bundle.manifest.languages
    assert languages is not None  # the manifest's own check
    if source and source.lower() != languages.source.lower():
        return "source_language"
    if target and target.lower() != languages.target.lower():
        return "target_language"
    return None


def _names(models: Iterable[ServedModel]) -> str:
    return ", ".join(dict.fromkeys(model.bundle.manifest.name for model in models)) or "none"


def _pairs(models: Iterable[ServedModel]) -> str:
    return ", ".join(
        f"{manifest.name} ({manifest.languages.source} to {manifest.languages.target})"
        for manifest in (model.bundle.manifest for model in models)
        if manifest.languages is not None
    )


def _quoted(text: str) -> str:
    """Quotes what a caller sent, but not all of it."""
    return repr(text if len(text) <= 64 else text[:64] + "…")
