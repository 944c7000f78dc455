"""The dashboard and the alert rules: every metric and label they ask for is one that a server tells."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import ProcessCollector
from prometheus_client.registry import CollectorRegistry

from headway_server.monitoring.metrics import FAMILIES

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_OF_PROMETHEUS = {"job", "instance", "le"}


@pytest.fixture(scope="module")
def told() -> dict[str, set[str]]:
    """Labels of every sample that a server tells, by name."""
    samples = {
        family.name + suffix: set(family.labels) | _OF_PROMETHEUS
        for family in FAMILIES
        for suffix in _SUFFIXES[family.kind]
    }
    process = ProcessCollector(registry=CollectorRegistry()).collect()
    return samples | {sample.name: _OF_PROMETHEUS for metric in process for sample in metric.samples}


def _dashboard_queries(root: Path) -> Iterator[str]:
    dashboard = json.loads((root / "docker/monitoring/dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (str(one["query"]) for one in dashboard["templating"]["list"])


def _alert_queries(root: Path) -> Iterator[str]:
    for group in yaml.safe_load((root / "docker/monitoring/alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


@pytest.mark.parametrize("queries", [_dashboard_queries, _alert_queries])
def test_queries_ask_for_metrics_and_labels_that_exist(root: Path, told: dict[str, set[str]], queries) -> None:
    asked: set[str] = set()
    for query in queries(root):
        for name, matchers in re.findall(r"\b((?:headway|process)_\w+)\b(?:\{([^}]*)\})?", query):
            assert name in told, query
            assert set(re.findall(r"(\w+)\s*[=!]~?[=~]?\s*\"", matchers)) <= told[name], query
            asked.add(name)
        grouped = {label for found in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r",\s*", found)}
        names = re.findall(r"\b((?:headway|process)_\w+)\b", query)
        assert not grouped or grouped <= set().union(*(told[name] for name in names)), query
    assert len(asked) > 10


def test_the_dashboard_shows_every_metric(root: Path) -> None:
    shown = " ".join(_dashboard_queries(root))
    assert [family.name for family in FAMILIES if family.name not in shown] == ["headway_build_info"]


def _promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    return found


@pytest.mark.parametrize(
    "command",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts-test.yml")],
)
def test_prometheus_takes_the_rules_and_they_fire_as_told(root: Path, command: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [_promtool(), *command], cwd=root / "docker/monitoring", capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_prometheus_and_the_compose_file_agree_on_the_port(root: Path) -> None:
    compose = yaml.safe_load((root / "docker-compose.yml").read_text())
    config = yaml.safe_load((root / "docker/monitoring/prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    port = compose["services"]["server"]["environment"]["HEADWAY_METRICS_PORT"]
    assert job["static_configs"][0]["targets"] == [f"server:{port}"]
    for name in ("prometheus", "grafana"):
        mounted = [volume.split(":")[0] for volume in compose["services"][name]["volumes"] if volume.startswith(".")]
        assert all((root / path).exists() for path in mounted)
        assert compose["services"][name]["profiles"] == ["monitoring"]
