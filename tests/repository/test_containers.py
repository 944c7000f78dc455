"""Compose file and Dockerfile hold together: stages, hardening, health and the time a server has to drain."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.main import get_command

from headway_client.cli import app
from headway_server.settings import ServerSettings

_SERVERS = ("server", "server-gpu")


@pytest.fixture(scope="module")
def compose(root: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((root / "docker-compose.yml").read_text())
    return parsed


@pytest.fixture(scope="module")
def dockerfile(root: Path) -> str:
    """The Dockerfile without comments, continued lines joined."""
    text = (root / "Dockerfile").read_text().replace("\\\n", " ")
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def _stages(dockerfile: str) -> dict[str, str]:
    """Base of every stage, by the stage's name."""
    return {name: base for base, name in re.findall(r"^FROM (\S+) AS (\S+)$", dockerfile, flags=re.MULTILINE)}


def test_the_services_and_their_profiles_are_the_documented_ones(compose: dict[str, Any]) -> None:
    profiles = {name: service.get("profiles", []) for name, service in compose["services"].items()}
    assert profiles == {"server": [], "server-gpu": ["gpu"], "load": ["load"]}


def test_every_service_is_hardened(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name


@pytest.mark.parametrize("name", _SERVERS)
def test_a_server_reads_its_models_listens_on_loopback_and_has_limits(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    (models,) = service["volumes"]
    assert (models["target"], models["read_only"]) == ("/models", True)
    (port,) = service["ports"]
    assert port.startswith("${HEADWAY_BIND:-127.0.0.1}:")
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", _SERVERS)
def test_a_server_has_time_to_drain_before_it_is_killed(compose: dict[str, Any], name: str) -> None:
    grace_s = int(compose["services"][name]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= float(compose["services"][name]["environment"]["HEADWAY_DRAIN_TIMEOUT"]) + 5
    assert grace_s >= ServerSettings.model_fields["drain_timeout"].default + 5


def test_images_and_compose_set_only_settings_the_server_has(compose: dict[str, Any], dockerfile: str) -> None:
    inside = set(re.findall(r"\bHEADWAY_([A-Z_]+)=", dockerfile))
    inside |= {key.removeprefix("HEADWAY_") for name in _SERVERS for key in compose["services"][name]["environment"]}
    assert {name.lower() for name in inside} <= set(ServerSettings.model_fields)
    assert {"STORE", "HOST", "PORT"} <= inside


def test_the_gpu_server_reserves_an_nvidia_device(compose: dict[str, Any]) -> None:
    (device,) = compose["services"]["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_the_load_tester_waits_for_a_healthy_server(compose: dict[str, Any]) -> None:
    load = compose["services"]["load"]
    assert load["depends_on"] == {"server": {"condition": "service_healthy"}}
    name, *arguments = load["command"]
    parsed = get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]  # a group
    assert (parsed.params["rate"], parsed.params["duration"]) == (2, 30)


def test_every_service_is_built_from_a_stage_and_every_stage_from_something(
    compose: dict[str, Any], dockerfile: str
) -> None:
    stages = _stages(dockerfile)
    for name, service in compose["services"].items():
        assert service["build"]["target"] in stages, name
    for copied in re.findall(r"COPY --from=(\S+)", dockerfile):
        assert copied in stages
    for stage, base in stages.items():
        assert base in stages or base == "python:${PYTHON_VERSION}-slim", stage


def test_images_run_as_nobody_else_and_stop_by_the_signal_that_drains(dockerfile: str) -> None:
    assert "USER 10001:10001" in dockerfile
    assert "STOPSIGNAL SIGTERM" in dockerfile
    assert "HEALTHCHECK" in dockerfile


def test_the_runtime_does_not_report_to_its_maker(root: Path, dockerfile: str) -> None:
    assert "ORT_DISABLE_TELEMETRY=1" in dockerfile
    assert "export ORT_DISABLE_TELEMETRY := 1" in (root / "Makefile").read_text()


def test_the_builders_find_every_file_they_need(root: Path, dockerfile: str) -> None:
    let_in = {line[1:].rstrip("/") for line in (root / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for source in re.findall(r"^COPY (?!--from)(\S+) ", dockerfile, flags=re.MULTILINE):
        assert (root / source).exists(), source
        assert source.split("/")[0] in let_in, source


@pytest.fixture
def health_service() -> Iterator[tuple[str, health.HealthServicer]]:
    """Address of a server that has the health service alone, and the service."""
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    stopped: threading.Event = server.stop(grace=None)
    stopped.wait()


def _probe(root: Path, address: str) -> int:
    command = [sys.executable, str(root / "docker" / "health_probe.py"), "--address", address, "--timeout-s", "2"]
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_the_health_check_tells_serving_from_draining_and_from_nothing(
    root: Path, health_service: tuple[str, health.HealthServicer]
) -> None:
    address, servicer = health_service
    assert _probe(root, address) == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert _probe(root, address) == 1
    assert _probe(root, "127.0.0.1:9") == 1
