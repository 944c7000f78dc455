"""A folder for the processes of one server alone, in memory where that has room.

Each of them holds a lock on it, which the kernel takes back when it ends: a folder that nobody holds was left behind by
processes that were killed, and the next server removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from headway_server.errors import ServerError

_PREFIX: Final = "headway-server-workers-"
_IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (folders in it are made with a name of their own)
_STATE_BYTES: Final = 2**20
"""For everything in it but images."""
_MOST_LETTERS: Final = 60
"""Of the path of its parent: a socket in it may have 107."""
IMAGES: Final = "images"
"""Folder in it, of prepared images."""


@contextmanager
def private_folder(num_bytes: int) -> Iterator[Path]:
    """Makes a folder that only the user of this process can read, with room for so many bytes; removes it at the end.

    Raises:
        ServerError: There is nowhere to make it.
    """
    folder, lock = _make(num_bytes)
    (folder / IMAGES).mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def hold(folder: Path) -> int:
    """Has a folder stay while this process is there; returns a file descriptor.

    Raises:
        OSError: It has gone.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _make(num_bytes: int) -> tuple[Path, int]:
    problem = OSError()
    for parent in _parents(num_bytes + _STATE_BYTES):
        try:
            _remove_abandoned(parent)
            while True:
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                with suppress(FileNotFoundError):
                    lock = hold(folder)
                    if folder.exists():  # else another server has taken it for abandoned before it was held
                        return folder, lock
                    os.close(lock)
        except OSError as error:
            problem = error
    raise ServerError(
        f"--workers needs a folder that can be written, and neither {_IN_MEMORY} nor the one for temporary files can "
        f"({problem.strerror}); set TMPDIR to one of at most {_MOST_LETTERS} letters"
    )


def _parents(num_bytes: int) -> Iterator[Path]:
    has_room = False
    with suppress(OSError):
        status = os.statvfs(_IN_MEMORY)
        has_room = status.f_bavail * status.f_frsize >= num_bytes
    if has_room:
        yield _IN_MEMORY
    with suppress(FileNotFoundError):
        if len(os.fsencode(temporary := tempfile.gettempdir())) <= _MOST_LETTERS:
            yield Path(temporary)
    if not has_room:
        yield _IN_MEMORY


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another user's, or held
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(folder)
            finally:
                os.close(lock)
