"""The HTTP server: routes and probes, and its start and stop in the gRPC server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Final

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headway_server.errors import ServerError
from headway_server.observers import WriteMetrics
from headway_server.services.application import Application
from headway_server.serving.calls import REQUEST_ID
from headway_server.transports.http.connect import connect_routes
from headway_server.transports.http.connections import Connection
from headway_server.transports.http.edge import Edge, Endpoint, Reply, Request, to_json
from headway_server.transports.http.open_inference import open_inference_routes
from headway_server.transports.http.openai import OPENAI_FORM, openai_routes
from headway_server.transports.http.page import page_routes
from headway_server.transports.http.predictions import prediction_routes

_SWEEP_S: Final = 1.0
_LAST_WORDS_S: Final = 1
"""Seconds for clients to read their connections to the end when the server stops."""
_MOST_CONNECTIONS: Final = 10_000

_log = structlog.get_logger(__name__)


class HttpServer:
    """HTTP door of the application."""

    def __init__(self, application: Application, *, write_metrics: WriteMetrics | None = None) -> None:
        """Makes a server that does not listen yet.

        Args:
            application: Application that answers the calls.
            write_metrics: Answers scrapes; None: no metrics.
        """
        self._host = application.host
        self._settings = application.settings
        self._calls = application.calls
        self._procedures = application.procedures
        self._tls = application.credentials.tls
        self._write_metrics = write_metrics
        self._edge = Edge(application.calls, application.callers, origins=application.settings.http_cors_origins)
        self._listener: socket.socket | None = None
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._grpc_port = application.settings.port
        self.app = self._make_app()
        """The ASGI application."""

    def _make_app(self) -> ASGIApp:
        routes: list[BaseRoute] = [
            *openai_routes(self._edge, self._host, self._settings),
            *connect_routes(self._edge, self._procedures),
            *open_inference_routes(self._edge, self._procedures),
            *prediction_routes(self._edge, self._host, self._procedures),
            Route("/livez", self._live),
            *(Route(path, self._ready) for path in ("/readyz", "/health", "/ping")),
            Route("/version", _version),
        ]
        if self._write_metrics is not None:
            metrics = Endpoint(self._edge, "/metrics", self._metrics, OPENAI_FORM, is_probe=True)
            routes.append(Route("/metrics", metrics, methods=["GET"]))
        routes += page_routes(lambda: self._grpc_port)
        app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_allowed})
        if not self._settings.http_cors_origins:
            return app
        return CORSMiddleware(  # outermost: Starlette's own answers have the headers too
            app,
            allow_origins=self._settings.http_cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "retry-after", "retry-after-ms", "inference-header-content-length"],
        )

    async def _live(self, _: StarletteRequest) -> Response:
        """Liveness: False lets an orchestrator restart the process."""
        unhealthy = self._host.unhealthy(stall_timeout_s=self._settings.stall_timeout)
        return _probe([f"{path}: {reason}" for path, reason in unhealthy.items()])

    async def _ready(self, _: StarletteRequest) -> Response:
        """Readiness: False keeps calls from this server."""
        if self._calls.is_draining:
            return _probe(["the server is shutting down"])
        limit = self._settings.stall_timeout
        unhealthy = self._host.unhealthy(stall_timeout_s=limit)
        problems = [f"{path}: {reason}" for path, reason in unhealthy.items()]
        return _probe(problems or ([] if self._host.serving(stall_timeout_s=limit) else ["no model is loaded"]))

    async def _metrics(self, request: Request) -> Reply:
        assert self._write_metrics is not None, "the route requires it"
        given, text = await asyncio.to_thread(self._write_metrics, request.headers)
        media_type, *headers = ((name.encode(), value.encode()) for name, value in given.items())
        return Reply(body=text, media_type=media_type[1], headers=tuple(headers))

    def listen(self) -> int:
        """See `Door`."""
        settings = self._settings
        self._listener = _listen(settings.host, settings.http_port or 0, is_shared=settings.workers != 1)
        port: int = self._listener.getsockname()[1]
        return port

    async def start(self, ports: Sequence[int]) -> None:
        """See `Door`. The page shows the first port, that of gRPC."""
        assert self._listener is not None, "it listens"
        self._grpc_port = ports[0]
        for name in ("uvicorn", "uvicorn.error", "python_multipart"):
            logging.getLogger(name).setLevel(logging.ERROR)  # invalid requests are not warnings of the server
        connection = self._settings.connection
        limit = connection.max_connections or _most_connections()
        kind = type("_Connection", (Connection,), {"max_connections": limit})
        tls = self._tls
        config = uvicorn.Config(
            self.app,
            http=kind,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=max(1, round(connection.keepalive_time)),
            timeout_graceful_shutdown=_LAST_WORDS_S,
            ssl_context_factory=None if tls is None else lambda _config, _make: tls,
        )
        self._server = _Server(config)
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[self._listener])),
            asyncio.create_task(self._sweep(self._server)),
        ]
        await self._server.has_started.wait()
        _log.info("http", address=self._settings.host, port=self._listener.getsockname()[1], tls=tls is not None)

    @property
    def is_open(self) -> bool:
        """True from `start` to `close`."""
        return self._server is not None and not self._server.should_exit

    async def send_away(self, timeout_s: float) -> None:
        """Does nothing: calls are refused, and probes answered, until the port is closed."""

    async def close(self) -> None:
        """See `Door`."""
        if self._server is None:
            return
        serving, sweep = self._tasks
        sweep.cancel()
        self._server.should_exit = True
        await serving
        for connection in list(self._server.server_state.connections):
            assert isinstance(connection, Connection), "`start` sets this class"
            connection.abort()

    async def _sweep(self, server: _Server) -> None:
        limits = self._settings.connection
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for connection in list(server.server_state.connections):
                assert isinstance(connection, Connection), "`start` sets this class"
                connection.sweep(now, head_timeout_s=limits.request_timeout, unread_timeout_s=limits.unread_timeout)

    def __repr__(self) -> str:
        return f"HttpServer({self._edge!r})"


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self.has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles no signals; the application drains all doors."""
        yield


def _listen(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """Binds a port; `is_shared`: other workers of this server share it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ServerError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another --http-port"
        ) from error
    listener.setblocking(False)
    return listener


def _most_connections() -> int:
    """Returns an eighth of the file descriptors: gRPC takes three quarters."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(_MOST_CONNECTIONS, limit // 8))


async def _version(_: StarletteRequest) -> Response:
    return Response(to_json({"version": version("headway-server")}), media_type="application/json")


def _probe(problems: Sequence[str]) -> Response:
    text = "\n".join(problems) or "ok"
    return PlainTextResponse(text + "\n", 503 if problems else 200, headers={"cache-control": "no-store"})


async def _not_found(request: StarletteRequest, _: Exception) -> Response:
    return _refusal(
        404, f"there is nothing at {request.method} {request.url.path[:200]}; see docs/http.md", "not_found"
    )


async def _not_allowed(request: StarletteRequest, error: Exception) -> Response:
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "another method")
    message = f"{request.url.path[:200]} does not take {request.method}; use {allowed}"
    return _refusal(405, message, "method_not_allowed", {"allow": allowed})


def _refusal(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return Response(to_json({"error": error}), status, headers, media_type="application/json")
