"""What the distributions have in common. `make lint` holds what each declares against what it imports."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires, version
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_FOLDERS = ("proto", "server", "client", "training", "export")


def _project(root: Path, folder: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
    return project


def _requirements(project: dict[str, Any]) -> list[Requirement]:
    texts = chain(project["dependencies"], *project.get("optional-dependencies", {}).values())
    return [Requirement(text) for text in texts]


def test_all_distributions_have_one_version_and_one_licence(root: Path) -> None:
    projects = [_project(root, folder) for folder in _FOLDERS]
    [own_version] = {str(project["version"]) for project in projects}
    assert {project["license"] for project in projects} == {"Apache-2.0"}
    assert {project["requires-python"] for project in projects} == {">=3.11"}
    assert {tuple(project["classifiers"]) for project in projects} == {tuple(projects[0]["classifiers"])}
    own = [one for project in projects for one in _requirements(project) if one.name.startswith("headway-")]
    assert {str(one.specifier) for one in own} == {f"=={own_version}"}
    assert {(root / folder / "LICENSE").read_bytes() for folder in _FOLDERS} == {(root / "LICENSE").read_bytes()}


@pytest.mark.parametrize("folder", _FOLDERS)
def test_every_library_of_a_distribution_has_a_lower_bound_that_the_pinned_version_meets(
    root: Path, folder: str
) -> None:
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (root / "constraints.txt").read_text(), re.MULTILINE))
    pins = {canonicalize_name(name): pin for name, pin in pinned.items()}
    for one in _requirements(_project(root, folder)):
        assert {bound.operator for bound in one.specifier} & {">=", "=="}, one
        name = canonicalize_name(one.name)
        if name in pins:
            assert one.specifier.contains(pins[name]), one


@pytest.mark.parametrize("folder", _FOLDERS)
def test_a_wheel_holds_licence_readme_and_types(root: Path, folder: str, tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(root / folder)).build(directory=str(tmp_path), versions=["standard"])
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        [described] = [name for name in names if name.endswith(".dist-info/METADATA")]
        told = email.message_from_bytes(archive.read(described))
    packages = {name.split("/")[0] for name in names if "/" in name} - {described.split("/")[0]}
    assert f"{described.split('/')[0]}/licenses/LICENSE" in names
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert str(told.get_payload()).startswith(f"# headway-{folder}\n")
    assert not [name for name in names if name.endswith((".onnx", ".pyc"))]


@pytest.mark.parametrize(
    ("command", "distribution"), [("headway", "client"), ("headway-server", "server"), ("headway-train", "training")]
)
def test_a_command_tells_its_version(command: str, distribution: str) -> None:
    told = subprocess.run(
        [Path(sys.executable).with_name(command), "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"headway-{distribution} {version(f'headway-{distribution}')}\n"


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
