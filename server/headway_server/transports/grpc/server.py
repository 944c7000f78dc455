"""The gRPC server: its services, its health, and how it starts and stops."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headway.v1 import (
    generation_service_pb2,
    generation_service_pb2_grpc,
    image_classification_service_pb2,
    image_classification_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    text_classification_service_pb2,
    text_classification_service_pb2_grpc,
    translation_service_pb2,
    translation_service_pb2_grpc,
)
from headway_server.bundles import Task
from headway_server.errors import HeadwayError
from headway_server.serving.host import ModelRegistry
from headway_server.settings import ServerSettings
from headway_server.transports.grpc.generation import GenerationService
from headway_server.transports.grpc.image_classification import ImageClassificationService
from headway_server.transports.grpc.interceptor import CallInterceptor
from headway_server.transports.grpc.models import ModelService
from headway_server.transports.grpc.text_classification import TextClassificationService
from headway_server.transports.grpc.translation import TranslationService

_log = structlog.get_logger(__name__)

_HEALTH_INTERVAL_S = 1.0
_LAST_WORDS_S = 1.0
"""What calls that were cut off have to hand their error to the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    """One service of the protocol."""

    name: str
    tasks: frozenset[Task]
    """It is healthy when a model for one of these is loaded; when empty, always."""
    add: Callable[[ModelRegistry, ServerSettings, grpc.aio.Server], None]
    """Makes the servicer and adds it to a server."""


def _name(module: Any, service: str) -> str:
    return str(module.DESCRIPTOR.services_by_name[service].full_name)


_SERVICES = (
    _Service(
        name=_name(generation_service_pb2, "GenerationService"),
        tasks=frozenset({Task.GENERATION}),
        add=lambda registry, settings, server: generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationService(registry, max_text_bytes=settings.max_text_kib * 2**10), server
        ),
    ),
    _Service(
        name=_name(translation_service_pb2, "TranslationService"),
        tasks=frozenset({Task.TRANSLATION}),
        add=lambda registry, settings, server: translation_service_pb2_grpc.add_TranslationServiceServicer_to_server(
            TranslationService(registry, max_text_bytes=settings.max_text_kib * 2**10), server
        ),
    ),
    _Service(
        name=_name(text_classification_service_pb2, "TextClassificationService"),
        tasks=frozenset({Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.TEXT_EMBEDDING}),
        add=lambda registry, settings, server: (
            text_classification_service_pb2_grpc.add_TextClassificationServiceServicer_to_server(
                TextClassificationService(registry, max_text_bytes=settings.max_text_kib * 2**10), server
            )
        ),
    ),
    _Service(
        name=_name(image_classification_service_pb2, "ImageClassificationService"),
        tasks=frozenset({Task.IMAGE_CLASSIFICATION}),
        add=lambda registry, _settings, server: (
            image_classification_service_pb2_grpc.add_ImageClassificationServiceServicer_to_server(
                ImageClassificationService(registry), server
            )
        ),
    ),
    _Service(
        name=_name(model_service_pb2, "ModelService"),
        tasks=frozenset(),
        add=lambda registry, _settings, server: model_service_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelService(registry), server
        ),
    ),
)


class HeadwayServer:
    """Serves a registry's models at one address."""

    def __init__(self, registry: ModelRegistry, settings: ServerSettings) -> None:
        self._registry = registry
        self._settings = settings
        self._health = health.aio.HealthServicer()
        self._interceptor = CallInterceptor()
        self._watch: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            interceptors=[self._interceptor],
            maximum_concurrent_rpcs=settings.max_calls,
            options=[
                ("grpc.so_reuseport", 0),  # a second server at this port is a mistake, not a load balancer
                ("grpc.max_receive_message_length", settings.max_message_mib * 2**20),
                ("grpc.max_send_message_length", -1),
            ],
        )
        for service in _SERVICES:
            service.add(registry, settings, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [service.name for service in _SERVICES]
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Starts the models and listens; returns the port.

        Raises:
            HeadwayError: The address was taken since `address_problem` looked.
        """
        address = format_address(self._settings.host, self._settings.port)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise HeadwayError(f"cannot listen on {address}: {error}") from error
        self._registry.start()
        await self._tell_health(self._registry.tasks())
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_health())
        return port

    async def _tell_health(self, tasks: set[Task]) -> None:
        """Serving is the server as a whole and every service that has a model which is alive."""
        for service in _SERVICES:
            serving = not service.tasks or service.tasks & tasks
            status = health_pb2.HealthCheckResponse
            await self._health.set(service.name, status.SERVING if serving else status.NOT_SERVING)

    async def _watch_health(self) -> None:
        """Tells health anew when a model has ended by itself, which is a bug or a machine out of order.

        The server as a whole is then not serving either, so that an orchestrator starts it again. That holds even where
        another model does the same task: callers name the model they want.
        """
        num_ended = 0
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            if len(ended := self._registry.ended()) == num_ended:
                continue
            num_ended = len(ended)
            names = [f"{model.bundle.manifest.name}/{model.bundle.manifest.version}" for model in ended]
            _log.error("a model has ended; restart the server", ended=names)
            await self._tell_health(self._registry.tasks())
            await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Refuses new calls, lets running ones finish for as long as the settings say, and closes.

        Health says NOT_SERVING from the first moment on and is answered to the last.

        Args:
            hurry: When set, running calls are not waited for any longer.
        """
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        self._interceptor.refuse_new_calls()
        _log.info("draining", running_calls=self._interceptor.num_running, timeout_s=self._settings.drain_timeout)
        await self._wait_for_calls(hurry)
        await self._registry.drain(0)
        await asyncio.to_thread(self._registry.close)  # it waits for the models' last step
        await self._server.stop(_LAST_WORDS_S)
        _log.info("stopped")

    async def _wait_for_calls(self, hurry: asyncio.Event | None) -> None:
        """Waits until no call runs, the drain's time is over, or `hurry` is set."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._interceptor.wait_idle())]
        if hurry is not None:
            waits.append(asyncio.ensure_future(hurry.wait()))
        await asyncio.wait(waits, timeout=self._settings.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._interceptor.num_running:
            _log.warning("cutting off calls", running_calls=self._interceptor.num_running)

    async def run(self, announce: Callable[[int], None]) -> None:
        """Serves until SIGTERM or SIGINT, then drains; a second signal ends the wait for running calls.

        Args:
            announce: Called with the port once calls are answered.
        """
        stop, hurry = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (hurry if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        announce(await self.start())
        await stop.wait()
        await self.stop(hurry)

    def __repr__(self) -> str:
        return f"HeadwayServer({self._registry!r}, {self._interceptor!r})"


def format_address(host: str, port: int) -> str:
    """Joins host and port; an IPv6 address goes into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_problem(host: str, port: int) -> str | None:
    """Tells, before models are loaded, why the server could not listen there; None when it could."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # on Linux a bind with SO_REUSEADDR alone does not tell
    except OSError as error:
        return str(error.strerror or error)
    return None
