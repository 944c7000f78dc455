"""The models that are loaded, and finding the one a call is for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

import structlog

from headway_server.bundles import Task, find_bundles, open_bundle, version_key
from headway_server.errors import (
    BundleError,
    HeadwayError,
    InvalidInputError,
    ModelNotFoundError,
    RuntimeUnavailableError,
    StoreError,
    WrongTaskError,
)
from headway_server.runtime import Runtime
from headway_server.serving.families import LOADERS, ServedModel
from headway_server.settings import ServerSettings

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedBundle:
    """A bundle that could not be loaded."""

    path: str
    """Below the store."""
    reason: str


class ModelRegistry:
    """The models of a store."""

    def __init__(self, models: Iterable[ServedModel], rejected: Sequence[RejectedBundle] = ()) -> None:
        self.models: tuple[ServedModel, ...] = tuple(sorted(models, key=_name_and_version))
        """By name and version."""
        self.rejected = tuple(rejected)

    @classmethod
    def load(cls, runtime: Runtime, settings: ServerSettings) -> Self:
        """Loads every bundle of the store; one that cannot be loaded is told in the log and in `rejected`.

        Raises:
            RuntimeUnavailableError: A bundle lacks what was asked for: a precision, or a variant that runs on CUDA.
            StoreError: The store is missing, or none of its bundles can be loaded.
        """
        models: list[ServedModel] = []
        rejected: list[RejectedBundle] = []
        for folder in find_bundles(settings.store):
            path = folder.relative_to(settings.store).as_posix()
            try:
                models.append(_load_bundle(folder, runtime, settings))
            except RuntimeUnavailableError:  # what was asked for is not there: not the bundle's fault
                raise
            except Exception as error:  # one bad bundle must not keep the others from being served
                reason = _reason(error, folder, settings.store)
                rejected.append(RejectedBundle(path=path, reason=reason))
                unexpected = None if isinstance(error, HeadwayError) else error
                _log.error("bundle rejected", bundle=path, reason=reason, exc_info=unexpected)
        if not models:
            reasons = "; ".join(f"{bundle.path}: {bundle.reason}" for bundle in rejected)
            raise StoreError(f"store {settings.store}: none of its bundles can be served: {reasons}")
        return cls(models, rejected)

    def find(self, task: Task, name: str, version: str) -> ServedModel:
        """Finds the model for a call.

        Args:
            task: What the call asks for.
            name: Of the model; empty for the only one that can.
            version: Of the model; empty for the latest one loaded.

        Raises:
            InvalidInputError: The name is empty and several models can.
            ModelNotFoundError: There is no such model or version.
            WrongTaskError: The model, or every model, was made for something else.
        """
        capable = self._with_task(task)
        name = name or self._only_name(task, capable)
        model = self.get(name, version)
        if not version:  # an older version may do what the latest was not made for
            model = next((other for other in reversed(capable) if other.bundle.manifest.name == name), model)
        if model.bundle.manifest.task is not task:
            raise WrongTaskError(
                f"model {name}/{model.bundle.manifest.version} is for {model.bundle.manifest.task} and cannot do "
                f"{task}; {self._advice(task)}"
            )
        return model

    def find_translation(self, name: str, version: str, source_language: str, target_language: str) -> ServedModel:
        """Finds the model for a translation.

        Args:
            name: Of the model; empty for the only one that translates between the languages.
            version: Of the model; empty for the latest one loaded.
            source_language: BCP 47 code of the texts; empty for the model's.
            target_language: BCP 47 code to translate to; empty for the model's.

        Raises:
            InvalidInputError: The name is empty and several models can; or a language is not one of the model's.
            ModelNotFoundError: There is no such model or version.
            WrongTaskError: The model, or every model, was made for something else.
        """
        candidates = self._with_task(Task.TRANSLATION)
        if not name and candidates:
            matching = [
                model for model in candidates if _wrong_language(model, source_language, target_language) is None
            ]
            # Where no model translates between them, the error below names the field and what there is.
            name = self._only_name(Task.TRANSLATION, matching or candidates[:1])
        model = self.find(Task.TRANSLATION, name, version)
        if field := _wrong_language(model, source_language, target_language):
            value = source_language if field == "source_language" else target_language
            raise InvalidInputError(
                field, f"is {_quoted(value)}, for which there is no such model; loaded are {_pairs(candidates)}"
            )
        return model

    def find_embedder(self, tasks: Sequence[Task], nouns: str, name: str, version: str) -> ServedModel:
        """Finds the model for a call that asks for embeddings; errors are those of `find`.

        Args:
            tasks: What models that read such inputs are made for; those of the first go before those of the next.
            nouns: What the inputs are, for messages: texts, or images.
            name: Of the model; empty for the only one of the first of these tasks that offers embeddings.
            version: Of the model; empty for the latest one loaded that does.
        """
        by_task = [[model for model in self._with_task(task) if model.bundle.manifest.embedding] for task in tasks]
        capable = list(chain.from_iterable(by_task))
        if not name:
            first = next(filter(None, by_task), [])
            names = list(dict.fromkeys(model.bundle.manifest.name for model in first))
            if not names:
                raise WrongTaskError(f"no loaded model offers embeddings of {nouns}; loaded are {_names(self.models)}")
            if len(names) > 1:
                raise InvalidInputError(
                    "model", f"is empty and several models offer embeddings of {nouns}; name one of {_names(capable)}"
                )
            name = names[0]
        model = self.get(name, version)
        if not version:
            model = next((other for other in reversed(capable) if other.bundle.manifest.name == name), model)
        if model not in capable:
            advice = f"ask {_names(capable)}" if capable else "no loaded model does"
            raise WrongTaskError(
                f"model {name}/{model.bundle.manifest.version} offers no embeddings of {nouns}; {advice}"
            )
        return model

    def get(self, name: str, version: str) -> ServedModel:
        """Finds a model by its name, whatever its task; without a version, the latest one loaded.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
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

    def start(self) -> None:
        """Starts every model; called with the event loop running."""
        for model in self.models:
            model.start()

    async def drain(self, timeout_s: float) -> None:
        """Has every model take nothing new and waits, at most `timeout_s`, for what was taken."""
        await asyncio.gather(*(model.drain(timeout_s) for model in self.models))

    def close(self) -> None:
        """Stops every model. May be called from any thread and waits for the steps that run."""
        for model in self.models:
            model.close()

    def tasks(self) -> set[Task]:
        """Returns what the models that are alive can do."""
        return {model.bundle.manifest.task for model in self.models if model.is_alive}

    def ended(self) -> list[ServedModel]:
        """Returns the models that are not alive; once all have been started, these have ended by themselves."""
        return [model for model in self.models if not model.is_alive]

    def _with_task(self, task: Task) -> list[ServedModel]:
        return [model for model in self.models if model.bundle.manifest.task is task]

    def _only_name(self, task: Task, candidates: Sequence[ServedModel]) -> str:
        """Returns the name that all candidates share."""
        names = {model.bundle.manifest.name for model in candidates}
        if not names:
            raise WrongTaskError(f"no loaded model can do {task}; loaded are {_names(self.models)}")
        if len(names) > 1:
            raise InvalidInputError(
                "model", f"is empty and several models can do {task}; name one of {_names(candidates)}"
            )
        return names.pop()

    def _advice(self, task: Task) -> str:
        capable = self._with_task(task)
        return f"ask {_names(capable)}" if capable else "no loaded model can"

    def __repr__(self) -> str:
        return f"ModelRegistry({_names(self.models)}; {len(self.rejected)} rejected)"


