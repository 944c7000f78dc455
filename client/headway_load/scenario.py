"""Scenario files, and their files of inputs and times.

A scenario is a TOML file: the fields of `LoadPlan` at its top, and a `[[workloads]]` for each kind of call with the
fields of `Workload`. Paths are relative to the scenario's folder.

    rate_per_s = 40
    duration_s = 60
    objectives = ["errors<1%", "headlines:p99<100ms", "talk:ttft.p95<500ms"]

    [[workloads]]
    name = "headlines"
    task = "classify-text"
    weight = 9
    inputs = "headlines.txt"

    [[workloads]]
    name = "talk"
    task = "chat"
    inputs = "conversations.jsonl"
    options = { max_new_tokens = 40, temperature = 0.7 }
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headway_load.objectives import Objective
from headway_load.plan import Arrivals, Input, LoadPlan, LoadTask, Workload
from headway_load.samples import sample_inputs

_IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
_AFTER_REPLAY_S = 0.001
"""Margin after a replay, so that its last call is measured."""
_MAX_INPUT_BYTES = 512 * 2**20

_Choice = TypeVar("_Choice", bound=StrEnum)


class Inputs(NamedTuple):
    """Inputs of a file, and their options."""

    inputs: Sequence[Input]
    input_options: Sequence[Mapping[str, Any]] = ()


def read_scenario(file: Path) -> dict[str, Any]:
    """Reads a scenario and returns the fields of its `LoadPlan`.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file has wrong content; the message names it.
    """
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
        _check_names(given, LoadPlan)
        plan: dict[str, Any] = dict(given)
        plan["workloads"] = tuple(_read_workload(each, file.parent) for each in given.get("workloads", []))
        if "arrivals" in plan:
            plan["arrivals"] = _choose("arrivals", plan["arrivals"], Arrivals)
        if "replay_s" in plan and isinstance(plan["replay_s"], str):
            plan["replay_s"] = read_times(file.parent / plan["replay_s"])
        plan["objectives"] = tuple(map(Objective.parse, plan.get("objectives", ())))
    except (AttributeError, TypeError, ValueError) as error:  # a value of a wrong type, or out of its range
        raise ValueError(f"{file}: {error}") from error
    return plan


def make_plan(**values: Any) -> LoadPlan:
    """Makes a plan; a replay lasts as long as its recording, unless a duration is given."""
    if replay_s := values.get("replay_s"):
        warmup_s = values.setdefault("warmup_s", 0.0)
        values.setdefault("duration_s", replay_s[-1] - replay_s[0] - warmup_s + _AFTER_REPLAY_S)
    return LoadPlan(**values)


def make_workload(task: LoadTask, inputs: Inputs, **values: Any) -> Workload:
    """Makes a workload; calls that generate text stream by default."""
    generates = task in (LoadTask.GENERATE_TEXT, LoadTask.CHAT)
    values.setdefault("stream", generates and values.get("batch_size", 1) == 1)
    return Workload(task=task, inputs=inputs.inputs, input_options=inputs.input_options, **values)


def read_inputs(task: LoadTask, path: Path | None, folder: Path = Path()) -> Inputs:
    """Returns the inputs of a file or folder, or the built-in ones.

    Args:
        task: Task of the inputs.
        path: A file with an input on each line (of images: a path), a `.jsonl` file, or a folder of images.
        folder: Base of relative paths within the file.

    Raises:
        OSError: A file cannot be read.
        ValueError: A line is no input of the task.
    """
    if path is None:
        return Inputs(sample_inputs(task))
    if path.is_dir():
        if not task.takes_images:
            raise ValueError(f"{path} is a folder; {task} reads a file of lines or a .jsonl file")
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _IMAGE_SUFFIXES)
        return Inputs(_read_images(files))
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        read = [_read_line(line, task, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
        inputs: list[Any] = [value for value, _ in read]
        options = [own for _, own in read] if any(own for _, own in read) else []
    else:
        inputs, options = lines, []
    return Inputs(_read_images([folder / line for line in inputs]) if task.takes_images else inputs, options)


def read_times(path: Path) -> tuple[float, ...]:
    """Reads due times: seconds on any clock, one on each line, in any order.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is no number, or there are no lines.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        times_s = sorted(map(float, lines))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; each line holds a time in seconds") from error
    if not times_s:
        raise ValueError(f"{path} holds no times")
    return tuple(times_s)


def _read_workload(given: dict[str, Any], folder: Path) -> Workload:
    _check_names(given, Workload)
    values = dict(given)
    if "task" not in values:
        raise ValueError(f"a workload has no task; it is one of {', '.join(LoadTask)}")
    task, file = _choose("task", values.pop("task"), LoadTask), values.pop("inputs", None)
    return make_workload(task, read_inputs(task, None if file is None else folder / file, folder), **values)


def _choose(name: str, value: Any, kind: type[_Choice]) -> _Choice:
    if value not in list(kind):
        raise ValueError(f"{name} is {value!r}; it is one of {', '.join(kind)}")
    return kind(value)


def _read_line(line: str, task: LoadTask, place: str) -> tuple[Any, dict[str, Any]]:
    """Returns the input and the options of a line: the input alone, or an object with `input` or `messages`."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    options: dict[str, Any] = {}
    if isinstance(value, dict):
        key = "messages" if task is LoadTask.CHAT and "messages" in value else "input"
        options = {name: option for name, option in value.items() if name != key}
        value = value.get(key)
    if not isinstance(value, str) and not (task is LoadTask.CHAT and isinstance(value, list)):
        wanted = "messages or a text" if task is LoadTask.CHAT else "a text" if not task.takes_images else "a path"
        raise ValueError(f"{place}: {task} needs {wanted}, alone or as the `input` of an object")
    return value, options


def _read_images(files: Sequence[Path]) -> list[bytes]:
    total_bytes = sum(file.stat().st_size for file in files)
    if total_bytes > _MAX_INPUT_BYTES:
        raise ValueError(f"the images are {total_bytes / 2**20:.0f} MiB; the limit is {_MAX_INPUT_BYTES >> 20} MiB")
    return [file.read_bytes() for file in files]


def _check_names(given: dict[str, Any], kind: type) -> None:
    known = {each.name for each in fields(kind)} - {"input_options"}
    for name in given.keys() - known:
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        raise ValueError(f"there is no {name!r}; " + (f"is it {near[0]!r}?" if near else f"there are {sorted(known)}"))
