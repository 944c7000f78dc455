"""Reads recipes: TOML files of this folder or of the user's, with settings of the command line on top."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headway_training.checkpoint import ImagePreprocessing, Languages, SamplingDefaults
from headway_training.errors import RecipeError
from headway_training.models import CONFIGURATIONS, NAMED_CONFIGURATIONS, named_configuration
from headway_training.recipes.regularization import DistillationSettings, PretrainingSettings, RegularizationSettings
from headway_training.recipes.results import Idea, Result
from headway_training.recipes.settings import (
    AugmentationSettings,
    ClassificationSettings,
    DataSettings,
    OptimizationSettings,
    Recipe,
    TokenizerSettings,
)

FOLDER = Path(__file__).parent

_TOP_LEVEL = tuple(field.name for field in dataclasses.fields(Recipe))
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "data": tuple(field.name for field in dataclasses.fields(DataSettings)),
    "classification": tuple(field.name for field in dataclasses.fields(ClassificationSettings)),
    "tokenizer": tuple(field.name for field in dataclasses.fields(TokenizerSettings)),
    "optimization": tuple(field.name for field in dataclasses.fields(OptimizationSettings)),
    "regularization": tuple(field.name for field in dataclasses.fields(RegularizationSettings)),
    "distillation": tuple(field.name for field in dataclasses.fields(DistillationSettings)),
    "pretraining": tuple(field.name for field in dataclasses.fields(PretrainingSettings)),
    "augmentation": tuple(field.name for field in dataclasses.fields(AugmentationSettings)),
    "preprocessing": tuple(ImagePreprocessing.model_fields),
    "languages": tuple(Languages.model_fields),
    "sampling": tuple(SamplingDefaults.model_fields),
}
_ADAPTER = TypeAdapter(Recipe)


def list_recipes() -> list[Path]:
    """The recipes that come with the package, by name."""
    return sorted(FOLDER.glob("*.toml"))


def read_recipe(name: str, settings: Sequence[str] = (), *, configuration: str | None = None) -> Recipe:
    """Reads a recipe by its name, or a file of the user's by its path.

    Args:
        name: `ag-news`, or a path that ends in `.toml`.
        settings: `section.key=value`, which replace the file's; a value is written as in TOML, a bare word is a string.
        configuration: Name of a configuration that takes the place of the file's whole section [model].

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
    for setting in settings:
        _apply(content, setting)
    return make_recipe(content, source=str(file) if file.parent != FOLDER else f"recipe {name}")


def make_recipe(content: dict[str, Any], source: str = "recipe") -> Recipe:
    """Checks keys, types and ranges of a recipe's content.

    Raises:
        RecipeError: As `read_recipe`; the message begins with `source`.
    """
    _check_keys(content, source)
    content = {**content, "model": _resolve_model(content.get("model", {}), source)}
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        findings = (f"{'.'.join(map(str, item['loc']))}: {_message(item)}" for item in error.errors())
        raise RecipeError(f"{source}: {'; '.join(finding.removeprefix(': ') for finding in findings)}") from error


def _message(item: Any) -> str:
    """One finding of pydantic's, with the value where it is short."""
    value = item.get("input")
    given = f" (given: {value!r})" if isinstance(value, str | int | float | bool) else ""
    return str(item["msg"]).removeprefix("Value error, ") + given


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
    names = list(known)
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=0.0)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _apply(content: dict[str, Any], setting: str) -> None:
    """Puts one `section.key=value` into a recipe's content."""
    path, separator, text = setting.partition("=")
    *sections, key = path.strip().split(".")
    if not separator or not key or len(sections) > 1:
        raise RecipeError(f"--set {setting}: expected section.key=value, such as optimization.learning_rate=0.001")
    target = content
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise RecipeError(f"--set {setting}: {section} is not a section")
    try:
        target[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        target[key] = text.strip()


def _check_keys(content: Mapping[str, Any], source: str) -> None:
    """Checks every key but the model's, whose known ones depend on the architecture."""
    _check_known(content, _TOP_LEVEL, "", source)
    for section, known in _SECTIONS.items():
        values = content.get(section, {})
        if not isinstance(values, dict):
            raise RecipeError(f"{source}: {section} must be a section, and is {values!r}")
        _check_known(values, known, f"{section}.", source)
    for name, kind in (("results", Result), ("ideas", Idea)):
        for entry in content.get(name, ()):
            if not isinstance(entry, dict):
                raise RecipeError(f"{source}: {name} must be tables, written [[{name}]], and has {entry!r}")
            _check_known(entry, [field.name for field in dataclasses.fields(kind)], f"{name}.", source)


def _check_known(keys: Iterable[str], known: Sequence[str], prefix: str, source: str) -> None:
    for key in keys:
        if key not in known:
            full = [f"{prefix}{name}" for name in known]
            raise RecipeError(f"{source}: unknown key {prefix + key!r}{_suggest(prefix + key, full)}")


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
    if architecture not in CONFIGURATIONS:
        raise RecipeError(
            f"{source}: model.architecture is {architecture!r}; it must be one of {', '.join(CONFIGURATIONS)}, "
            f"or model.configuration one of {', '.join(NAMED_CONFIGURATIONS)}"
        )
    known = [field.name for field in dataclasses.fields(CONFIGURATIONS[architecture])]
    _check_known(values, ["architecture", "configuration", *known], "model.", source)
    return values
