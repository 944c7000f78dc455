"""What the distributions have in common. `make lint` holds what each declares against what it imports."""

from __future__ import annotations

import tomllib
from pathlib import Path

_FOLDERS = ("proto", "server", "client", "training", "export")


def _project(root: Path, folder: str) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
    return project


def test_all_distributions_have_one_version_and_one_licence(root: Path) -> None:
    projects = [_project(root, folder) for folder in _FOLDERS]
    assert len({str(project["version"]) for project in projects}) == 1
    assert {project["license"] for project in projects} == {"Apache-2.0"}
    assert {project["requires-python"] for project in projects} == {">=3.11"}
