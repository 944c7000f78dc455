"""What the distributions have in common. `make lint` holds what each declares against what it imports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

_FOLDERS = ("proto", "server", "client", "training", "export")


def _project(root: Path, folder: str) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
    return project


def _names(requirements: object) -> set[str]:
    """Names of a list of requirements, without extras and versions."""
    assert isinstance(requirements, list)
    return {match[0].lower() for text in requirements if (match := re.match(r"[A-Za-z0-9._-]+", text))}


def _extras(project: dict[str, object]) -> set[str]:
    optional = project.get("optional-dependencies", {})
    assert isinstance(optional, dict)
    return set().union(*(_names(requirements) for requirements in optional.values()))


@pytest.mark.parametrize("folder", _FOLDERS)
def test_every_declared_library_is_explained(root: Path, folder: str) -> None:
    project = _project(root, folder)
    explained = set(re.findall(r"^\| `([^`]+)` \|", (root / "docs" / "libraries.md").read_text(), flags=re.MULTILINE))
    third_party = {name for name in _names(project["dependencies"]) | _extras(project) if "headway" not in name}
    assert sorted(third_party - explained) == [], "add a line to docs/libraries.md"


def test_all_distributions_have_one_version_and_one_licence(root: Path) -> None:
    projects = [_project(root, folder) for folder in _FOLDERS]
    assert len({str(project["version"]) for project in projects}) == 1
    assert {project["license"] for project in projects} == {"Apache-2.0"}
    assert {project["requires-python"] for project in projects} == {">=3.11"}
