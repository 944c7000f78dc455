"""Reads recipes: TOML files of this folder or of the user's, with settings of the command line on top."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headway_training.checkpoint import CHECKPOINT_FILE, HUGGINGFACE, read_checkpoint
from headway_training.errors import RecipeError
from headway_training.kinds import task_names
from headway_training.models import ARCHITECTURES, NAMED_CONFIGURATIONS, named_configuration
from headway_training.models.own import FACTORY, MODULE, Factory
from headway_training.recipes.reads import find_unread, refuse_unread, section_kinds
from headway_training.recipes.settings import Recipe

FOLDER = Path(__file__).parent
_FOLDER_FIELDS = ("max_length",)
"""Fields of a recipe's model that hold for a model folder too."""


def list_recipes() -> list[Path]:
    """The recipes that come with the package, by name."""
    return sorted(FOLDER.glob("*.toml"))


def read_recipe(
    name: str,
    settings: Sequence[str] = (),
    *,
    configuration: str | None = None,
    model_folder: Path | None = None,
    factory: str | None = None,
    replaced: Collection[str] = (),
) -> Recipe:
    """Reads a recipe by its name, or a file of the user's by its path.

    Args:
        name: `ag-news`, or a path that ends in `.toml`.
        settings: `section.key=value`, which replace the file's; a value is written as in TOML, a bare word is a string.
        configuration: Name of a configuration that takes the place of the file's whole section [model].
        model_folder: A folder of `transformers` that takes the place of that section but for `max_length`, and of the
            licence; the task stays the recipe's.
        factory: `package.module:function` that makes a module of the user's own, likewise.
        replaced: Sections that something else takes the place of: what the file has in them is not `Recipe.given`.

    Raises:
        RecipeError: There is no such recipe, a key is unknown (the nearest known one is named) or a value is wrong.
    """
    file = _find(name)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"recipe {file} cannot be read as TOML: {error}") from error
    if configuration is not None:
        content["model"] = {"configuration": configuration}
    given = {"--model": configuration, "--module": factory, "--init": model_folder}
    if len(named := [f"{flag} {value}" for flag, value in given.items() if value is not None]) > 1:
        raise RecipeError(f"{' and '.join(named)} each give the model; leave one out")
    if factory is not None:
        content["model"] = {"architecture": MODULE, FACTORY: factory}
    if model_folder is not None:
        content |= _take_folder(content, model_folder)
    for setting in settings:
        _apply(content, setting)
    recipe = make_recipe(content, source=str(file) if file.parent != FOLDER else f"recipe {name}")
    own = {parse_setting(setting)[0] for setting in settings}
    return recipe.noting(key for key in recipe.given if key in own or key.partition(".")[0] not in replaced)


def make_recipe(content: dict[str, Any], source: str = "recipe") -> Recipe:
    """Checks keys, types and ranges of a recipe's content.

    Raises:
        RecipeError: As `read_recipe`; the message begins with `source`.
    """
    given = list(_keys_of(content))
    values = {**content, "model": _resolve_model(content.get("model", {}), source)}
    task = content.get("task")
    is_known = task in task_names()
    unread = find_unread(str(task), given) if is_known else {}
    try:
        recipe = Recipe.model_validate(values).noting(given)
    except ValidationError as error:
        wrong = {str(item["loc"][0]) for item in error.errors() if item["loc"]}
        refuse_unread(source, {key: why for key, why in unread.items() if key.partition(".")[0] in wrong}, content)
        raise RecipeError(f"{source}: {'; '.join(_describe(item) for item in error.errors())}") from error
    refuse_unread(source, unread, content)
    return recipe


def parse_setting(setting: str) -> tuple[str, Any]:
    """Parses `NAME=VALUE`: the value is written as in TOML, a bare word is a string. Without `=` the name is empty."""
    name, separator, text = setting.partition("=")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return name.strip() if separator else "", value


