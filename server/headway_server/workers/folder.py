"""A private folder for the processes of a server, in memory if there is room.

Each process holds a lock on it, released by the kernel at its end. An unlocked folder was left by killed processes, and
the next server removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from headway_server.errors import ServerError

IMAGES: Final = "images"
"""Subfolder of prepared images."""
_PREFIX: Final = "headway-server-workers-"
_IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (folders in it are made with a name of their own)
_STATE_BYTES: Final = 2**20
"""Room for everything but images, in bytes."""
_MOST_LETTERS: Final = 60
"""Limit of the parent's path in bytes: the path of a socket has at most 107."""
_ABANDONED_S: Final = 60.0
"""Age in seconds from which a folder in use is locked."""


@contextmanager
def private_folder(num_bytes: int) -> Iterator[Path]:
    """Creates a folder readable only by this user, with room for `num_bytes`; removes it at the end.

    Raises:
        ServerError: No parent folder has room.
    """
    folder = _make(num_bytes + _STATE_BYTES)
    lock = lock_folder(folder)
    (folder / IMAGES).mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def lock_folder(folder: Path, *, exclusive: bool = False) -> int:
    """Locks a folder while this process runs; returns a file descriptor.

    Raises:
        OSError: It was removed, or `exclusive` is set and another process holds a lock.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except OSError:
        os.close(lock)
        raise
    return lock


def _make(num_bytes: int) -> Path:
    reason = ""
    for parent in _parents(num_bytes):
        _remove_abandoned(parent)
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            reason = f": {error}"
    raise ServerError(
        f"several workers need a folder, and neither {_IN_MEMORY} nor the folder of temporary files can be written"
        f"{reason}; set TMPDIR to one that can, of at most {_MOST_LETTERS} letters"
    )


def _parents(num_bytes: int) -> list[Path]:
    """Returns possible parent folders, the best first."""
    temporary: list[Path] = []
    with suppress(FileNotFoundError):
        if len(os.fsencode(found := tempfile.gettempdir())) <= _MOST_LETTERS:
            temporary = [Path(found)]
    with suppress(OSError):
        if shutil.disk_usage(_IN_MEMORY).free >= num_bytes:
            return [_IN_MEMORY, *temporary]
    return [*temporary, _IN_MEMORY]


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or in use
            lock = lock_folder(folder, exclusive=True)
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder)
            os.close(lock)
