"""The client without its extras: what it brings, and what it says of what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

_EVERYTHING_BUT_THE_COMMAND_LINE = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # an import of these fails
import headway_client
for module in pkgutil.iter_modules(headway_client.__path__, "headway_client."):
    if module.name not in ("headway_client.cli", "headway_client.__main__"):
        importlib.import_module(module.name)
print(len(headway_client.__all__))
"""


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    made: dict[str, Any] = tomllib.loads((root / "client" / "pyproject.toml").read_text())["project"]
    return made


def test_the_client_needs_nothing_of_its_extras(project: dict[str, Any]) -> None:
    assert {re.split("[=<>]", one)[0] for one in project["dependencies"]} == {
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


def test_the_command_is_the_program_that_looks_for_it(project: dict[str, Any]) -> None:
    assert project["scripts"] == {"headway": "headway_client.__main__:main"}
    ran = subprocess.run(
        [sys.executable, "-m", "headway_client", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("headway-client 0.")
