"""Finding the loaded model that answers a call, by what it can do, its name, its version and its route."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from headway_server.bundles import Task
from headway_server.errors import InvalidInputError, ModelNotFoundError, WrongTaskError
from headway_server.observers import Call, ModelId, current_call
from headway_server.serving.families import ServedModel
from headway_server.serving.routes import Routes


class ModelFinder(ABC):
    """The models that calls can find. Belongs to the event loop."""

    models: tuple[ServedModel, ...] = ()
    """Those that calls can find, by name and version."""
    routes: Routes
    """Which version answers a call that names none."""

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
        return self._find(f"do {task}", lambda model: task_of(model) is task, name, version)

    def find_translation(self, name: str, version: str, source_language: str, target_language: str) -> ServedModel:
        """Finds the model for a translation.

        Args:
            name: Of the model; empty for the only one that translates between the languages.
            version: Of the model; empty for the latest one.
            source_language: BCP 47 code of the texts; empty for the model's.
            target_language: BCP 47 code to translate to; empty for the model's, which is asked for again if it has
                several.

        Raises:
            InvalidInputError: The name is empty and several models can; or a language is not one of the model's.
            ModelNotFoundError: There is no such model or version.
            WrongTaskError: The model, or every model, was made for something else.
        """
        candidates = [model for model in self.models if task_of(model) is Task.TRANSLATION]
        matching = [model for model in candidates if _wrong_language(model, source_language, target_language) is None]
        if not name and candidates and not matching:
            name = candidates[0].bundle.manifest.name  # which has the wrong languages, and the error below says which
        model = self._find(
            f"do {Task.TRANSLATION}", candidates.__contains__, name, version, prefers=matching.__contains__
        )
        if wrong := _wrong_language(model, source_language, target_language):
            value = source_language if wrong == "source_language" else target_language
            raise InvalidInputError(
                wrong, f"is {quoted(value)}, for which there is no such model; loaded are {_pairs(candidates)}"
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
        by_task = [[m for m in self.models if task_of(m) is task and m.bundle.manifest.embedding] for task in tasks]
        return self._find(
            f"embed {nouns}",
            list(chain.from_iterable(by_task)).__contains__,
            name,
            version,
            prefers=next(filter(None, by_task), []).__contains__,
        )

    def find_in_space(
        self, name: str, version: str, *, ability: str, task: Task = Task.IMAGE_EMBEDDING
    ) -> tuple[ServedModel, ServedModel]:
        """Finds the models for a call that compares images and texts; errors are those of `find`.

        Args:
            name: Of the model of `task`; empty for the only one that has a partner in its space.
            version: Of that model; empty for the latest one.
            ability: What the two are asked for, for messages.
            task: `image_embedding` or `text_embedding`; the partner is of the other one.

        Returns:
            The model of `task`, and its partner.
        """
        other = Task.TEXT_EMBEDDING if task is Task.IMAGE_EMBEDDING else Task.IMAGE_EMBEDDING
        partners = {space: model for model in self.models if (space := _space(model, other))}
        nouns = "texts" if other is Task.TEXT_EMBEDDING else "images"
        model = self._find(
            f"{ability}, as no model of {nouns} in its space is loaded",
            lambda one: _space(one, task) in partners,
            name,
            version,
        )
        partner = partners[_space(model, task)]
        self._hold(partner)
        return model, partner

    def find_inspected(self, tasks: Sequence[Task], name: str, version: str) -> ServedModel:
        """Finds the model for a call that asks what it attends to; errors are those of `find`.

        Args:
            tasks: What models that read such inputs are made for; the first of them that has one is preferred.
            name: Of the model; empty for the only one of the preferred task whose bundle has the graph for it.
            version: Of the model; empty for the latest one.
        """
        able = [[m for m in self.models if task_of(m) is task and _shows_attention(m)] for task in tasks]
        return self._find(
            "show what it attends to in such an input",
            lambda model: task_of(model) in tasks,
            name,
            version,
            prefers=next(filter(None, able), []).__contains__,
        )

    def get(self, name: str, version: str) -> ServedModel:
        """Finds a model by its name or alias, whatever its task; without a version, the default one.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        model = self.peek(name, version)
        self._note_use(model)
        return model

    def find_named(self, name: str, version: str) -> ServedModel:
        """Finds the model for a call that names it, whatever its task; without a version, as its route says.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        model = self._named(*self.routes.resolve(name, version), self.models)
        self._note_use(model)
        return model

    def peek(self, name: str, version: str) -> ServedModel:
        """Returns what `get` finds, for a look that is no call of the model.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        return self._named(*self.routes.resolve(name, version))

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
        name, version = self.routes.resolve(name, version)
        if not name:
            names = list(dict.fromkeys(model.bundle.manifest.name for model in filter(prefers, capable)))
            if not names:
                raise WrongTaskError(f"no loaded model can {ability}; loaded are {names_of(self.models)}")
            if len(names) > 1:
                raise InvalidInputError(
                    "model", f"is empty and several models can {ability}; name one of {names_of(capable)}"
                )
            [name] = names
        model = self._named(name, version, capable)
        if model not in capable:
            advice = f"ask {names_of(capable)}" if capable else "no loaded model can"
            raise WrongTaskError(f"model {path_of(model)} is for {task_of(model)} and cannot {ability}; {advice}")
        self._note_use(model)
        return model

    def _named(self, name: str, version: str, capable: Sequence[ServedModel] | None = None) -> ServedModel:
        """Returns a version of a model.

        Args:
            name: Of the model, not an alias.
            version: Of the model; empty for one that its route chooses.
            capable: Models to choose from where no version is named, if some of these versions are among them: an older
                version may do what the latest was not made for. None: nobody calls it, and the canary is not chosen.
        """
        versions = [model for model in self.models if model.bundle.manifest.name == name]
        if not versions:
            raise ModelNotFoundError(f"model {quoted(name)} is not loaded; loaded are {names_of(self.models)}")
        if not version:
            choices = [model for model in versions if capable is None or model in capable] or versions
            names = [model.bundle.manifest.version for model in choices]
            return choices[names.index(self.routes.choose(name, names, with_canary=capable is not None))]
        for model in versions:
            if model.bundle.manifest.version == version:
                return model
        have = ", ".join(model.bundle.manifest.version for model in versions)
        raise ModelNotFoundError(f"model {name} has no version {quoted(version)}; loaded are {have}")

    def _note_use(self, model: ServedModel) -> None:
        """Takes a model for the present call, as the one that answers it."""
        call, manifest = current_call(), model.bundle.manifest
        self._hold(model)
        if call is not None:
            call.model = ModelId(manifest.name, manifest.version)

    def _hold(self, model: ServedModel) -> None:
        """Checks that the present call may use a model, and keeps it open until that call ends."""
        call = current_call()
        if call is None:
            return
        if call.rights is not None:
            call.rights.check_model(task_of(model), model.bundle.manifest.name)
        self._keep_open(model, call)

    @abstractmethod
    def _keep_open(self, model: ServedModel, call: Call) -> None:
        """Has a model stay open until a call ends."""


