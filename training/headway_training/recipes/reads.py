"""Which settings of a recipe the runs of each task read: all others are refused, so that none is set to no effect.

What is read on some data alone, or with some model, is told by `headway_training.unread`, which knows both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel

from headway_training.errors import RecipeError
from headway_training.kinds import ROWS, SMOOTHING, TOKENS, find_task
from headway_training.recipes.settings import OptimizationSettings, Recipe

_EVERY_TASK = (
    *("name", "task", "description", "license", "tracker", "data", "model", "init", "lora", "result"),
    *({f"optimization.{name}": "" for name in OptimizationSettings.model_fields}.keys() - {ROWS, TOKENS, SMOOTHING}),
)


def reads_of(task: str) -> tuple[str, ...]:
    """What runs of a task read: names of settings, `section.key` or, of whole sections, `section`."""
    return (*_EVERY_TASK, *find_task(task).settings)


def find_unread(task: str, given: Iterable[str]) -> dict[str, str]:
    """The settings that runs of a task do not read, each with what they read in its place.

    Args:
        task: The task.
        given: Settings, `section.key`; those that no recipe has are left to who checks names.
    """
    reads, kinds = reads_of(task), section_kinds()
    found = {}
    for key in sorted(given):
        section, _, name = key.partition(".")
        is_known = name in kinds[section].model_fields if section in kinds else section in Recipe.model_fields
        if not is_known or key in reads or section in reads:
            continue
        beside = [one for one in reads if one.startswith(f"{section}.")]
        if not name:
            found[key] = f"is not read for {task}"
        elif beside:
            found[key] = f"is not read for {task}, which reads {', '.join(one.partition('.')[2] for one in beside)}"
        else:
            known = sorted({one.partition(".")[0] for one in reads} & (kinds.keys() | {"model"}) - {"result"})
            found[key] = f"is not read for {task}, whose sections are {', '.join(known)}"
    return found


def refuse_unread(owner: str, found: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Refuses settings that nothing reads, but for those that are at their default.

    Args:
        owner: What the message begins with.
        found: The settings, each with why it is not read.
        values: The recipe's sections, as they were read.

    Raises:
        RecipeError: There is one of another value than its default.
    """
    wrong = {key: why for key, why in found.items() if not _is_default(key, values)}
    if wrong:
        told = "; ".join(f"{key} {why}" for key, why in wrong.items())
        out = " ".join(f"--set {key}=" for key in wrong)
        raise RecipeError(f"{owner}: {told}. Leave it out; what a recipe's file has is taken out by {out}")


def _is_default(key: str, values: Mapping[str, Any]) -> bool:
    section, _, name = key.partition(".")
    if section == "model":  # whose fields stand in recipes where they are not left to their defaults
        return False
    kind, value = (section_kinds()[section], values[section][name]) if name else (Recipe, values[section])
    field = kind.model_fields[name or section]
    return not field.is_required() and bool(value == field.default)


@cache
def section_kinds() -> Mapping[str, type[BaseModel]]:
    """The sections of a recipe, but for its model, which has the fields of its architecture."""
    kinds = {}
    for name, field in Recipe.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                kinds[name] = kind
    return MappingProxyType(kinds)
