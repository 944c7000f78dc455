"""The access file and the certificates of the server."""

from __future__ import annotations

import ssl
from functools import partial
from typing import Any

import structlog

from headway_server.serving.access import Access, AccessFile, is_local
from headway_server.serving.counts import Counts
from headway_server.serving.files import Certificates, WatchedFiles, watch
from headway_server.settings import ServerSettings

_log = structlog.get_logger(__name__)


class Credentials:
    """The certificates and the access file of the settings, reloaded when they change."""

    def __init__(self, settings: ServerSettings, counts: Counts | None = None) -> None:
        """Reads the files.

        Args:
            settings: The server's.
            counts: Counters shared by the workers; None: a single process.

        Raises:
            AccessError: One of them cannot be used.
        """
        self.access: Access | None = None
        """Access control; None: anyone may call."""
        self.certificates: Certificates | None = None
        """Certificates of the server; None: no TLS."""
        self._tls: ssl.SSLContext | None = None
        self._is_new = False
        self._files: list[WatchedFiles[Any]] = []
        self._settings = settings
        if (path := settings.access_file) is not None:
            access_file = WatchedFiles([path], partial(AccessFile.read, path), self._know, noun="access file")
            self.access = Access(access_file.read(), counts)
            self._files.append(access_file)
        if (tls := settings.tls_files) is not None:
            paths = [path for path in tls if path is not None]
            certificates = WatchedFiles(paths, partial(Certificates.read, *tls), self._show, noun="certificates")
            self.certificates = certificates.read()
            self._files.append(certificates)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """TLS context of the HTTP port, kept up to date with new certificates; None: no TLS.

        The authorities of clients stay those of the start.
        """
        if self._tls is None and (files := self._settings.tls_files) is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*files[:2])
            if files[2] is not None:
                self._tls.load_verify_locations(files[2])
                self._tls.verify_mode = ssl.CERT_REQUIRED
        return self._tls

    async def watch(self) -> None:
        """Reloads the files when they change, until it is cancelled."""
        if self.access is not None and self.certificates is None and not is_local(self._settings.host):
            _log.warning("API keys are sent unencrypted: give --tls-cert-file")
        await watch(self._files)

    def new_certificates(self) -> Certificates | None:
        """Returns certificates that changed since the last call, or None; thread-safe."""
        if not self._is_new:
            return None
        self._is_new = False
        return self.certificates

    def _know(self, file: AccessFile) -> None:
        assert self.access is not None, "its file is watched"
        self.access.change(file)

    def _show(self, certificates: Certificates) -> None:
        self.certificates, self._is_new = certificates, True
        if self._tls is not None and (files := self._settings.tls_files) is not None:
            self._tls.load_cert_chain(*files[:2])  # checked when they were read

    def __repr__(self) -> str:
        return f"Credentials({self.access!r}, {'TLS' if self.certificates else 'not encrypted'})"
