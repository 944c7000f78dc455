"""The repository as the tests of this folder see it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "package_index: installs from the package index; skipped, with the reason, where it is out of reach"
    )


@pytest.fixture(scope="session")
def root() -> Path:
    """Folder of the repository."""
    return _ROOT


@pytest.fixture(scope="session")
def tracked_files(root: Path) -> list[Path]:
    """Every tracked file that is still there, by its path below the root."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [Path(name) for name in listing.stdout.split("\0") if name and (root / name).is_file()]
