"""Finding the loaded model that answers a call, by what it can do, its name, its version and its route."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from headway_server.bundles import Bundle, Precision, Task
from headway_server.errors import InvalidInputError, ModelNotFoundError, WrongTaskError
from headway_server.observers import Call, ModelId, current_call
from headway_server.serving.abilities import Ability, PairAbility, space_of
from headway_server.serving.families import Families, has_ability, served_families, tasks_with
from headway_server.serving.routes import Routes


class Findable(Protocol):
    """What is known of a model that calls can find."""

    @property
    def bundle(self) -> Bundle:
        """Its bundle."""

    @property
    def precision(self) -> Precision:
        """In which it runs."""


ModelT = TypeVar("ModelT", bound=Findable)


class ModelFinder(ABC, Generic[ModelT]):
    """The models that calls can find. Belongs to the event loop."""

    models: tuple[ModelT, ...] = ()
    """Those that calls can find, by name and version."""
    routes: Routes
    """Which version answers a call that names none."""

    @property
    def families(self) -> Families:
        """What models of each task can do."""
        return served_families()

    def find(self, ability: Ability[Any], name: str, version: str) -> ModelT:
        """Finds the model for a call.

        Args:
            ability: What the call asks for.
            name: Of the model; empty for the only one to take.
            version: Of the model; empty for the latest one that can.

        Raises:
            InvalidInputError: The name is empty and there are several models to take.
            ModelNotFoundError: There is no such model or version.
            WrongTaskError: The model, or every model, was made for something else.
        """
        capable = self._capable(ability)
        return self._find(ability, ability.words, capable, name, version)

    def find_translation(
        self, ability: Ability[Any], name: str, version: str, source_language: str, target_language: str
    ) -> ModelT:
        """Finds the model for a translation.

        Args:
            ability: To translate.
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
        candidates = self._capable(ability)
        matching = [model for model in candidates if _wrong_language(model, source_language, target_language) is None]
        if not name and candidates and not matching:
            name = candidates[0].bundle.manifest.name  # which has the wrong languages, and the error below says which
        model = self._find(ability, ability.words, candidates, name, version, among=matching)
        if wrong := _wrong_language(model, source_language, target_language):
            value = source_language if wrong == "source_language" else target_language
            raise InvalidInputError(
                wrong, f"is {quoted(value)}, for which there is no such model; loaded are {_pairs(candidates)}"
            )
        return model

    def find_pair(self, ability: PairAbility[Any, Any], name: str, version: str) -> tuple[ModelT, ModelT]:
        """Finds the two models in one space for a call that compares images and texts; errors are those of `find`.

        Args:
            ability: What the call asks for.
            name: Of the model that has it; empty for the only one that has a partner in its space.
            version: Of that model; empty for the latest one.

        Returns:
            The model that has the ability, and its partner.
        """
        partners = {
            space: model
            for model in self._capable(ability.partner)
            if ability.partner in self.families[task_of(model)].made_for and (space := space_of(model.bundle.manifest))
        }
        capable = [model for model in self._capable(ability) if space_of(model.bundle.manifest) in partners]
        words = f"{ability.words}, as no model that can {ability.partner.words} in its space is loaded"
        model = self._find(ability, words, capable, name, version)
        partner = partners[space_of(model.bundle.manifest)]
        self._hold(partner)
        return model, partner

    def get(self, name: str, version: str) -> ModelT:
        """Finds a model by its name or alias, whatever its task; without a version, the default one.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        model = self.peek(name, version)
        self._note_use(model)
        return model

    def find_named(self, name: str, version: str) -> ModelT:
        """Finds the model for a call that names it, whatever its task; without a version, as its route says.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        model = self._named(*self.routes.resolve(name, version), self.models)
        self._note_use(model)
        return model

    def peek(self, name: str, version: str) -> ModelT:
        """Returns what `get` finds, for a look that is no call of the model.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        return self._named(*self.routes.resolve(name, version))

    def _capable(self, ability: Ability[Any]) -> list[ModelT]:
        """Returns the models that have an ability, given a partner."""
        families = self.families
        return [model for model in self.models if has_ability(families, model.bundle.manifest, ability)]

    def _preferred(self, ability: Ability[Any], models: Sequence[ModelT]) -> list[ModelT]:
        """Returns the models from which a call takes one that names none: those of the first task that has any."""
        taken = [model for model in models if ability.prefers(model.bundle.manifest, model.precision)]
        by_task = ([model for model in taken if task_of(model) == task] for task in tasks_with(self.families, ability))
        return next(filter(None, by_task), [])

    def _find(
        self,
        ability: Ability[Any],
        words: str,
        capable: Sequence[ModelT],
        name: str,
        version: str,
        *,
        among: Sequence[ModelT] | None = None,
    ) -> ModelT:
        """Finds a model that can do something.

        Args:
            ability: What it must be able to do.
            words: The same for messages, such as "embed texts".
            capable: The models that can.
            name: Of the model; empty for the only one to take.
            version: Of the model; empty for the latest one that can.
            among: Those of the capable ones from which a call that names none takes its model; None: all.
        """
        name, version = self.routes.resolve(name, version)
        if not name:
            names = list(dict.fromkeys(map(_name_of, self._preferred(ability, capable if among is None else among))))
            if not names:
                raise WrongTaskError(f"no loaded model can {words}; loaded are {names_of(self.models)}")
            if len(names) > 1:
                raise InvalidInputError(
                    "model", f"is empty and several models can {words}; name one of {names_of(capable)}"
                )
            [name] = names
        model = self._named(name, version, capable)
        if model not in capable:
            advice = f"ask {names_of(capable)}" if capable else "no loaded model can"
            raise WrongTaskError(f"model {path_of(model)} is for {task_of(model)} and cannot {words}; {advice}")
        self._note_use(model)
        return model

    def _named(self, name: str, version: str, capable: Sequence[ModelT] | None = None) -> ModelT:
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

    def _note_use(self, model: ModelT) -> None:
        """Takes a model for the present call, as the one that answers it."""
        call, manifest = current_call(), model.bundle.manifest
        self._hold(model)
        if call is not None:
            call.model = ModelId(manifest.name, manifest.version)

    def _hold(self, model: ModelT) -> None:
        """Checks that the present call may use a model, and keeps it open until that call ends."""
        call = current_call()
        if call is None:
            return
        if call.rights is not None:
            call.rights.check_model(task_of(model), model.bundle.manifest.name)
        self._keep_open(model, call)

    @abstractmethod
    def _keep_open(self, model: ModelT, call: Call) -> None:
        """Has a model stay open until a call ends."""


def task_of(model: Findable) -> Task:
    """Returns what a model was made for."""
    return model.bundle.manifest.task


def path_of(model: Findable) -> str:
    """Returns where the bundle of a model is below its store."""
    return f"{model.bundle.manifest.name}/{model.bundle.manifest.version}"


def names_of(models: Iterable[Findable]) -> str:
    """Lists the names of models, each once, for messages."""
    return ", ".join(dict.fromkeys(model.bundle.manifest.name for model in models)) or "none"


def quoted(text: str) -> str:
    """Quotes what a caller sent, but not all of it."""
    return repr(text if len(text) <= 64 else text[:64] + "…")


def _name_of(model: Findable) -> str:
    return model.bundle.manifest.name


def _wrong_language(model: Findable, source: str, target: str) -> str | None:
    """Returns the field of a request that asks for a language the model does not have; None where there is none."""
    languages = model.bundle.manifest.languages
    assert languages is not None  # the manifest's own check
    if source and languages.match(source, languages.sources) is None:
        return "source_language"
    if target and languages.match(target, languages.targets) is None:
        return "target_language"
    return None


def _pairs(models: Iterable[Findable]) -> str:
    return ", ".join(
        f"{manifest.name} ({manifest.languages})"
        for manifest in (model.bundle.manifest for model in models)
        if manifest.languages is not None
    )
