"""What the distributions have in common. `make lint` holds what each declares against what it imports."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

_FOLDERS = ("proto", "server", "client", "training", "export")


def _project(root: Path, folder: str) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
    return project


def test_all_distributions_have_one_version_and_one_licence(root: Path) -> None:
    projects = [_project(root, folder) for folder in _FOLDERS]
    assert len({str(project["version"]) for project in projects}) == 1
    assert {project["license"] for project in projects} == {"Apache-2.0"}
    assert {project["requires-python"] for project in projects} == {">=3.11"}


def _with_all_that_they_need(requirements: Iterable[str]) -> set[str]:
    """The names of installed packages and of everything that they need, and what that needs."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        place = re.sub(r"[-_.]+", "-", one.name).lower(), frozenset(one.extras)
        if place not in found:
            found.add(place)
            needed = map(Requirement, requires(one.name) or ())
            extras = one.extras | {""}
            waiting += [
                it for it in needed if it.marker is None or any(it.marker.evaluate({"extra": name}) for name in extras)
            ]
    return {name for name, _ in found}


def test_the_wheels_for_a_gpu_machine_are_all_that_is_needed_there(root: Path) -> None:
    page = (root / "docs" / "gpu.md").read_text(encoding="utf-8")
    [there] = re.findall(r"for an interpreter with torch and the usual scientific packages \((.*?)\)", page, re.DOTALL)
    [brought] = re.findall(r"^```\n(annotated-doc .*?)^```", page, re.DOTALL | re.MULTILINE)
    own = [f"headway-{folder}" for folder in _FOLDERS if folder != "client"]
    needed = _with_all_that_they_need(
        [*own, "headway-client[load]", "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]
    )
    had = _with_all_that_they_need(["torch", *there.replace("\n", " ").split(", ")])
    missing = {name for name in needed - had if not name.startswith("headway-")}
    assert missing - set(brought.split()) == set()
