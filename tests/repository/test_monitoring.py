"""The dashboard and the alert rules: every metric and label they ask for is one that a server tells."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import ProcessCollector
from prometheus_client.registry import CollectorRegistry

from headway_client import Client, HeadwayError
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


def test_prometheus_itself_answers_every_query_from_a_server_under_load(root: Path, tmp_path: Path) -> None:
    """Reads the shipped models' server for some seconds, with the alert rules that are shipped."""
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not installed (Debian has a package)")
    models = root / "models"
    command = [sys.executable, "-m", "headway_server", "--store", str(models), "--port", "0", "--metrics-port", "0"]
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "server.log").open("w"))
        server = stack.enter_context(
            subprocess.Popen([*command, "--log-format", "json"], stdout=subprocess.PIPE, stderr=log, text=True)
        )
        stack.callback(server.terminate)
        assert server.stdout is not None
        address = server.stdout.readline().split(" on ")[1].split()[0]
        lines = map(json.loads, (tmp_path / "server.log").read_text().splitlines())
        metrics_port = next(line["port"] for line in lines if line["event"] == "metrics")
        config = yaml.safe_load((root / "docker/monitoring/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(root / "docker/monitoring/alerts.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{metrics_port}"]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"127.0.0.1:{free.getsockname()[1]}"
        flags = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        reader = stack.enter_context(
            subprocess.Popen([prometheus, *flags, f"--web.listen-address={url}"], stderr=subprocess.DEVNULL)
        )
        stack.callback(reader.terminate)

        def ask(path: str, **parameters: str) -> Any:
            query = urllib.parse.urlencode(parameters)
            with urllib.request.urlopen(f"http://{url}/api/v1/{path}?{query}", timeout=10) as response:
                return json.load(response)["data"]

        with Client(address) as client:
            end = time.monotonic() + 30
            unanswered: dict[str, str] = {}
            while time.monotonic() < end:
                client.generate_text("To be", model="shakespeare", max_new_tokens=8)
                client.translate_text(["A dog.", "A man rides a red bicycle."], model="multi30k-en-de")
                client.classify_text(["Stocks fell", "A long text about oil prices and stocks"], model="ag-news")
                with suppress(HeadwayError):
                    client.classify_text("a", model="absent")
                time.sleep(0.3)
                try:
                    asked = {
                        query: _as_asked(query) for query in _dashboard_queries(root) if "label_values" not in query
                    }
                    unanswered = {query: one for query, one in asked.items() if not ask("query", query=one)["result"]}
                except OSError:  # it is starting
                    continue
                if not unanswered:
                    break
        assert not unanswered
        groups = ask("rules")["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
        assert ask("alerts")["alerts"] == []


def _as_asked(query: str) -> str:
    """Fills in what Grafana fills in."""
    return query.replace("$__rate_interval", "5s").replace("$model", ".*").replace("prometheus", "up")


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
