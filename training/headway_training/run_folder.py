"""The folder of a run: taken once, and resumed only as it was begun."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headway_training.errors import ResumeError
from headway_training.models import CONFIGURATIONS
from headway_training.recipes import Recipe

RUN_FILE = "run.json"


def write_description(folder: Path, described: Mapping[str, Any]) -> None:
    """Takes the folder for a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def check_folder(folder: Path, described: Mapping[str, Any], *, resume: bool) -> None:
    """Checks that a folder is free for a run, or that the run in it is the one to resume.

    Args:
        folder: The run's folder.
        described: What decides the result of the run.
        resume: Whether the run in it is to go on.

    Raises:
        ResumeError: There is a run and `resume` is off, there is none and it is on, or it is another one.
    """
    file = folder / RUN_FILE
    if resume and not file.is_file():
        raise ResumeError(f"{folder} holds no run to resume; leave --resume out to start one")
    if resume:
        _check_same(json.loads(file.read_text(encoding="utf-8")), described, folder)
    elif file.is_file():
        raise ResumeError(
            f"{folder} holds a run already. Go on with it by --resume, choose another folder with --output, "
            "or remove it"
        )


def _with_defaults(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """A description with today's default for every setting that there was none of when it was written."""
    adapter = TypeAdapter(Recipe)
    try:
        recipe = adapter.dump_python(adapter.validate_python(described["recipe"]), mode="json")
        fields = dataclasses.fields(CONFIGURATIONS[recipe["model"]["architecture"]])
    except (KeyError, ValidationError):
        return described  # of settings that there are no more: the comparison names them
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return {**described, "recipe": {**recipe, "model": {**defaults, **recipe["model"]}}}


def _check_same(stored: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Checks that a run is resumed as it was begun: a changed recipe would make another model."""
    before, after = (_flatten(_with_defaults(one)) | _flatten(one) for one in (stored, wanted))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if changed:
        shown = "; ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in changed[:3])
        raise ResumeError(
            f"{folder} was begun with other settings: {shown}. Resume it with the same, or start a new run"
        )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
