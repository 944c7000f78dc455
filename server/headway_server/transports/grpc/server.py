"""The gRPC server: its services, its health, and how it starts and stops."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from headway_server.errors import DrainingError, ServerError
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.runtime import CLOSE_TIMEOUT_S, available_bytes
from headway_server.services import Statistics, make_procedures, service_abilities
from headway_server.services.registry import SERVICES
from headway_server.serving.callers import Callers, WaitLimits
from headway_server.serving.calls import Calls
from headway_server.serving.counts import Counts
from headway_server.serving.host import ModelHost
from headway_server.serving.watchdog import Watchdog
from headway_server.settings import ServerSettings
from headway_server.transports.grpc.doors import Doors, format_address
from headway_server.transports.grpc.health import Health
from headway_server.transports.grpc.interceptor import CallInterceptor

_log = structlog.get_logger(__name__)

_HEALTH_INTERVAL_S = 1.0
_LAST_WORDS_S = 1.0
"""How long calls that were cut off have to send their error."""
_HOLD_S = 0.1
"""How long calls that arrive are held before connections are sent away, and after."""
_ANY_NUMBER = 2**31 - 1
_FEWEST_SLOW = 16
"""Calls that may be slow to read their answer, whatever the memory."""
_SLOW_REQUEST_S = 0.25
"""A request that takes longer to arrive counts with all that it may hold."""
_MAX_LASTING = 1024
"""Health watches and reflection streams at a time."""
_MAX_LASTING_PER_CONNECTION = 16
_MOST_CONNECTIONS = 10_000


class Beside(Protocol):
    """A transport beside gRPC, which holds its calls to the same `Calls`."""

    async def start(self, grpc_port: int) -> int:
        """Listens, once the models are started; returns the port. Callers may be told that of gRPC."""

    async def stop(self) -> None:
        """Closes its connections, once no call runs; until then it answers."""


class HeadwayServer:
    """Serves the models of a host at one address."""

    def __init__(
        self,
        host: ModelHost,
        settings: ServerSettings,
        *,
        observer: Observer = NO_OBSERVER,
        statistics: Statistics | None = None,
        counts: Counts | None = None,
    ) -> None:
        """Makes a server that does not listen yet.

        Args:
            host: Its models, loaded and not started.
            settings: Of the server.
            observer: Learns of every call.
            statistics: What the Open Inference Protocol says that models have computed, an observer of host and calls;
                None: nothing.
            counts: What all workers of the server count together; None: there is one.
        """
        self._host = host
        self._settings = settings
        max_calls, max_bytes = settings.call_limits(available_bytes("cpu"))
        max_arriving = settings.connection.max_arriving(settings.max_message_bytes)
        self._health = Health()
        self._watch: asyncio.Task[None] | None = None
        self._sweep: asyncio.Task[None] | None = None
        self._watchdog: Watchdog | None = None
        self.beside: Beside | None = None
        """Another transport, which is started and drained with this one; to be set before `start`."""
        self.port_beside: int | None = None
        """Where that listens, once it does."""
        self._ailing: dict[str, str] = {}
        self.callers = Callers(
            requests=WaitLimits(
                timeout_s=settings.connection.request_timeout,
                max_slow=max_arriving,
                slow_s=_SLOW_REQUEST_S,
                max_waits=max_calls,
            ),
            answers=WaitLimits(
                timeout_s=settings.connection.unread_timeout, max_slow=max(_FEWEST_SLOW, max_calls // 4)
            ),
            max_lasting=_MAX_LASTING,
            max_lasting_per_connection=_MAX_LASTING_PER_CONNECTION,
            max_receiving=max_arriving,
        )
        self.doors = Doors(settings, counts)
        self.calls = Calls(
            max_calls=max_calls,
            max_bytes=max_bytes,
            access=self.doors.access,
            observer=observer,
            counted=None if counts is None else counts.server,
        )
        """Those that are being answered."""
        _log.info("calls", max_calls=max_calls, max_inflight_mib=max_bytes >> 20, max_arriving=max_arriving)
        self.procedures = make_procedures(
            host, settings, is_draining=lambda: self.calls.is_draining, statistics=statistics
        )
        """The methods, by their full names; another transport may call them, too."""
        interceptor = CallInterceptor(
            self.calls,
            self.callers,
            self.procedures | self._health.procedures,
            verifies_clients=settings.tls_client_ca_file is not None,
        )
        self._server = grpc.aio.server(interceptors=[interceptor], options=_options(settings))
        if settings.reflection:
            services = {name.strip("/").partition("/")[0] for name in self.procedures}
            names = [*sorted(services), health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
            reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], self._server)

    async def start(self) -> int:
        """Starts the models and listens; returns the port.

        Raises:
            ServerError: The address was taken since `address_problem` looked.
        """
        address = format_address(self._settings.host, self._settings.port)
        try:
            port = self.doors.listen(self._server, address)
        except RuntimeError as error:
            raise ServerError(f"cannot listen on {address}: {error}") from error
        self._host.start()
        self._update_health()
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_health())
        # One of its own: an interceptor keeps the methods of its server, which that port must not answer.
        interceptor = CallInterceptor(self.calls, self.callers, self._health.procedures)
        await self.doors.open(interceptor, _options(self._settings))
        self._sweep = asyncio.create_task(self.callers.watch())
        if self.beside is not None:
            self.port_beside = await self.beside.start(port)
        return port

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            if self._watchdog is not None:
                self._watchdog.beat()
            self._update_health()

    def _update_health(self) -> None:
        """Reports SERVING for the server as a whole, and for every service that has a healthy model.

        A model that has ended by itself, or hangs, makes the server as a whole unhealthy, so that an orchestrator
        starts it again: even where another model does the same task, for callers name the model they want.
        """
        limit = self._settings.stall_timeout
        ailing = self._host.ailing(stall_timeout_s=limit)
        for path in ailing.keys() - self._ailing.keys():
            _log.error("a model is out of order; restart the server", model=path, reason=ailing[path])
        for path in self._ailing.keys() - ailing.keys():
            _log.info("a model is in order again", model=path)
        self._ailing = ailing
        abilities = self._host.serving(stall_timeout_s=limit)
        self._health.set("", is_serving=not ailing)
        for service in SERVICES:
            wanted = service_abilities(service.descriptor)
            self._health.set(service.descriptor.full_name, is_serving=not wanted or bool(wanted & abilities))

    async def stop(self, hurry: asyncio.Event | None = None) -> bool:
        """Sends every connection away, lets running calls finish for as long as the settings say, and closes.

        Health says NOT_SERVING from the first moment on. For a moment, calls that arrive are neither taken nor refused:
        what gRPC meets between its going away and a client's hearing of it, it ends as CANCELLED, and callers who are
        being kept waiting send nothing then. New connections are refused from then on.

        Args:
            hurry: When set, running calls are not waited for any longer.

        Returns:
            True if every thread has ended; False where a run hangs and was left behind.
        """
        if self._watch is not None:
            self._watch.cancel()
        timeout_s = self._settings.drain_timeout
        hold_s = 0.0 if hurry is not None and hurry.is_set() else _HOLD_S
        self._health.close()
        _log.info("draining", running_calls=self.calls.num_running, timeout_s=timeout_s)
        self.callers.hold()
        self.calls.refuse_new()
        await asyncio.sleep(hold_s)
        going = asyncio.create_task(self._server.stop(timeout_s + CLOSE_TIMEOUT_S + _LAST_WORDS_S))
        await asyncio.sleep(hold_s)
        self.callers.let_go()
        await self._wait_for_calls(hurry)
        has_ended = await asyncio.to_thread(self._host.close)  # it waits for what is running
        self.callers.end_lasting(DrainingError("the server is shutting down"))
        await self._server.stop(_LAST_WORDS_S)
        if self.beside is not None:
            await self.beside.stop()
        await self.doors.close()
        await going
        if self._sweep is not None:
            self._sweep.cancel()
        _log.info("stopped")
        return has_ended

    async def _wait_for_calls(self, hurry: asyncio.Event | None) -> None:
        """Waits until no call runs, the drain's time is over, or `hurry` is set."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.calls.wait_idle())]
        if hurry is not None:
            waits.append(asyncio.ensure_future(hurry.wait()))
        await asyncio.wait(waits, timeout=self._settings.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.calls.num_running:
            _log.warning("cutting off calls", running_calls=self.calls.num_running)

    async def run(self, announce: Callable[[int], None]) -> bool:
        """Serves until SIGTERM or SIGINT, then stops; a second signal ends the wait for running calls.

        Args:
            announce: Called with the port once calls are answered.

        Returns:
            True if every thread has ended.
        """
        stop, hurry = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (hurry if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self._host.scan_soon)
        announce(await self.start())
        if limit_s := self._settings.stall_timeout:
            self._watchdog = Watchdog(self._host.stalled, limit_s=limit_s, ends=self._settings.stall_exit)
            self._watchdog.start()
        await stop.wait()
        if self._watchdog is not None:
            self._watchdog.stop()
        return await self.stop(hurry)

    def __repr__(self) -> str:
        return f"HeadwayServer({self._host!r}, {self.calls!r})"


def _options(settings: ServerSettings) -> list[tuple[str, int]]:
    """Returns what gRPC itself is told."""
    connection = settings.connection
    return [
        # Workers share a port, which their supervisor has reserved; any other server at it is a mistake.
        ("grpc.so_reuseport", int(settings.workers != 1)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Calls that have arrived and that Python has not taken yet. Past 1,000 gRPC would begin to end them, as
        # CANCELLED, which nothing retries; what is too much is for this server to refuse.
        ("grpc.server.max_pending_requests", _ANY_NUMBER),
        ("grpc.server.max_pending_requests_hard_limit", _ANY_NUMBER),
        ("grpc.max_concurrent_streams", connection.max_streams),
        ("grpc.max_allowed_incoming_connections", connection.max_connections or _most_connections()),
        ("grpc.max_connection_age_ms", _milliseconds(connection.max_connection_age)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(connection.max_connection_age_grace)),
        ("grpc.max_connection_idle_ms", _milliseconds(connection.max_connection_idle)),
        ("grpc.keepalive_time_ms", _milliseconds(connection.keepalive_time)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", round(connection.min_ping_interval * 1e3)),
    ]


def _milliseconds(seconds: float) -> int:
    """Returns what gRPC takes for a time; 0 is any time."""
    return min(round(seconds * 1e3), _ANY_NUMBER) or _ANY_NUMBER


def _most_connections() -> int:
    """Returns how many connections leave file descriptors for everything else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(_MOST_CONNECTIONS, limit * 3 // 4))


def address_problem(host: str, port: int) -> str | None:
    """Returns why the server could not listen there; None if it could. To be asked before models are loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # on Linux a bind with SO_REUSEADDR succeeds beside another listener
    except OSError as error:
        return str(error.strerror or error)
    return None
