"""Selection of the model for a call, by ability, name, version and route."""

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
    """The interface of a model that calls can find."""

    @property
    def bundle(self) -> Bundle:
        """Its bundle."""

    @property
    def precision(self) -> Precision:
        """Precision of the running variant."""


ModelT = TypeVar("ModelT", bound=Findable)


class _Index(Generic[ModelT]):
    """Models by what calls look for: a call takes no longer where many models are loaded."""

    def __init__(self, models: tuple[ModelT, ...]) -> None:
        self.models = models
        self.by_name: dict[str, list[ModelT]] = {}
        """Versions of each model, in their order."""
        for model in models:
            self.by_name.setdefault(model.bundle.manifest.name, []).append(model)
        self.by_ability: dict[Ability[Any], list[ModelT]] = {}
        """Models with each ability that was looked for."""


class ModelFinder(ABC, Generic[ModelT]):
    """The models that calls can find. For the event loop's thread only."""

    models: tuple[ModelT, ...] = ()
    """Models by name and version."""
    routes: Routes
    """Routes: versions for calls without a version."""
    _index: _Index[ModelT] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the index, which another process makes anew."""
        return {name: value for name, value in self.__dict__.items() if name != "_index"}

    @property
    def families(self) -> Families:
        """Families by task, with the abilities of their models."""
        return served_families()

    def find(self, ability: Ability[Any], name: str, version: str) -> ModelT:
        """Finds the model for a call.

        Args:
            ability: Ability that the call requires.
            name: Name of the model; empty for the only candidate.
            version: Version of the model; empty for the latest with the ability.

        Raises:
            InvalidInputError: The name is empty and there are several candidates.
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
            ability: Translation.
            name: Name of the model; empty for the only one that translates between the languages.
            version: Version of the model; empty for the latest.
            source_language: BCP 47 code of the texts; empty for the model's.
            target_language: BCP 47 code of the translations; empty for the model's only one.

        Raises:
            InvalidInputError: The name is empty and several models can; or a language is not one of the model's.
            ModelNotFoundError: There is no such model or version.
            WrongTaskError: The model, or every model, was made for something else.
        """
        candidates = self._capable(ability)
        matching = [model for model in candidates if _wrong_language(model, source_language, target_language) is None]
        if not name and candidates and not matching:
            name = candidates[0].bundle.manifest.name  # with the wrong languages: the error is raised below
        model = self._find(ability, ability.words, candidates, name, version, among=matching)
        if wrong := _wrong_language(model, source_language, target_language):
            value = source_language if wrong == "source_language" else target_language
            raise InvalidInputError(
                wrong, f"is {quoted(value)}, for which there is no such model; loaded are {_pairs(candidates)}"
            )
        return model

    def find_pair(self, ability: PairAbility[Any, Any], name: str, version: str) -> tuple[ModelT, ModelT]:
        """Finds two models of one embedding space, to compare images and texts; errors are those of `find`.

        Args:
            ability: Ability that the call requires.
            name: Name of the model with it; empty for the only one with a partner in its space.
            version: Version of that model; empty for the latest.

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
        self._reserve(partner)
        return model, partner

    def get(self, name: str, version: str) -> ModelT:
        """Finds a model of any task by name or alias; without a version, the default version.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        model = self.peek(name, version)
        self._note_use(model)
        return model

    def find_named(self, name: str, version: str) -> ModelT:
        """Finds the model of any task that a call names; without a version, by its route.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        model = self._named(*self.routes.resolve(name, version), self.models)
        self._note_use(model)
        return model

    def peek(self, name: str, version: str) -> ModelT:
        """Returns the result of `get` without counting a use of the model.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        return self._named(*self.routes.resolve(name, version))

    def _capable(self, ability: Ability[Any]) -> list[ModelT]:
        """Returns the models with an ability."""
        found = self._indexed.by_ability
        if (capable := found.get(ability)) is None:
            families = self.families
            capable = [model for model in self.models if has_ability(families, model.bundle.manifest, ability)]
            found[ability] = capable
        return capable

    @property
    def _indexed(self) -> _Index[ModelT]:
        """The index of the loaded models, made once for each set of them."""
        if self._index is None or self._index.models is not self.models:
            self._index = _Index(self.models)
        return self._index

    def _forget_index(self) -> None:
        """Lets go of models that have left."""
        self._index = None

    def _preferred(self, ability: Ability[Any], models: Sequence[ModelT]) -> list[ModelT]:
        """Returns the candidates of a call without a model's name: the models of the first task that has any."""
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
        """Finds a model with an ability.

        Args:
            ability: The ability.
            words: The same for messages, such as "embed texts".
            capable: The models with the ability.
            name: Of the model; empty for the only one to take.
            version: Of the model; empty for the latest one that can.
            among: Candidates of a call without a model's name; None: all capable models.
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
            family, manifest = self.families[task_of(model)], model.bundle.manifest
            if ability in family.made_for and not isinstance(ability, PairAbility):  # as other models of its task can
                can = [other.words for other in family.made_for if has_ability(self.families, manifest, other)]
                advice += f"; it can {', '.join(can)}" if can else ""
            if not family.abilities:
                advice += f"; it takes tensors, by ModelInfer or at /v2/models/{name}/infer"
            raise WrongTaskError(f"model {path_of(model)} is for {task_of(model)} and cannot {words}; {advice}")
        self._note_use(model)
        return model

    def _named(self, name: str, version: str, capable: Sequence[ModelT] | None = None) -> ModelT:
        """Returns a version of a model.

        Args:
            name: Of the model, not an alias.
            version: Of the model; empty for one that its route chooses.
            capable: Models to prefer when no version is named: an older version may have an ability that the latest
                lacks. None: the look-up is no call, and leaves out the canary.
        """
        versions = self._indexed.by_name.get(name)
        if versions is None:
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
        """Reserves a model for the current call, as the one that answers it."""
        call, manifest = current_call(), model.bundle.manifest
        self._reserve(model)
        if call is not None:
            call.model = ModelId(manifest.name, manifest.version)

    def _reserve(self, model: ModelT) -> None:
        """Checks the caller's right to a model, and reserves it until the current call ends."""
        call = current_call()
        if call is None:
            return
        if call.rights is not None:
            call.rights.check_model(task_of(model), model.bundle.manifest.name)
        self._keep_open(model, call)

    @abstractmethod
    def _keep_open(self, model: ModelT, call: Call) -> None:
        """Keeps a model open until a call ends."""


def task_of(model: Findable) -> Task:
    """Returns the task of a model."""
    return model.bundle.manifest.task


def path_of(model: Findable) -> str:
    """Returns the path of a model's bundle in its store."""
    return f"{model.bundle.manifest.name}/{model.bundle.manifest.version}"


def names_of(models: Iterable[Findable]) -> str:
    """Lists the distinct names of models, for messages."""
    return ", ".join(dict.fromkeys(model.bundle.manifest.name for model in models)) or "none"


def quoted(text: str) -> str:
    """Quotes a caller's text, shortened."""
    return repr(text if len(text) <= 64 else text[:64] + "…")


def _name_of(model: Findable) -> str:
    return model.bundle.manifest.name


def _wrong_language(model: Findable, source: str, target: str) -> str | None:
    """Returns the field of a request with a language unknown to the model; None without one."""
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