def _take_folder(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The sections of a recipe that a model folder changes."""
    section = content.get("model")
    resolved = _resolve_model(section, "recipe") if section else {}
    kept = {name: resolved[name] for name in _FOLDER_FIELDS if name in resolved}
    changed: dict[str, Any] = {"model": {"architecture": HUGGINGFACE, **kept}, "init": {"checkpoint": str(folder)}}
    if resolved.get("architecture") != HUGGINGFACE:
        is_ours = (folder / CHECKPOINT_FILE).is_file()
        own = f"that of {folder.resolve().name}, which it was fine-tuned from"
        changed["license"] = read_checkpoint(folder).license if is_ours else own
    return changed


def _describe(finding: Any) -> str:
    """One finding of pydantic's: the key, what is wrong, and the value where it is short."""
    key = ".".join(map(str, finding["loc"]))
    if finding["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_suggest(key, _keys_beside(finding['loc']))}"
    value = finding.get("input")
    given = f" (given: {value!r})" if isinstance(value, str | int | float | bool) else ""
    message = str(finding["msg"]).removeprefix("Value error, ") + given
    return f"{key}: {message}" if key else message


def _keys_beside(path: Sequence[Any]) -> Iterator[str]:
    """The keys that the section of a key has, each with its section's name."""
    section = section_kinds()[str(path[0])] if len(path) > 1 else Recipe
    for name in section.model_fields:
        yield ".".join([*map(str, path[:-1]), name])


def _keys_of(content: dict[str, Any]) -> Iterator[str]:
    """The keys of a recipe's content, `section.key` of those in sections."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


def _find(name: str) -> Path:
    """The file of a recipe."""
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise RecipeError(f"there is no recipe file {name}")
        return Path(name)
    known = {file.stem: file for file in list_recipes()}
    if name not in known:
        raise RecipeError(f"there is no recipe {name!r}{_suggest(name, known)}; `headway-train list` shows them")
    return known[name]


def _suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the nearest known word."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _apply(content: dict[str, Any], setting: str) -> None:
    """Puts one `section.key=value` into a recipe's content; with nothing after the sign the key is left out."""
    path, value = parse_setting(setting)
    *sections, key = path.split(".")
    if not key or len(sections) > 1:
        raise RecipeError(f"--set {setting}: expected section.key=value, such as optimization.learning_rate=0.001")
    target = content
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise RecipeError(f"--set {setting}: {section} is not a section")
    if setting.endswith("="):
        target.pop(key, None)
    else:
        target[key] = value


def _resolve_model(section: Any, source: str) -> dict[str, Any]:
    """Replaces `configuration`, the name of a configuration, by its fields; fields beside it win."""
    if not isinstance(section, dict):
        raise RecipeError(f"{source}: model must be a section, and is {section!r}")
    values = dict(section)
    name = values.pop("configuration", None)
    if name is not None:
        try:
            named = named_configuration(str(name))
        except ValueError as error:
            raise RecipeError(f"{source}: model.configuration: {error}") from error
        values = {"architecture": named.architecture, **named.configuration.to_dict(), **values}
    architecture = str(values.get("architecture"))
    if architecture not in (*ARCHITECTURES, HUGGINGFACE, MODULE):
        raise RecipeError(
            f"{source}: model.architecture is {architecture!r}; it must be one of {', '.join(sorted(ARCHITECTURES))}, "
            f"or model.configuration one of {', '.join(NAMED_CONFIGURATIONS)}"
        )
    fields: tuple[str, ...] = _FOLDER_FIELDS
    if architecture == MODULE:
        arguments = {name: value for name, value in values.items() if name not in ("architecture", FACTORY)}
        try:
            Factory(str(values.get(FACTORY, ""))).check(arguments)
        except ValueError as error:
            raise RecipeError(f"{source}: model: {error}") from error
        return values
    if architecture != HUGGINGFACE:
        fields = tuple(field.name for field in dataclasses.fields(ARCHITECTURES[architecture].configuration))
    known = [f"model.{name}" for name in ("architecture", "configuration", *fields)]
    for key in (f"model.{name}" for name in values):
        if key not in known:
            raise RecipeError(f"{source}: unknown key {key!r}{_suggest(key, known)}")
    return values
