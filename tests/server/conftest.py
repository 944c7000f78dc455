"""A store of tiny classifiers, and servers on it: in this process, and in one of their own."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import grpc
import pytest
import structlog
import tiny_bundles
from edge import make_application

from headway.v1 import embedding_service_pb2_grpc as embedding_grpc
from headway.v1 import image_classification_service_pb2_grpc as images_grpc
from headway.v1 import model_service_pb2_grpc as models_grpc
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.runtime import Runtime
from headway_server.services.application import Application
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings


@pytest.fixture(scope="session")
def classifier_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of one text and one image classifier. Tests that change a store make their own."""
    store = tmp_path_factory.mktemp("classifiers")
    tiny_bundles.write_topic_bundle(store)
    tiny_bundles.write_colour_bundle(store)
    return store


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    return Runtime(device="cpu", num_threads=1)


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """Takes the configuration of the log back after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    logging.getLogger("grpc._cython.cygrpc").filters.clear()
    root.handlers[:] = handlers
    root.setLevel(level)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server in this process and a channel to it."""

    server: Application
    host: ModelHost
    port: int
    channel: grpc.aio.Channel

    @property
    def texts(self) -> "texts_grpc.TextClassificationServiceAsyncStub":
        return texts_grpc.TextClassificationServiceStub(self.channel)

    @property
    def embeddings(self) -> "embedding_grpc.EmbeddingServiceAsyncStub":

        return embedding_grpc.EmbeddingServiceStub(self.channel)

    @property
    def images(self) -> "images_grpc.ImageClassificationServiceAsyncStub":
        return images_grpc.ImageClassificationServiceStub(self.channel)

    @property
    def models(self) -> "models_grpc.ModelServiceAsyncStub":
        return models_grpc.ModelServiceStub(self.channel)


Serve = Callable[..., AbstractAsyncContextManager[Serving]]


@pytest.fixture
def serve(runtime: Runtime) -> Serve:
    """Serves a store with some settings: `async with serve(store, max_message_mib=1) as serving`."""

    @asynccontextmanager
    async def start(store: Path, *, observer: Observer = NO_OBSERVER, **settings: object) -> AsyncIterator[Serving]:
        checked = ServerSettings(store=store, port=0, **settings)
        host = ModelHost.open(runtime, checked, observer=observer)
        server = make_application(host, checked, observer=observer)
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                yield Serving(server=server, host=host, port=port, channel=channel)
            finally:  # a server that a failed test leaves behind keeps the whole run from ending
                hurry = asyncio.Event()
                hurry.set()
                await server.stop(hurry)

    return start


@pytest.fixture
async def serving(serve: Serve, classifier_store: Path) -> AsyncIterator[Serving]:
    """A server with the tiny classifiers."""
    async with serve(classifier_store) as started:
        yield started


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, arguments: list[str], log: Path, variables: Mapping[str, str]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headway_server", "--threads", "1", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment | {"OMP_NUM_THREADS": "1", **variables},
            )

    def wait_ready(self, timeout_s: float = 60) -> str:
        """Returns the ready line."""
        watchdog = threading.Timer(timeout_s, self.process.kill)
        watchdog.start()
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line, f"the server ended or hung before it was ready:\n{self.log.read_text()}"
        return line

    def wait_end(self, timeout_s: float = 60) -> int:
        """Returns the exit code."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


StartProcess = Callable[..., ServerProcess]


@contextmanager
def _processes(folder: Path) -> Iterator[StartProcess]:
    started: list[ServerProcess] = []

    def start(*arguments: object, variables: Mapping[str, str] = MappingProxyType({})) -> ServerProcess:
        log = folder / f"server-{len(started)}.log"
        server = ServerProcess([str(argument) for argument in arguments], log, variables)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[StartProcess]:
    """Starts servers: `start_process("--store", store, "--port", 0)`; all of them end with the test."""
    with _processes(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartProcess]:
    """Starts servers that end with the tests of the file."""
    with _processes(tmp_path_factory.mktemp("servers")) as start:
        yield start
