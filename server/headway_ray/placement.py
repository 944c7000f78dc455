"""Which deployments answer which call: models are found as the server finds them, by what is known of their bundles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway_server.bundles import Bundle, Manifest, Precision, path_key
from headway_server.errors import InvalidInputError, ModelNotFoundError, RequestError
from headway_server.observers import Call
from headway_server.serving.abilities import Ability, PairAbility, Rpc, Scope, space_of
from headway_server.serving.finding import ModelFinder
from headway_server.serving.routes import Routes
from headway_server.settings import ServerSettings
from headway_server.tasks.table import TRANSLATE_TEXTS

SHARED: Final = "models"
"""Name of the deployment that models share."""

ValueOf = Callable[[str], object]
"""Returns the value of a field of a request; something false where it is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A deployment, and the models that its replicas have."""

    deployment: str
    paths: tuple[str, ...]
    """Of the bundles below the store, `<model>/<version>`."""
    model_id: str = ""
    """By which replicas that share a deployment among models know these; empty: all its replicas have them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedModel:
    """A version of a model, as far as finding it needs."""

    bundle: Bundle
    """With a manifest that lists neither files nor tensors."""
    precision: Precision
    """The one that the settings ask for. Without one a replica chooses by its device, and this is any."""
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error that a replica raises for the one who has chosen it, once it knows who calls."""

    kind: type[RequestError]
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, error: RequestError) -> Refusal:
        """Describes an error of `ModelFinder`."""
        arguments = (error.field, error.description) if isinstance(error, InvalidInputError) else (str(error),)
        return cls(kind=type(error), arguments=arguments)

    @property
    def error(self) -> RequestError:
        """The error anew."""
        return self.kind(*self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Who answers a call."""

    placements: Sequence[Placement]
    """One, or several whose answers are joined."""
    refusal: Refusal | None = None
    """What the one answers in place of a model; None: it looks for its model itself."""


class Placements(ModelFinder[PlacedModel]):
    """The models of a store and their deployments. Can be pickled."""

    def __init__(self, models: Iterable[PlacedModel], routes: Routes) -> None:
        """Knows such models, and the routes of their store."""
        self.models = tuple(models)
        self.routes = routes
        self.all = tuple(dict.fromkeys(model.placement for model in self.models))
        """The deployments, by name."""

    def choose(self, rpc: Rpc, value_of: ValueOf) -> Choice:
        """Returns who answers a call. What is wrong with its model is the refusal of whoever does.

        Args:
            rpc: The method of the call.
            value_of: Reads the request.
        """
        try:
            return self._choose(rpc, value_of)
        except RequestError as error:
            return Choice(placements=self.all[:1], refusal=Refusal.of(error))

    def _choose(self, rpc: Rpc, value_of: ValueOf) -> Choice:
        asked = rpc.asked_by(value_of)
        if asked is rpc.asked and rpc.is_of_all:
            return Choice(placements=self.all)
        name = _text(value_of, "model", "model_name", "name")
        version = _text(value_of, "model_version", "version")
        if isinstance(asked, Ability):
            return Choice(placements=(self._find_able(asked, name, version, value_of).placement,))
        if asked is Scope.SERVER or not name:  # which the method refuses in its own words
            return Choice(placements=self.all[:1])
        try:
            return Choice(placements=(self.find_named(name, version).placement,))
        except ModelNotFoundError:
            if asked is Scope.PROBED:
                return Choice(placements=self.all[:1])
            raise

    def _find_able(self, ability: Ability[Any], name: str, version: str, value_of: ValueOf) -> PlacedModel:
        if ability is TRANSLATE_TEXTS:
            languages = (_text(value_of, field) for field in ("source_language", "target_language"))
            return self.find_translation(ability, name, version, *languages)
        if isinstance(ability, PairAbility):
            return self.find_pair(ability, name, version)[0]
        return self.find(ability, name, version)

    def _keep_open(self, model: PlacedModel, call: Call) -> None:  # noqa: ARG002 (the base class's)
        raise AssertionError("no call is answered here")

    def __repr__(self) -> str:
        return f"Placements({len(self.models)} bundles, {len(self.all)} deployments)"


def place(
    bundles: Iterable[tuple[str, Manifest]], routes: Routes, settings: ServerSettings, *, is_shared: bool = False
) -> Placements:
    """Gives each model a deployment of its own, and those that share a space one together: they are called together.

    Args:
        bundles: Their paths below the store, and their manifests.
        routes: Of the store.
        settings: Of the server.
        is_shared: True for one deployment whose replicas load each of these when it is called.
    """
    found = sorted(bundles, key=lambda bundle: path_key(f"{bundle[1].name}/{bundle[1].version}"))
    names: dict[str, str] = {}
    paths: dict[str, list[str]] = {}
    for path, manifest in found:
        space = space_of(manifest)
        deployment = names.setdefault(manifest.name, f"space-{space}" if space else manifest.name)
        paths.setdefault(deployment, []).append(path)
    placements = {
        name: Placement(
            deployment=SHARED if is_shared else name,
            paths=tuple(sorted(paths[name], key=path_key)),
            model_id=name if is_shared else "",
        )
        for name in sorted(paths)
    }
    return Placements(
        (
            PlacedModel(
                bundle=Bundle(path=Path(path), manifest=_outline(manifest)),
                precision=_precision(manifest, settings),
                placement=placements[names[manifest.name]],
            )
            for path, manifest in found
        ),
        routes,
    )


def _precision(manifest: Manifest, settings: ServerSettings) -> Precision:
    asked = settings.for_model(manifest.name).precision
    return asked if asked in manifest.variants else next(iter(manifest.variants))


def _outline(manifest: Manifest) -> Manifest:
    """Returns what finding reads of a manifest: proxies fetch all of them every few seconds."""
    variants = {
        precision: variant.model_copy(
            update={
                "graphs": {
                    name: graph.model_copy(update={"inputs": (), "outputs": ()})
                    for name, graph in variant.graphs.items()
                }
            }
        )
        for precision, variant in manifest.variants.items()
    }
    return manifest.model_copy(update={"files": {}, "variants": variants})


def _text(value_of: ValueOf, *fields: str) -> str:
    """Returns the first text that one of the fields holds; empty where none does."""
    values = (value_of(field) for field in fields)
    return next((value for value in values if value and isinstance(value, str)), "")
