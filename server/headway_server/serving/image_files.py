"""Prepared images as files, in a folder shared by the processes of a server.

The file's name is a hash of the image's key, and its content begins with the key. Its modification time is its last
use, by the monotonic clock, which all processes of a machine share. A lock of the folder serializes writes, so one
bound holds for all processes.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias

import structlog

from headway_server.errors import OverloadedError
from headway_server.observers import CacheUsage

CachedImage: TypeAlias = tuple[bytes, bytes]
"""A key of the image and its sender, and the encoded image."""
NOUN: Final = "prepared_images"
"""Name of the cache in the metrics."""
_LOCK: Final = "lock"
"""Lock file, which contains the bytes in use."""
_STAGED: Final = ".new"
_TOTAL: Final = struct.Struct("<q")
_KEY_BYTES: Final = 32
_PAGE_BYTES: Final = 4096
_SLACK: Final = 16
"""Divisor of the capacity freed at once: a pass over the files costs 3 µs each."""
_RETRY_AFTER_S: Final = 1.0

_log = structlog.get_logger(__name__)


class ImageFiles:
    """A cache of images in a folder of the server.

    For the event loop's thread; `usage` and `forget_expired` are thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_mib: int,
        ttl_s: float,
        num_processes: int = 1,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Opens the cache with the files in the folder.

        Args:
            folder: Folder for this alone.
            max_mib: Capacity in MiB, shared by all processes; 0: no cache.
            ttl_s: Time to live in seconds, since the last use.
            num_processes: Number of processes that share it; each reports its part of the usage.
            now: Clock of all processes, in nanoseconds.
        """
        self.max_bytes = max_mib * 2**20
        self.ttl_s = ttl_s
        self._ttl_ns = round(ttl_s * 1e9)
        self._folder = folder
        self._num_processes = num_processes
        self._now = now
        self._num_hits = self._num_misses = 0

    def room(self, num_bytes: int) -> int:
        """Returns the bytes that an image counts: whole pages."""
        return -(-(num_bytes + _KEY_BYTES) // _PAGE_BYTES) * _PAGE_BYTES

    async def find(self, names: Sequence[str]) -> dict[str, CachedImage]:
        """Returns the cached images, which counts as use."""
        read = await asyncio.to_thread(lambda: {name: self._read(name) for name in dict.fromkeys(names)})
        found = {name: image for name, image in read.items() if image is not None}
        self._num_hits += len(found)
        self._num_misses += len(read) - len(found)
        return found

    async def put(self, images: Mapping[str, CachedImage]) -> None:
        """Caches images, and evicts the least recently used ones.

        Raises:
            OverloadedError: They cannot be cached now.
        """
        try:
            await asyncio.to_thread(self._write, images)
        except OSError as error:
            _log.error("prepared images cannot be cached", folder=str(self._folder), reason=error.strerror)
            raise OverloadedError(
                f"the images cannot be cached now ({error.strerror}); send them with each call instead", _RETRY_AFTER_S
            ) from error

    def usage(self) -> CacheUsage:
        """Returns this process's part of the usage; thread-safe."""
        num_bytes = 0
        with suppress(FileNotFoundError):
            num_bytes = _unpack((self._folder / _LOCK).read_bytes())
        return CacheUsage(NOUN, num_bytes // self._num_processes, self._num_hits, self._num_misses)

    def forget_expired(self) -> None:
        """Removes expired images; reads the whole folder."""
        with self._locked() as lock:
            self._make_room(lock, 0, self._now())

    def _read(self, name: str) -> CachedImage | None:
        try:
            file = os.open(self._path(name), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            now, status = self._now(), os.fstat(file)
            if status.st_mtime_ns <= now - self._ttl_ns:
                return None
            os.utime(file, ns=(now, now))
            return os.pread(file, status.st_size, _KEY_BYTES), os.pread(file, _KEY_BYTES, 0)
        finally:
            os.close(file)

    def _write(self, images: Mapping[str, CachedImage]) -> None:
        with self._locked() as lock:
            now, absent = self._now(), {}
            for name, image in images.items():
                path = self._path(name)
                try:
                    os.utime(path, ns=(now, now))  # its name identifies its content
                except FileNotFoundError:
                    absent[path] = image
            room = sum(self.room(len(data)) for data, _ in absent.values())
            total = _total(lock)
            if total + room > self.max_bytes:
                total = self._make_room(lock, room, now)
            for path, (data, key) in absent.items():
                staged = path.with_suffix(_STAGED)
                with staged.open("wb") as file:
                    file.write(key)
                    file.write(data)
                os.utime(staged, ns=(now, now))
                staged.rename(path)
                total += self.room(len(data))
                _set_total(lock, total)

    def _make_room(self, lock: int, room: int, now: int) -> int:
        """Removes expired images, and the least recently used as needed; returns the bytes left."""
        found = []
        for entry in os.scandir(self._folder):
            if entry.name != _LOCK:
                status = entry.stat()
                is_whole = not entry.name.endswith(_STAGED)  # otherwise its writer failed
                found.append((status.st_mtime_ns * is_whole, self.room(status.st_size - _KEY_BYTES), entry.path))
        total = sum(size for _, size, _ in found)
        most = self.max_bytes - room
        spare = self.max_bytes // _SLACK if total > most else 0
        for used_at, size, path in sorted(found):
            is_enough = total <= (most if used_at >= now else most - spare)
            if used_at > now - self._ttl_ns and is_enough:
                break
            os.unlink(path)  # noqa: PTH108 (as it was listed)
            total -= size
        _set_total(lock, total)
        return total

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Locks out all other threads and processes; yields the lock file."""
        lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()

    def __repr__(self) -> str:
        return f"ImageFiles({self.usage().num_bytes * self._num_processes} of {self.max_bytes} bytes)"


def _total(lock: int) -> int:
    return _unpack(os.pread(lock, _TOTAL.size, 0))


def _set_total(lock: int, total: int) -> None:
    os.pwrite(lock, _TOTAL.pack(total), 0)


def _unpack(written: bytes) -> int:
    return int(_TOTAL.unpack(written)[0]) if written else 0