def task_of(model: ServedModel) -> Task:
    """Returns what a model was made for."""
    return model.bundle.manifest.task


def path_of(model: ServedModel) -> str:
    """Returns where the bundle of a model is below its store."""
    return f"{model.bundle.manifest.name}/{model.bundle.manifest.version}"


def names_of(models: Iterable[ServedModel]) -> str:
    """Lists the names of models, each once, for messages."""
    return ", ".join(dict.fromkeys(model.bundle.manifest.name for model in models)) or "none"


def quoted(text: str) -> str:
    """Quotes what a caller sent, but not all of it."""
    return repr(text if len(text) <= 64 else text[:64] + "…")


def _shows_attention(model: ServedModel) -> bool:
    return "attention" in model.bundle.manifest.variants[model.precision].graphs


def _space(model: ServedModel, task: Task) -> str:
    """Name of the space of a model for a task; empty for models of other tasks and those without one."""
    embedding = model.bundle.manifest.embedding
    return embedding.space.name if task_of(model) is task and embedding and embedding.space else ""


def _wrong_language(model: ServedModel, source: str, target: str) -> str | None:
    """Returns the field of a request that asks for a language the model does not have; None where there is none."""
    languages = model.bundle.manifest.languages
    assert languages is not None  # the manifest's own check
    if source and languages.match(source, languages.sources) is None:
        return "source_language"
    if target and languages.match(target, languages.targets) is None:
        return "target_language"
    return None


def _pairs(models: Iterable[ServedModel]) -> str:
    return ", ".join(
        f"{manifest.name} ({manifest.languages})"
        for manifest in (model.bundle.manifest for model in models)
        if manifest.languages is not None
    )
