"""Server and client, each installed alone as their images are, bring no torch and no onnx, and work without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.package_index, pytest.mark.timeout(600)]

_IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
for name in names:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
print(json.dumps({"imported": names, "loaded": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


@pytest.fixture(scope="module", autouse=True)
def _package_index(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where pip cannot reach an index, with what pip said."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "0", "--timeout", "10"]
    command += ["download", "--quiet", "--no-deps", "--dest", str(tmp_path_factory.mktemp("probe"))]
    command += ["--constraint", str(root / "constraints.txt"), "iniconfig"]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no package index: {probe.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def environments(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Path]]]:
    """The environment of each image; they are made at once, on one core each."""
    folder = tmp_path_factory.mktemp("environments")
    with ThreadPoolExecutor() as pool:
        yield {target: pool.submit(_make, root, target, folder / target) for target in ("server-cpu", "client")}


def _make(root: Path, target: str, folder: Path) -> Path:
    """Makes the environment of an image and returns its folder."""
    command = ["bash", str(root / "docker" / "make-environment.sh"), target, str(folder)]
    made = subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return folder


def _run(*command: str | Path) -> str:
    """Standard output of a program, which must end well; it sees no packages but its environment's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("target", "package", "program", "foreign"),
    [
        ("server-cpu", "headway_server", "headway-server", {"headway_client", "headway_training", "headway_export"}),
        ("client", "headway_client", "headway", {"headway_server", "onnxruntime", "numpy"}),
    ],
)
def test_works_alone_without_torch_and_onnx(
    environments: dict[str, Future[Path]], target: str, package: str, program: str, foreign: set[str]
) -> None:
    environment = environments[target].result()
    programs = environment / "bin"

    (libraries,) = (environment / "lib").glob("python3.*/site-packages")
    for name in {"torch", "onnx", "onnxscript", "onnx_ir", "pip"} | foreign:
        assert not (libraries / name).exists(), name

    report = json.loads(_run(programs / "python", "-c", _IMPORT_EVERYTHING, package))
    assert f"{package}.cli" in {name.removesuffix(".app") for name in report["imported"]}
    assert {"torch", "onnx"} & set(report["loaded"]) == set()

    assert "usage" in _run(programs / program, "--help").lower()
