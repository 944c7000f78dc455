"""Files that change while the server runs: the access file, certificates and their keys are read, others replaced."""

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
from headway_server.serving.apart import run_apart

Content = TypeVar("Content")
_Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]

_INTERVAL_S: Final = 1.0

_log = structlog.get_logger(__name__)


class WatchedFiles(Generic[Content]):
    """Reads files again when they have changed. Where they cannot be used, what was read before stays in use."""

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], Content], use: Callable[[Content], None], *, noun: str
    ) -> None:
        """Names the files; `read` reads them for the first time.

        Args:
            paths: The files.
            read: Reads them, in a thread; raises ServerError if they cannot be used.
            use: Takes what was read when they had changed; called on the event loop.
            noun: What they are, for the log.
        """
        self._paths = tuple(paths)
        self._read = read
        self._use = use
        self._noun = noun
        self._seen: _Signature | None = None
        """When they were read."""
        self._last: _Signature | None = None
        """At the last look."""
        self._problem = ""

    def read(self) -> Content:
        """Reads the files now; errors are those of the reader."""
        self._seen = _signature(self._paths)  # before they are read: what changes meanwhile is seen later
        return self._read()

    async def check(self) -> None:
        """Reads the files if they have changed."""
        try:
            found = await run_apart(self._look, name=f"read {self._noun}")
            if found is None:
                return
            signature, content = found
            self._use(content)
        except Exception as error:  # whatever it is, the files are looked at again
            unexpected = None if isinstance(error, ServerError) else error
            problem = str(error) if unexpected is None else type(error).__name__
            if problem != self._problem:
                message = f"{self._noun} cannot be used; what was read before stays in use"
                _log.error(message, reason=problem, exc_info=unexpected)
            self._problem = problem
            return
        self._seen, self._problem = signature, ""
        _log.info(f"{self._noun} read again", files=list(map(str, self._paths)))

    def _look(self) -> tuple[_Signature, Content] | None:
        """Reads the files, if they have changed since they were read and have not since the last look.

        A file that somebody is writing may be complete for its reader: half an access file names half the keys.
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
    """Returns what tells a file from what it was before; None of one that is not there."""
    return tuple(map(_state, paths))


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """What a server shows of itself, and whom it trusts. PEM."""

    key: bytes = field(repr=False)
    chain: bytes
    client_authorities: bytes | None

    @classmethod
    def read(cls, cert_file: Path, key_file: Path, client_ca_file: Path | None) -> Self:
        """Reads and checks the files.

        Raises:
            AccessError: One cannot be read or is no PEM file, or the key is not that of the certificate.
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
            raise AccessError(f"{client_ca_file}: holds no certificate in PEM ({reason})") from None
        return read


def _no_password() -> str:
    """Stands in for a question on the terminal."""
    return ""


def replace_file(path: Path, text: str) -> None:
    """Replaces a file, so that a reader sees the old or the new one, whole. It keeps its mode; a new one has 0644.

    Raises:
        OSError: It cannot be written; the old one is as it was, and nothing is left beside it.
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
