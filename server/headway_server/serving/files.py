"""Files that change while the server runs: reloading the access file and certificates, atomic replacement."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

import structlog

from headway_server.errors import AccessError, ServerError
from headway_server.serving.own_thread import run_in_own_thread

Content = TypeVar("Content")
_Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]

_INTERVAL_S: Final = 1.0

_log = structlog.get_logger(__name__)


class WatchedFiles(Generic[Content]):
    """Reloads files that have changed. If they cannot be used, the last valid content stays in use."""

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], Content], use: Callable[[Content], None], *, noun: str
    ) -> None:
        """Prepares; `read` reads the files for the first time.

        Args:
            paths: The files.
            read: Reads them, in a thread; raises ServerError if they cannot be used.
            use: Receives changed content; called on the event loop.
            noun: Name of the files for the log.
        """
        self._paths = tuple(paths)
        self._read = read
        self._use = use
        self._noun = noun
        self._seen: _Signature | None = None
        """Signature when they were read."""
        self._last: _Signature | None = None
        """Signature at the last check."""
        self._problem = ""

    def read(self) -> Content:
        """Reads the files now; errors are those of the reader."""
        self._seen = _signature(self._paths)  # before reading, so that a change meanwhile is seen at the next check
        return self._read()

    async def check(self) -> None:
        """Reads the files if they have changed."""
        try:
            found = await run_in_own_thread(self._look, name=f"read {self._noun}")
            if found is None:
                return
            signature, content = found
            self._use(content)
        except Exception as error:  # whatever the error, the next check retries
            unexpected = None if isinstance(error, ServerError) else error
            problem = str(error) if unexpected is None else type(error).__name__
            if problem != self._problem:
                message = f"{self._noun} cannot be used; the last valid version stays in use"
                _log.error(message, reason=problem, exc_info=unexpected)
            self._problem = problem
            return
        self._seen, self._problem = signature, ""
        _log.info(f"{self._noun} reloaded", files=list(map(str, self._paths)))

    def _look(self) -> tuple[_Signature, Content] | None:
        """Reads the files if they have changed since they were read, but not since the last check.

        A file still being written may look complete: half an access file has half the keys.
        """
        signature, last = _signature(self._paths), self._last
        self._last = signature
        if signature == self._seen or signature != last:
            return None
        content = self._read()
        return (signature, content) if _signature(self._paths) == signature else None

    def __repr__(self) -> str:
        return f"WatchedFiles({', '.join(map(str, self._paths))})"


async def watch(files: Iterable[WatchedFiles[Any]]) -> None:
    """Checks files every second, until it is cancelled."""
    files = list(files)
    while files:
        await asyncio.sleep(_INTERVAL_S)
        for one in files:
            await one.check()


def _signature(paths: Iterable[Path]) -> _Signature:
    """Returns the inode, size and time of each file; None for a missing one."""
    return tuple(map(_state, paths))


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """The server's certificate and key, and the authorities of clients; PEM."""

    key: bytes = field(repr=False)
    chain: bytes
    client_authorities: bytes | None

    @classmethod
    def read(cls, cert_file: Path, key_file: Path, client_ca_file: Path | None) -> Self:
        """Reads and checks the files.

        Raises:
            AccessError: A file cannot be read or is not PEM, or the key does not match the certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            read = cls(
                key=key_file.read_bytes(),
                chain=cert_file.read_bytes(),
                client_authorities=None if client_ca_file is None else client_ca_file.read_bytes(),
            )
        except OSError as error:
            raise AccessError(f"{error.filename}: {error.strerror}") from error
        try:
            context.load_cert_chain(cert_file, key_file, password=_no_password)
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise AccessError(
                f"{cert_file}, {key_file}: are not a certificate and its key, in PEM and without a password ({reason})"
            ) from None
        try:
            if client_ca_file is not None:
                context.load_verify_locations(client_ca_file)
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise AccessError(f"{client_ca_file}: has no certificate in PEM ({reason})") from None
        return read


def _no_password() -> str:
    """Returns an empty password, in place of a prompt on the terminal."""
    return ""


def replace_file(path: Path, text: str) -> None:
    """Replaces a file atomically. It keeps its mode; a new file has 0644.

    Raises:
        OSError: It cannot be written; the old file is unchanged, and no temporary file is left.
    """
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        staged = Path(file.name)
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            staged.chmod(mode)
            staged.replace(path)
        except OSError:
            staged.unlink(missing_ok=True)
            raise
