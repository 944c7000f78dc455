"""Several servers behind one client: calls go to those that are healthy, and retries have a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import pytest
from rule_server import Fault, RuleServer

from headway_client import Client, RetryPolicy, UnavailableError

BROKEN = Fault(grpc.StatusCode.UNAVAILABLE, reason="DRAINING")


@pytest.fixture
def two_servers() -> Iterator[tuple[RuleServer, RuleServer]]:
    servers = RuleServer(), RuleServer()
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def client(two_servers) -> Iterator[Client]:
    with Client(",".join(server.address for server in two_servers), timeout_s=20) as client:
        client.wait_ready(20)
        yield client


def count(server: RuleServer) -> int:
    return len(server.rules.requests)


def call_until(client: Client, is_so: Callable[[], bool]) -> None:
    """Calls until something is so."""
    give_up = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < give_up
        client.classify_text(["star"])
        time.sleep(0.005)


def test_a_server_that_says_it_is_not_serving_gets_no_calls_until_it_serves_again(two_servers, client):
    well, sick = two_servers
    call_until(client, lambda: count(well) > 0 and count(sick) > 0)
    sick.rules.serving = False
    before = -1

    def is_left_alone() -> bool:
        nonlocal before
        was, before = before, count(sick)
        for _ in range(8):
            client.classify_text(["star"])
        return was == count(sick)

    call_until(client, is_left_alone)
    before = count(sick)
    for _ in range(50):
        client.classify_text(["star"])
    assert count(sick) == before
    sick.rules.serving = True
    call_until(client, lambda: count(sick) > before + 2)


def test_a_server_that_is_slow_gets_no_calls_once_it_drains_and_its_running_call_is_answered(two_servers, client):
    _, slow = two_servers
    slow.rules.delay_s = 0.5
    call_until(client, lambda: count(slow) > 0)
    slow.rules.serving = False
    time.sleep(0.3)  # for the watch to tell the client
    before, began = count(slow), time.monotonic()
    for _ in range(20):
        client.classify_text(["star"])
    assert count(slow) == before
    assert time.monotonic() - began < 5


def test_no_call_fails_when_one_of_two_servers_is_killed(two_servers, client):
    killed, well = two_servers
    call_until(client, lambda: count(killed) > 0 and count(well) > 0)
    killed.stop()
    before = count(well)
    for _ in range(50):
        client.classify_text(["star"])
    assert count(well) == before + 50
    killed.start()
    before = count(killed)
    call_until(client, lambda: count(killed) > before)


def test_calls_fail_and_say_so_when_no_server_is_healthy(two_servers, client):
    for server in two_servers:
        server.rules.serving = False
    time.sleep(0.3)
    with pytest.raises(UnavailableError, match="unhealthy"):
        client.classify_text(["star"], timeout_s=0.5)
    for server in two_servers:
        server.rules.serving = True
    assert client.classify_text(["star"]).results


def test_a_client_retries_half_of_its_budget_and_no_more_until_calls_succeed(two_servers):
    server, _ = two_servers
    policy = RetryPolicy(max_attempts=2, initial_backoff_s=0.001, budget=8, budget_ratio=0.5)
    with Client(server.address, retry=policy) as client, ExitStack() as stack:
        for _ in range(10):
            server.rules.faults.extend([BROKEN, BROKEN])
        stack.callback(server.rules.faults.clear)
        for _ in range(2):  # two failures each, of which the last is not retried
            with pytest.raises(UnavailableError):
                client.classify_text(["star"])
        assert count(server) == 4
        for _ in range(3):  # half of the budget has gone: each call is sent once
            with pytest.raises(UnavailableError):
                client.classify_text(["star"])
        assert count(server) == 7
        server.rules.faults.clear()
        for _ in range(10):
            client.classify_text(["star"])
        server.rules.faults.append(BROKEN)
        assert client.classify_text(["star"]).results  # retried again


def test_what_costs_no_server_anything_is_retried_whatever_the_budget(two_servers):
    server, _ = two_servers
    with Client(server.address, retry=RetryPolicy(initial_backoff_s=0.001, budget=1)) as client:
        client.classify_text(["star"])
        for _ in range(6):
            server.rules.faults.append(Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_s=0.001))
        assert client.classify_text(["star"]).results
        assert count(server) == 8


@pytest.mark.parametrize(("field", "value"), [("budget", -1), ("budget_ratio", 1.5)])
def test_a_budget_out_of_its_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        RetryPolicy(**{field: value})
