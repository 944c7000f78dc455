"""Every distribution declares exactly what it imports, and dependencies point one way (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

_PACKAGES = {
    "proto": "headway",
    "server": "headway_server",
    "client": "headway_client",
    "training": "headway_training",
    "export": "headway_export",
}
"""Import name of the package of each folder."""

_DISTRIBUTIONS = {
    "accelerate": "accelerate",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "hdrh": "hdrhistogram",
    "headway": "headway-proto",
    "headway_client": "headway-client",
    "headway_export": "headway-export",
    "headway_server": "headway-server",
    "headway_training": "headway-training",
    "llguidance": "llguidance",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "onnx": "onnx",
    "onnx_ir": "onnx-ir",
    "onnxruntime": "onnxruntime",
    "onnxscript": "onnxscript",
    "PIL": "pillow",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "rich": "rich",
    "sacrebleu": "sacrebleu",
    "safetensors": "safetensors",
    "sentencex": "sentencex",
    "sklearn": "scikit-learn",
    "structlog": "structlog",
    "tensorboard": "tensorboard",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "typer": "typer",
}
"""Distribution that a module comes from; the longest name that fits wins."""

_NEEDED_BUT_NOT_IMPORTED = {
    "training": {"tensorboard": "torch.utils.tensorboard imports it"},
    "export": {
        "onnx": "torch.onnx.export imports it",
        "onnxscript": "torch.onnx.export imports it",
        "onnxruntime": "the proof runs there: it comes with the server's extra",
    },
}
"""Declared dependencies that another library imports, with the reason."""

_FORBIDDEN = {
    "server": {"torch", "onnx", "onnxscript", "headway_client", "headway_training", "headway_export"},
    "client": {"torch", "onnx", "onnxruntime", "headway_server", "headway_training", "headway_export"},
    "training": {"onnx", "onnxruntime", "headway", "headway_server", "headway_export"},
    **{
        f"training/headway_training/{place}": {"headway_client", "headway_training.served.measures"}
        for place in ("cli.py", "data", "models", "recipes", "run.py", "tasks", "trainer.py")
    },
    "export": {"headway", "headway_client"},
    "server/headway_server/bundles": {"grpc", "onnxruntime"},
    "server/headway_server/runtime": {"grpc", "headway"},
    "server/headway_server/preprocessing": {"grpc", "headway", "onnxruntime"},
    "server/headway_server/decoding": {"grpc", "headway"},
    "server/headway_server/batching": {"grpc", "headway"},
    "server/headway_server/serving": {"grpc", "headway", "onnxruntime"},
    "server/headway_server/tasks": {"grpc", "headway", "onnxruntime"},
    "server/headway_server/transports": {"numpy", "onnxruntime"},
    "server/headway_server/decoding/core/scheduler.py": {"numpy", "onnxruntime", "headway_server.runtime"},
    "server/headway_server/decoding/runner/decoder.py": {"asyncio", "queue", "headway_server.decoding.core.scheduler"},
}
"""Modules that a folder or a file must not import, wherever in it the import stands."""


def _imports_of_file(path: Path) -> set[str]:
    """Every module that a file imports, dotted; `from package import name` gives `package` and `package.name`."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def _imports(path: Path) -> set[str]:
    """Every module that the files at or below `path` import."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return set().union(*(_imports_of_file(file) for file in files))


def _is_in(module: str, parent: str) -> bool:
    return module == parent or module.startswith(f"{parent}.")


def _distribution(module: str) -> str | None:
    """Distribution of a module; none for the standard library and for a bare namespace package."""
    if module.partition(".")[0] in sys.stdlib_module_names or module == "google":
        return None
    fitting = [name for name in _DISTRIBUTIONS if _is_in(module, name)]
    assert fitting, f"{module}: of no known distribution; name it in this test and in docs/libraries.md"
    return _DISTRIBUTIONS[max(fitting, key=len)]


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


@pytest.mark.parametrize("folder", _PACKAGES)
def test_a_distribution_declares_exactly_what_it_imports(root: Path, folder: str) -> None:
    project = _project(root, folder)
    own = str(project["name"])
    imported = {_distribution(module) for module in _imports(root / folder / _PACKAGES[folder])} - {None, own}
    extras = _extras(project)
    declared = _names(project["dependencies"])
    indirect = set(_NEEDED_BUT_NOT_IMPORTED.get(folder, {}))
    assert sorted(imported - declared - extras - indirect) == [], "imported and not declared"
    assert sorted(declared - imported - indirect) == [], "declared and not imported"


@pytest.mark.parametrize("place", _FORBIDDEN)
def test_dependencies_point_one_way(root: Path, place: str) -> None:
    path = root / place
    assert path.exists(), place
    wrong = sorted(
        module for module in _imports(path) if any(_is_in(module, forbidden) for forbidden in _FORBIDDEN[place])
    )
    assert wrong == []


@pytest.mark.parametrize("folder", _PACKAGES)
def test_every_declared_library_is_explained(root: Path, folder: str) -> None:
    project = _project(root, folder)
    explained = set(re.findall(r"^\| `([^`]+)` \|", (root / "docs" / "libraries.md").read_text(), flags=re.MULTILINE))
    third_party = {name for name in _names(project["dependencies"]) | _extras(project) if "headway" not in name}
    assert sorted(third_party - explained) == [], "add a line to docs/libraries.md"


def test_all_distributions_have_one_version_and_one_licence(root: Path) -> None:
    projects = [_project(root, folder) for folder in _PACKAGES]
    assert len({str(project["version"]) for project in projects}) == 1
    assert {project["license"] for project in projects} == {"Apache-2.0"}
    assert {project["requires-python"] for project in projects} == {">=3.11"}
