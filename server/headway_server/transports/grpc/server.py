"""The gRPC server."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

import grpc
import structlog

from headway_server.errors import ServerError
from headway_server.services.application import LAST_WORDS_S, Application
from headway_server.services.health import SERVICE as HEALTH
from headway_server.serving.addresses import format_address
from headway_server.serving.files import Certificates
from headway_server.settings import ServerSettings
from headway_server.transports.grpc.interceptor import CallInterceptor
from headway_server.transports.grpc.reflection import enable_reflection

_ANY_NUMBER = 2**31 - 1
_MOST_CONNECTIONS = 10_000

_log = structlog.get_logger(__name__)


class GrpcServer:
    """Serves gRPC, and optionally health checks at a separate port."""

    def __init__(self, application: Application) -> None:
        """Creates a server that does not listen yet."""
        self._credentials = application.credentials
        self._settings = settings = application.settings
        health = application.health.procedures
        interceptor = CallInterceptor(
            application.calls,
            application.callers,
            application.procedures | health,
            verifies_clients=settings.tls_client_ca_file is not None,
        )
        self._server = grpc.aio.server(interceptors=[interceptor], options=_options(settings))
        if settings.reflection:
            services = {name.strip("/").partition("/")[0] for name in application.procedures}
            enable_reflection(services | {HEALTH.full_name}, self._server)
        self._health_server: grpc.aio.Server | None = None
        self.health_port: int | None = None
        """Port of health checks, once it listens."""
        if settings.health_port is not None:
            # A separate one: an interceptor caches the methods of its server, which that port must not serve.
            alone = CallInterceptor(application.calls, application.callers, health)
            self._health_server = grpc.aio.server(interceptors=[alone], options=_options(settings))

    def listen(self) -> int:
        """See `Door`."""
        address = format_address(self._settings.host, self._settings.port)
        try:
            port = self._add_port(address)
        except RuntimeError as error:
            raise ServerError(f"cannot listen on {address}: {error}") from error
        if self._health_server is not None:
            address = format_address(self._settings.host, self._settings.health_port or 0)
            try:
                self.health_port = self._health_server.add_insecure_port(address)
            except RuntimeError as error:
                raise ServerError(f"cannot listen on {address}: {error}; choose another --health-port") from error
        return port

    def _add_port(self, address: str) -> int:
        certificates = self._credentials.certificates
        if certificates is None:
            return self._server.add_insecure_port(address)
        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(certificates),
            self._fetch,
            require_client_authentication=certificates.client_authorities is not None,
        )
        return self._server.add_secure_port(address, credentials)

    def _fetch(self) -> Any:
        """Returns new certificates, or None; gRPC calls it at each handshake, in its own thread."""
        certificates = self._credentials.new_certificates()
        return None if certificates is None else _configuration(certificates)

    async def start(self, ports: Sequence[int]) -> None:  # noqa: ARG002 (the protocol's)
        """See `Door`."""
        await self._server.start()
        if self._health_server is not None and self.health_port is not None:
            await self._health_server.start()
            _log.info("health", address=format_address(self._settings.host, self.health_port))

    async def send_away(self, timeout_s: float) -> None:
        """See `Door`."""
        await self._server.stop(timeout_s)

    async def close(self) -> None:
        """See `Door`."""
        await self._server.stop(LAST_WORDS_S)
        if self._health_server is not None:
            await self._health_server.stop(None)

    def __repr__(self) -> str:
        return f"GrpcServer({self._credentials!r})"


def _configuration(certificates: Certificates) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], root_certificates=certificates.client_authorities
    )


def _options(settings: ServerSettings) -> list[tuple[str, int]]:
    """Returns the options of gRPC."""
    connection = settings.connection
    return [
        # Workers share a port, reserved by their supervisor; another server on it is a mistake.
        ("grpc.so_reuseport", int(settings.workers != 1)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Calls received but not yet taken by Python. Past 1,000 gRPC would cancel them, which clients do not retry;
        # refusing them is this server's task.
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
    """Returns a time in gRPC's unit; 0: no limit."""
    return min(round(seconds * 1e3), _ANY_NUMBER) or _ANY_NUMBER


def _most_connections() -> int:
    """Returns the limit of connections that leaves file descriptors for everything else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(_MOST_CONNECTIONS, limit * 3 // 4))
