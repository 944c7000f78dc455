"""A real gRPC server that answers by simple rules, and both clients to call it alike."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rule_server import Fault, RuleServer

from headway_client import AsyncClient, Client

Connect = Callable[..., Any]


class Blocking:
    """Calls the blocking client."""

    kind = Client

    def __init__(self, address: str | None, **settings: Any) -> None:
        self.client = Client(address, **settings)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self.client, name)(*args, **options)

    def stream(self, name: str, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        with getattr(self.client, name)(*args, **options) as stream:
            return list(stream), stream.answer

    def close(self) -> None:
        self.client.close()


class Asynchronous:
    """Calls the asyncio client, on an event loop of its own."""

    kind = AsyncClient

    def __init__(self, address: str | None, **settings: Any) -> None:
        self.client = AsyncClient(address, **settings)
        self.loop = asyncio.new_event_loop()

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        return self.loop.run_until_complete(getattr(self.client, name)(*args, **options))

    def stream(self, name: str, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        async def collect() -> tuple[list[Any], Any]:
            async with getattr(self.client, name)(*args, **options) as stream:
                return [delta async for delta in stream], stream.answer

        return self.loop.run_until_complete(collect())

    def close(self) -> None:
        self.loop.run_until_complete(self.client.aclose())
        self.loop.close()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what the developer's environment says of servers."""
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=[Blocking, Asynchronous], ids=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of one kind; they are closed after the test."""
    made: list[Any] = []

    def make(address: str | None, **settings: Any) -> Any:
        made.append(request.param(address, **settings))
        return made[-1]

    yield make
    for caller in made:
        caller.close()


@pytest.fixture(scope="session")
def shared_rule_server() -> Iterator[RuleServer]:
    server = RuleServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def server(shared_rule_server: RuleServer) -> RuleServer:
    """The server with rules as good as new; `server.rules` changes them."""
    shared_rule_server.rules.__init__()  # type: ignore[misc]  # the servicers hold this very object
    return shared_rule_server


@pytest.fixture
def new_server() -> Iterator[RuleServer]:
    """A server that is not started, for tests that stop and start it."""
    server = RuleServer()
    yield server
    server.close()


@pytest.fixture
def fault() -> type[Fault]:
    """Makes failures for `server.rules.faults`."""
    return Fault
