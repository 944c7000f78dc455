"""Packages of npm that clients in the tests need, installed once and kept in pytest's cache."""

import shutil
import subprocess
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent / "node"
_ENOUGH_S = 60


def install(config: pytest.Config, name: str = "") -> Path:
    """Installs what `package.json`, or `NAME.package.json`, declares; returns the folder of the modules.

    Skips the test, with the reason, where there is no npm or no registry.
    """
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed; on Debian: apt-get install nodejs npm")
    declared = (_FOLDER / (f"{name}.package.json" if name else "package.json")).read_text()
    folder = Path(config.cache.mkdir(f"node-{name}" if name else "node"))
    installed = folder / "installed.json"
    if not installed.exists() or installed.read_text() != declared:
        (folder / "package.json").write_text(declared)
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_ENOUGH_S, check=False)
        if ran.returncode:
            pytest.skip(f"npm cannot install the client: {ran.stderr.strip().splitlines()[-1]}")
        installed.write_text(declared)
    return folder / "node_modules"
