"""Who is let in at the port: encryption, and the files that say whom the server knows."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc
import structlog

from headway_server.serving.access import Access, AccessFile
from headway_server.serving.files import Certificates, WatchedFiles, watch
from headway_server.settings import ServerSettings

_log = structlog.get_logger(__name__)


class Doors:
    """Listens with the certificates of the settings, knows the callers of their access file, and reads both again."""

    def __init__(self, settings: ServerSettings) -> None:
        """Reads the files.

        Raises:
            AccessError: One of them cannot be used.
        """
        self.access: Access | None = None
        """Who may call; None: everyone."""
        self._certificates: Certificates | None = None
        self._is_new = False
        self._files: list[WatchedFiles[Any]] = []
        self._watch: asyncio.Task[None] | None = None
        if (path := settings.access_file) is not None:
            self.access = Access(AccessFile.read(path))
            read_access = partial(AccessFile.read, path)
            self._files.append(WatchedFiles([path], read_access, self.access.change, noun="access file"))
        if (tls := settings.tls_files) is not None:
            read_certificates = partial(Certificates.read, *tls)
            self._certificates = read_certificates()
            paths = [path for path in tls if path is not None]
            self._files.append(WatchedFiles(paths, read_certificates, self._show, noun="certificates"))

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

    def open(self) -> None:
        """Begins to watch the files; called with the event loop running."""
        self._watch = asyncio.create_task(watch(self._files))

    def close(self) -> None:
        """Watches the files no longer."""
        if self._watch is not None:
            self._watch.cancel()

    def _show(self, certificates: Certificates) -> None:
        self._certificates, self._is_new = certificates, True

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
