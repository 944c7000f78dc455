"""Which deployment answers which call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headway_server.bundles import Manifest, Task, path_key
from headway_server.errors import InvalidInputError, ModelNotFoundError, WrongTaskError
from headway_server.serving.routes import Routes

_TASKS: Final[Mapping[str, frozenset[Task]]] = {
    "GenerateText": frozenset({Task.GENERATION}),
    "StreamGenerateText": frozenset({Task.GENERATION}),
    "InspectGeneration": frozenset({Task.GENERATION}),
    "TranslateText": frozenset({Task.TRANSLATION}),
    "StreamTranslateText": frozenset({Task.TRANSLATION}),
    "InspectTranslation": frozenset({Task.TRANSLATION}),
    "RewriteText": frozenset({Task.TEXT_TO_TEXT}),
    "StreamRewriteText": frozenset({Task.TEXT_TO_TEXT}),
    "ClassifyText": frozenset({Task.TEXT_CLASSIFICATION}),
    "ClassifyTokens": frozenset({Task.TOKEN_CLASSIFICATION}),
    "EmbedText": frozenset({Task.TEXT_CLASSIFICATION, Task.TEXT_EMBEDDING}),
    "ScoreText": frozenset({Task.TEXT_SCORING}),
    "ClassifyImage": frozenset({Task.IMAGE_CLASSIFICATION}),
    "EmbedImage": frozenset({Task.IMAGE_CLASSIFICATION, Task.IMAGE_EMBEDDING}),
    "InspectImage": frozenset({Task.IMAGE_CLASSIFICATION, Task.IMAGE_EMBEDDING}),
    "RankImages": frozenset({Task.IMAGE_EMBEDDING}),
    "RankTexts": frozenset({Task.TEXT_EMBEDDING}),
}
"""Tasks of the models that a method may mean without naming one; other methods may mean any."""

SHARED: Final = "models"
"""Name of the deployment that models share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A deployment, and the models that its replicas have."""

    deployment: str
    tasks: Mapping[str, Task]
    """By the name of the model, and by other names that the store's routes give it."""
    paths: tuple[str, ...]
    """Of the bundles below the store, `<model>/<version>`."""
    model_id: str = ""
    """By which replicas that share a deployment among models know these; empty: all its replicas have them."""


def place(bundles: Iterable[tuple[str, Manifest]], routes: Routes, *, is_shared: bool = False) -> list[Placement]:
    """Gives each model a deployment of its own, and those that share a space one together: they are called together.

    Args:
        bundles: Their paths below the store, and their manifests.
        routes: Of the store.
        is_shared: True for one deployment whose replicas load each of these when it is called.
    """
    names: dict[str, str] = {}
    tasks: dict[str, dict[str, Task]] = {}
    paths: dict[str, list[str]] = {}
    for path, manifest in bundles:
        embedding = manifest.embedding
        space = embedding.space.name if embedding and embedding.space else None
        deployment = names.setdefault(manifest.name, f"space-{space}" if space else manifest.name)
        tasks.setdefault(deployment, {})[manifest.name] = manifest.task
        paths.setdefault(deployment, []).append(path)
    for alias, meant in routes.aliases.items():
        if meant.model in names:
            own = tasks[names[meant.model]]
            own[alias] = own[meant.model]
    return [
        Placement(
            deployment=SHARED if is_shared else name,
            tasks=tasks[name],
            paths=tuple(sorted(paths[name], key=path_key)),
            model_id=name if is_shared else "",
        )
        for name in sorted(tasks)
    ]


def choose(placements: Sequence[Placement], method: str, model: str) -> Placement:
    """Returns which deployment answers a call.

    Args:
        placements: Those there are.
        method: Name of the method, without its service.
        model: Name that the call gives; empty: the only model that can.

    Raises:
        ModelNotFoundError: There is no such model.
        WrongTaskError: It was made for something else.
        InvalidInputError: No name is given, and models of several deployments can.
    """
    wanted = _TASKS.get(method)
    able = [name for each in placements for name, task in each.tasks.items() if wanted is None or task in wanted]
    if model:
        for placement in placements:
            if (task := placement.tasks.get(model)) is not None:
                if wanted is not None and task not in wanted:
                    others = f"name {_listed(able)}" if able else "no model can"
                    raise WrongTaskError(f"model {model} is for {task} and cannot do this; {others}")
                return placement
        names = _listed(name for each in placements for name in each.tasks)
        raise ModelNotFoundError(f"there is no model {model[:100]}; there are {names}")
    choices = [each for each in placements if not each.tasks.keys().isdisjoint(able)]
    if len(choices) > 1 and wanted is not None:
        raise InvalidInputError("model", f"is empty, and several models can do this; name one of {_listed(able)}")
    return (choices or placements)[0]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
