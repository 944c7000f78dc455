"""What a module of one's own needs to be exported: all that is missing is told at once, before PyTorch is imported."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headway_export.errors import SourceError
from headway_server.bundles import TASK_PARTS, TOKENIZER_FILE, Task
from headway_training.factory import check_factory

OF_EVERY_TASK: Final = ("--weights", "--task", "--name")
_OF_FIELDS: Final = {"labels": "--labels", "languages": "--languages", "image_preprocessing": "--preprocessing"}
"""Flags that give a field of the manifest."""


def needed_flags(task: Task) -> tuple[str, ...]:
    """Returns the flags that a model of a factory needs for what its bundle must have."""
    parts = TASK_PARTS[task]
    of_text = ("--tokenizer",) if TOKENIZER_FILE in parts.files else ()
    return of_text + tuple(flag for field, flag in _OF_FIELDS.items() if field in parts.needs)


def check_given(factory: str, given: Mapping[str, Path | str | None]) -> None:
    """Checks what is given for a module of one's own.

    Args:
        factory: `package.module:function`.
        given: Values of flags; a path is that of a file or a folder.

    Raises:
        SourceError: Flags, files, the module or its function are missing: names all of them.
    """
    found = []
    if missing := [flag for flag in OF_EVERY_TASK if given[flag] is None]:
        found.append(f"--model needs {', '.join(missing)}")
    task, known = given["--task"], list(map(str, TASK_PARTS))
    if task in known:
        if missing := [flag for flag in needed_flags(Task(str(task))) if given[flag] is None]:
            found.append(f"--task {task} needs {', '.join(missing)}")
    elif task is not None:
        nearest = difflib.get_close_matches(str(task), known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}"
        found.append(f"task {task}: cannot be exported ({hint})")
    for flag, value in given.items():
        if isinstance(value, Path) and not value.exists():
            found.append(f"{flag} {value}: there is no such file")
    try:
        check_own(factory)
    except SourceError as error:
        found.append(str(error))
    if found:
        raise SourceError("; ".join(found))


def check_own(factory: str) -> None:
    """Checks that a factory is there.

    Raises:
        SourceError: It is not.
    """
    try:
        check_factory(factory)
    except ValueError as error:
        raise SourceError(f"--model {error}") from error
