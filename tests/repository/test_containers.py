"""The compose file: hardening, limits, health, and the time a server has to drain."""

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
    assert [port.rpartition(":")[2] for port in service["ports"]] == [
        "50051",
        service["environment"]["HEADWAY_HTTP_PORT"],
    ]
    assert all(port.startswith("${HEADWAY_BIND:-127.0.0.1}:") for port in service["ports"])
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", _SERVERS)
def test_a_server_has_time_to_drain_before_it_is_killed(compose: dict[str, Any], name: str) -> None:
    grace_s = int(compose["services"][name]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= float(compose["services"][name]["environment"]["HEADWAY_DRAIN_TIMEOUT"]) + 5
    assert grace_s >= ServerSettings.model_fields["drain_timeout"].default + 5


def test_the_compose_file_sets_only_settings_the_server_has(compose: dict[str, Any]) -> None:
    inside = {key.removeprefix("HEADWAY_") for name in _SERVERS for key in compose["services"][name]["environment"]}
    assert {name.lower() for name in inside} <= set(ServerSettings.model_fields)


def test_what_is_built_here_is_asked_of_no_registry(root: Path, compose: dict[str, Any]) -> None:
    built = [service for service in compose["services"].values() if "build" in service]
    assert [service["pull_policy"] for service in built] == ["never"] * 3
    dockerfile = (root / "Dockerfile").read_text()
    assert "# syntax=" not in dockerfile
    assert set(re.findall(r"^FROM (\S+:\S+)", dockerfile, flags=re.MULTILINE)) == {"python:${PYTHON_VERSION}-slim"}


def test_the_gpu_server_reserves_an_nvidia_device(compose: dict[str, Any]) -> None:
    (device,) = compose["services"]["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_the_load_tester_waits_for_a_healthy_server(compose: dict[str, Any]) -> None:
    load = compose["services"]["load"]
    assert load["depends_on"] == {"server": {"condition": "service_healthy"}}
    name, *arguments = load["command"]
    parsed = get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]  # a group
    assert (parsed.params["rate"], parsed.params["duration"]) == (2, 30)


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
    command = [sys.executable, "-I", str(root / "docker" / "health_probe.py"), address]
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_the_health_check_tells_serving_from_draining_and_from_nothing(
    root: Path, health_service: tuple[str, health.HealthServicer]
) -> None:
    address, servicer = health_service
    assert _probe(root, address) == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert _probe(root, address) == 1
    assert _probe(root, "127.0.0.1:9") == 1
