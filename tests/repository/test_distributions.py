"""What the distributions have in common. `make lint` holds what each declares against what it imports."""

from __future__ import annotations

import re
import subprocess
import sys
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


_EVERYTHING_BUT_THE_COMMAND_LINE = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # an import of these fails
import headway_client
for module in pkgutil.iter_modules(headway_client.__path__, "headway_client."):
    if module.name not in ("headway_client.cli", "headway_client.__main__"):
        importlib.import_module(module.name)
print(len(headway_client.__all__))
"""


def test_the_client_needs_nothing_of_its_extras(root: Path) -> None:
    project = _project(root, "client")
    assert _names(project["dependencies"]) == {
        "googleapis-common-protos",
        "grpcio",
        "grpcio-health-checking",
        "grpcio-status",
        "headway-proto",
        "protobuf",
    }
    of_extras = ["typer", "rich", "hdrh", "numpy", "matplotlib", "PIL", "opentelemetry"]
    command = [sys.executable, "-c", _EVERYTHING_BUT_THE_COMMAND_LINE, *of_extras]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 90


def test_the_command_says_what_to_install_where_it_is_missing() -> None:
    program = "import sys; sys.modules['typer'] = None; import headway_client.__main__ as program; program.main()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == "headway: the command line needs typer; run: pip install 'headway-client[cli]'\n"


def test_the_command_is_the_program_that_looks_for_it(root: Path) -> None:
    assert _project(root, "client")["scripts"] == {"headway": "headway_client.__main__:main"}
    ran = subprocess.run(
        [sys.executable, "-m", "headway_client", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("headway-client 0.")
