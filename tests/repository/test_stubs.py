"""The committed stubs are what the .proto files generate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def _stubs(folder: Path) -> dict[str, str]:
    """Every generated file below `folder`, by name."""
    return {path.name: path.read_text() for path in (folder / "headway").rglob("*_pb2*.py*") if path.suffix != ".pyc"}


def test_the_stubs_beside_the_protos_equal_freshly_generated_ones(root: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(
        ["bash", str(root / "proto" / "generate.sh"), str(tmp_path)], env=environment, check=True, capture_output=True
    )
    fresh, committed = _stubs(tmp_path), _stubs(root / "proto")
    assert fresh, "generate.sh made no stub"
    assert sorted(committed) == sorted(fresh), "files differ; run `make proto`"
    assert [name for name in fresh if committed[name] != fresh[name]] == [], "run `make proto`"
