"""What the documents say that there is: tables that repeat the code, commands with their flags, links and files."""

from __future__ import annotations

import io
import re
import runpy
import tomllib
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import called, first_names, flags_of, names, pages_of_today, rows, unknown_flags, without_code
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from tests.clients.client import clients

from headway.v1 import (
    caption_service_pb2,
    common_pb2,
    image_generation_service_pb2,
    inspection_service_pb2,
)
from headway_client.cli import app as client_app
from headway_load import LoadPlan, Workload
from headway_server import keys
from headway_server.bundles import Manifest, SamplingDefaults, Variant
from headway_server.configuration import flag_name, variable_name
from headway_server.services.status import INTERNAL, OUTCOMES
from headway_server.settings import ServerSettings
from headway_training.cli import app as training_app

_FOLDERS = ("proto", "server", "client", "training", "export")
Listed = set[Any] | dict[str, Any]


# Settings


def _default(value: object) -> str:
    """A setting's default as a table has it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _settings(kind: type[BaseModel], *place: str) -> dict[str, tuple[str, str | None]]:
    """Environment variable and default of each flag; no default where it is derived or the flag has none."""
    found: dict[str, tuple[str, str | None]] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _settings(field.annotation, *place, name)
        elif name != "models":
            flag = flag_name((*place, name))
            is_told = field.default not in (None, (), PydanticUndefined)
            found[flag] = (
                variable_name(ServerSettings, (*place, name)),
                _default(field.default) if is_told else None,
            )
    return found


@pytest.mark.parametrize(("page", "is_whole"), [("operations.md", True), ("monitoring.md", False)])
def test_the_table_of_settings_has_every_flag_with_its_variable_and_default(
    root: Path, page: str, is_whole: bool
) -> None:
    settings = _settings(ServerSettings)
    told = {}
    for cells in rows(root / "docs" / page, "flag"):
        if not cells[0].startswith("`--"):
            continue
        flags = [flag for flag in re.findall(r"`([^`]+)`", cells[0]) if not flag.startswith("--no-")]
        variables = re.findall(r"`([^`]+)`", cells[1])
        defaults = cells[2].split(", ") if len(cells[2].split(", ")) == len(flags) else [cells[2]] * len(flags)
        for flag, variable, default in zip(flags, variables, defaults, strict=True):
            own = settings[flag][1]
            told[flag] = (variable, None if own is None else default)
    assert told == (settings if is_whole else {flag: settings[flag] for flag in told})


# Tables


def _fields(kind: Any, *without: str) -> set[str]:
    return {field.name for field in fields(kind)} - set(without)


def _of_message(*messages: Any) -> set[str]:
    return {field.name for message in messages for field in message.DESCRIPTOR.fields}


def _compose_variables(root: Path) -> dict[str, str]:
    return dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (root / "docker-compose.yml").read_text()))


def _told_compose_variables(root: Path) -> dict[str, str]:
    told: dict[str, str] = {}
    for variables, defaults, *_ in rows(root / "docs/operations.md", "variable"):
        found = re.findall(r"`(\w+)`", variables)
        values = [value.strip("`").replace("none", "") for value in defaults.split(", ")]
        told |= dict(zip(found, values * (len(found) // len(values)), strict=True))
    return told


def _model_sizes(root: Path) -> dict[str, str]:
    """Megabytes of the bundles of each row of the table of shipped models."""
    sizes = {}
    for cells in rows(root / "models/README.md", "model | task"):
        folders = [root / "models" / name for name in names(cells[0])]
        size = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
        sizes[cells[0]] = f"{size / 1e6:.1f} MB"
    return sizes


def _users_of_libraries(root: Path) -> dict[str, set[str]]:
    users: dict[str, set[str]] = {}
    for folder in _FOLDERS:
        project = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
        for requirement in chain(project["dependencies"], *project.get("optional-dependencies", {}).values()):
            name = re.match(r"[A-Za-z0-9._-]+", requirement)
            assert name
            if "headway" not in name[0]:
                users.setdefault(name[0].lower(), set()).add(folder)
    return users


def _told_users_of_libraries(root: Path) -> dict[str, set[str]]:
    return {
        names(cells[0]).pop().lower(): set(re.findall(rf"\b(?:{'|'.join(_FOLDERS)})\b", cells[1]))
        for cells in rows(root / "docs/libraries.md", "library | used by")
    }


_TABLES: Mapping[str, tuple[Callable[[Path], Listed], Callable[[Path], Listed]]] = {
    "errors": (
        lambda root: {(cells[0], cells[1]) for cells in rows(root / "docs/api.md", "code | reason in `ErrorInfo`")},
        lambda _: {(outcome.code_name, outcome.reason) for outcome in (*OUTCOMES.values(), INTERNAL)},
    ),
    "keys of a manifest": (
        lambda root: first_names(root / "docs/bundle.md", "key") - {"more_eos"},
        lambda _: set(Manifest.model_fields),
    ),
    "keys of a variant": (
        lambda root: set(re.findall(r"^- `(\w+)`:", _text(root, "bundle"), flags=re.MULTILINE)),
        lambda _: set(Variant.model_fields),
    ),
    "parameters that a model has defaults for": (
        lambda root: {
            re.findall(r"\w+", row[0])[-1]
            for row in rows(root / "docs/api.md", "field of `parameters` | range")
            if row[2].startswith("the model's")
        },
        lambda _: set(SamplingDefaults.model_fields),
    ),
    "parameters of a translation": (
        lambda root: {re.findall(r"\w+", row[0])[0] for row in rows(root / "docs/translation.md", "field | range")},
        lambda _: _of_message(common_pb2.DecodingParameters),
    ),
    "fields of an image generation request": (
        lambda root: first_names(root / "docs/image-generation.md", "field | range and default"),
        lambda _: (
            _of_message(
                image_generation_service_pb2.GenerateImageRequest,
                image_generation_service_pb2.StreamGenerateImageRequest,
                image_generation_service_pb2.DiffusionParameters,
            )
            - {"model", "model_version", "parameters"}
        ),
    ),
    "fields of captions": (
        lambda root: first_names(root / "docs/captions.md", "field | meaning"),
        lambda _: _of_message(caption_service_pb2.CaptionImageRequest) - {"model", "model_version"},
    ),
    "fields of attention": (
        lambda root: first_names(root / "docs/attention.md", "field | default"),
        lambda _: _of_message(inspection_service_pb2.AttentionOptions),
    ),
    "fields of a load test": (
        lambda root: names(
            re.findall(r"^At the top: (.*?)\. In a workload", _text(root, "load-testing"), re.DOTALL | re.MULTILINE)[0]
        ),
        lambda _: _fields(LoadPlan, "workloads"),
    ),
    "fields of a workload": (
        lambda root: names(re.findall(r"In a workload: (.*?)\. ", _text(root, "load-testing"), re.DOTALL)[0]),
        lambda _: _fields(Workload, "input_options"),
    ),
    "alerts": (
        lambda root: set(
            re.findall(r"\bHeadway\w+", " ".join(row[0] for row in rows(root / "docs/monitoring.md", "alert")))
        ),
        lambda root: {
            rule["alert"]
            for group in yaml.safe_load((root / "docker/monitoring/alerts.yml").read_text())["groups"]
            for rule in group["rules"]
        },
    ),
    "variables of the compose file": (_told_compose_variables, _compose_variables),
    "images": (
        lambda root: first_names(root / "docs/operations.md", "target"),
        lambda root: set(
            re.findall(r"=~ \^\((.*?)\)\$", (root / "docker/make-environment.sh").read_text())[0].split("|")
        ),
    ),
    "overlays": (
        lambda root: first_names(root / "docs/kubernetes.md", "overlay"),
        lambda root: {folder.name for folder in (root / "deploy/kubernetes/overlays").iterdir()},
    ),
    "components": (
        lambda root: first_names(root / "docs/kubernetes.md", "component"),
        lambda root: {folder.name for folder in (root / "deploy/kubernetes/components").iterdir()},
    ),
    "shipped models": (
        lambda root: first_names(root / "models/README.md", "model | task"),
        lambda root: {manifest.parents[1].name for manifest in (root / "models").glob("*/*/bundle.json")},
    ),
    "sizes of the shipped models": (
        lambda root: {cells[0]: cells[2] for cells in rows(root / "models/README.md", "model | task")},
        _model_sizes,
    ),
    "documents": (
        lambda root: set(re.findall(r"^\| \[[^]]*\]\(([\w-]+(?:\.md|/))\)", _text(root, "README"), flags=re.MULTILINE)),
        lambda root: (
            {page.name for page in (root / "docs").glob("*.md")} - {"README.md", "glossary.md"}
            | {"decisions/", "journal/"}
        ),
    ),
    "files of the exporter": (
        lambda root: (
            first_names(root / "docs/export.md", "file | content") - names(_row(root, "`huggingface/`"))
            | {"huggingface/"}
        ),
        lambda root: (
            {file.name for file in (root / "export/headway_export").glob("[a-z]*.py")} | {"huggingface/", "tasks/"}
        ),
    ),
    "files of the benchmarks": (
        lambda root: first_names(root / "benchmarks/README.md", "file | holds"),
        lambda root: (
            {file.name for file in (root / "benchmarks").iterdir() if file.suffix in (".py", ".sh")} - {"__init__.py"}
            | {f"{file.parent.name}/" for file in (root / "benchmarks").glob("*/__init__.py")}
        ),
    ),
    "libraries of developers": (
        lambda root: first_names(root / "docs/libraries.md", "library | reason"),
        lambda root: (
            set(re.findall(r"^[A-Za-z][\w-]*", (root / "requirements-dev.txt").read_text(), flags=re.MULTILINE))
            | {"build", "check-wheel-contents", "cyclonedx-bom", "editables", "hatchling", "pip-audit", "twine", "uv"}
            # of the Makefile, and of docker/sbom.py
        ),
    ),
    "clients of others": (
        lambda root: {cells[0]: cells[1] for cells in rows(root / "docs/clients.md", "client | packages")},
        lambda root: {client.title: client.versions for client in clients(root / "tests/clients/programs")},
    ),
    "users of libraries": (_told_users_of_libraries, _users_of_libraries),
}


def _text(root: Path, page: str) -> str:
    return (root / "docs" / f"{page}.md").read_text(encoding="utf-8")


def _row(root: Path, first: str) -> str:
    return next(line for line in _text(root, "export").split("\n") if line.startswith(f"| {first} |"))


@pytest.mark.parametrize("table", _TABLES)
def test_a_table_of_a_document_has_what_the_code_has(root: Path, table: str) -> None:
    told, exists = _TABLES[table]
    assert told(root) == exists(root)


def test_the_page_of_graphs_names_every_tensor_of_the_shipped_models(root: Path) -> None:
    tensors = {
        re.sub(r"_\d+$", "_j", re.sub(r"_\d+(?=$|\.)", "_i", spec.name, count=1))
        for file in (root / "models").glob("*/*/bundle.json")
        for variant in Manifest.model_validate_json(file.read_bytes()).variants.values()
        for graph in variant.graphs.values()
        for spec in (*graph.inputs, *graph.outputs)
    }
    assert tensors - names(_text(root, "graphs")) == set()


# Commands and files


def _flags_of_server() -> dict[str, set[str]]:
    flags = _settings(ServerSettings).keys()
    groups = {f"--{group}.{flag[2:]}" for group in ("engine", "batching", "versions", "connection") for flag in flags}
    own = flags | groups | {f"--no-{flag[2:]}" for flag in flags}
    told = io.StringIO()
    with redirect_stdout(told), suppress(SystemExit):
        keys.main(["create", "--help"])
    return {"": own, "config": own, "keys": set(re.findall(r"--[a-z][\w-]*", told.getvalue()))}


_PROGRAMS: Mapping[str, Callable[[], dict[str, set[str]]]] = {
    "headway": lambda: flags_of(client_app),
    "headway-server": _flags_of_server,
    "headway-train": lambda: flags_of(training_app),
}
"""Those whose flags are known without torch; that of the exporter: `tests/export/test_bring_your_own.py`."""


@pytest.mark.parametrize("program", _PROGRAMS)
def test_commands_of_the_documents_exist_with_their_flags(root: Path, program: str) -> None:
    commands = _PROGRAMS[program]()
    calls = list(called(root, pages_of_today(root), program))
    assert len(calls) > 10
    default = "" if program == "headway-server" else None
    unknown = {where: found for where, words in calls if (found := unknown_flags(words, commands, default))}
    assert unknown == {}


def test_files_that_a_document_names_exist(root: Path, tracked_files: list[Path]) -> None:
    ends = {"/" + path.as_posix() for path in tracked_files}
    missing = [
        f"{document}: {name}"
        for document in pages_of_today(root)
        for name in re.findall(r"`([\w./-]+\.(?:py|sh|proto|ya?ml))`", without_code((root / document).read_text()))
        if not any(end.endswith("/" + name) for end in ends)
    ]
    assert missing == []


def test_the_picture_of_speed_is_that_of_the_table(root: Path) -> None:
    script = runpy.run_path(str(root / "docs" / "speed.py"))
    assert script["PICTURE"].read_text(encoding="utf-8") == script["picture"]()


def test_the_readme_names_only_families_that_are_told_with_their_tests(root: Path) -> None:
    told = (root / "docs/huggingface.md").read_text(encoding="utf-8").lower()
    for _, families in rows(root / "README.md", "task | families"):
        for family in re.split(r"[,;:] ", re.sub(r"\(.*?\)", "", families)):
            [name, *_] = re.split(r" (?=\d|and)", family.strip())
            assert name.lower() in told, family