def _load_bundle(folder: Path, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    bundle = open_bundle(folder)
    loader = LOADERS.get(bundle.manifest.task)
    if loader is None:
        raise BundleError(f"{folder}: is for {bundle.manifest.task}, which this server does not serve yet")
    began = time.monotonic()
    model = loader(bundle, runtime.suiting(bundle.manifest, settings.precision), settings)
    _log.info(
        "model loaded",
        model=bundle.manifest.name,
        version=bundle.manifest.version,
        task=bundle.manifest.task.value,
        variant=model.precision.value,
        device=model.device,
        seconds=round(time.monotonic() - began, 3),
    )
    return model


def _reason(error: Exception, folder: Path, store: Path) -> str:
    """Says what is wrong with a bundle; where the store lies is not the business of those who list models."""
    if not isinstance(error, HeadwayError):  # nobody has looked at what its text tells
        return "cannot be loaded; the server's log says why"
    return str(error).removeprefix(f"{folder}: ").replace(f"{store}/", "")


def _name_and_version(model: ServedModel) -> tuple[str, tuple[tuple[int, int, str], ...]]:
    return model.bundle.manifest.name, version_key(model.bundle.manifest.version)


def _wrong_language(model: ServedModel, source: str, target: str) -> str | None:
    """Returns the field of a request that asks for a language the model does not have."""
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
