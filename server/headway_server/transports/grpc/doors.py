"""Who is let in at the port: encryption, the files that say whom the server knows, and a port for health alone."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import structlog

from headway_server.errors import ServerError
from headway_server.serving.access import Access, AccessFile, is_local
from headway_server.serving.counts import Counts
from headway_server.serving.files import Certificates, WatchedFiles, watch
from headway_server.settings import ServerSettings

_log = structlog.get_logger(__name__)


class Doors:
    """Listens with the certificates of the settings, knows the callers of their access file, and reads both again."""

    def __init__(self, settings: ServerSettings, counts: Counts | None = None) -> None:
        """Reads the files.

        Args:
            settings: Which name them.
            counts: Where budgets are counted, by all workers of the server; None: there is one.

        Raises:
            AccessError: One of them cannot be used.
        """
        self.access: Access | None = None
        """Who may call; None: everyone."""
        self._certificates: Certificates | None = None
        self._tls: ssl.SSLContext | None = None
        self._is_new = False
        self._files: list[WatchedFiles[Any]] = []
        self._watch: asyncio.Task[None] | None = None
        self._settings = settings
        self._health_server: grpc.aio.Server | None = None
        self.health_port: int | None = None
        """Port that answers health checks alone, once it does."""
        if (path := settings.access_file) is not None:
            access_file = WatchedFiles([path], partial(AccessFile.read, path), self._know, noun="access file")
            self.access = Access(access_file.read(), counts)
            self._files.append(access_file)
        if (tls := settings.tls_files) is not None:
            paths = [path for path in tls if path is not None]
            certificates = WatchedFiles(paths, partial(Certificates.read, *tls), self._show, noun="certificates")
            self._certificates = certificates.read()
            self._files.append(certificates)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Adds a port at an address to a server; returns the port."""
        if self._certificates is None:
            return server.add_insecure_port(address)
        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(self._certificates),
            self._fetch,
            require_client_authentication=self._certificates.client_authorities is not None,
        )
        return server.add_secure_port(address, credentials)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """How another port encrypts, which shows new certificates too once there are; None: not at all.

        The authorities that it trusts stay those of its start.
        """
        if self._tls is None and (files := self._settings.tls_files) is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*files[:2])
            if files[2] is not None:
                self._tls.load_verify_locations(files[2])
                self._tls.verify_mode = ssl.CERT_REQUIRED
        return self._tls

    async def open(self, interceptor: grpc.aio.ServerInterceptor, options: Sequence[tuple[str, Any]]) -> None:
        """Begins to watch the files and to answer at the port for health; called with the event loop running.

        Args:
            interceptor: Answers health checks, and holds their callers to limits as at the server's own port.
            options: What gRPC is told of the connections.

        Raises:
            ServerError: The port is taken.
        """
        self._watch = asyncio.create_task(watch(self._files))
        if self.access is not None and self._certificates is None and not is_local(self._settings.host):
            _log.warning("API keys can be read on their way: this server does not encrypt; give it --tls-cert-file")
        if self._settings.health_port is None:
            return
        server = grpc.aio.server(interceptors=[interceptor], options=options)
        address = format_address(self._settings.host, self._settings.health_port)
        try:
            self.health_port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ServerError(f"cannot listen on {address}: {error}; choose another --health-port") from error
        await server.start()
        self._health_server = server
        _log.info("health", address=format_address(self._settings.host, self.health_port))

    async def close(self) -> None:
        """Watches the files no longer, and leaves the port for health."""
        if self._watch is not None:
            self._watch.cancel()
        if self._health_server is not None:
            await self._health_server.stop(None)

    def _know(self, file: AccessFile) -> None:
        assert self.access is not None, "its file is watched"
        self.access.change(file)

    def _show(self, certificates: Certificates) -> None:
        self._certificates, self._is_new = certificates, True
        if self._tls is not None and (files := self._settings.tls_files) is not None:
            self._tls.load_cert_chain(*files[:2])  # which were checked as they were read

    def _fetch(self) -> Any:
        """Returns new certificates, or None; gRPC asks at each handshake, in a thread of its own."""
        if not self._is_new:
            return None
        self._is_new = False
        assert self._certificates is not None
        return _configuration(self._certificates)

    def __repr__(self) -> str:
        return f"Doors({self.access!r}, {'TLS' if self._certificates else 'not encrypted'})"


def _configuration(certificates: Certificates) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], root_certificates=certificates.client_authorities
    )


def format_address(host: str, port: int) -> str:
    """Joins host and port; an IPv6 address goes into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
