"""A folder for the processes of one server alone, in memory where that has room.

Each of them holds a lock on it, which the kernel takes back when it ends: a folder that nobody holds was left behind by
processes that were killed, and the next server removes it.
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
"""Folder in it, of prepared images."""
_PREFIX: Final = "headway-server-workers-"
_IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (folders in it are made with a name of their own)
_STATE_BYTES: Final = 2**20
"""For everything in it but images."""
_MOST_LETTERS: Final = 60
"""Of the path of its parent: a socket in it may have 107."""
_ABANDONED_S: Final = 60.0
"""Age of a folder from which on it is held, if anybody needs it."""


@contextmanager
def private_folder(num_bytes: int) -> Iterator[Path]:
    """Makes a folder that only the user of this process can read, with room for so many bytes; removes it at the end.

    Raises:
        ServerError: There is nowhere to make it.
    """
    folder = _make(num_bytes + _STATE_BYTES)
    lock = hold(folder)
    (folder / IMAGES).mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def hold(folder: Path, *, alone: bool = False) -> int:
    """Has a folder stay while this process is there; returns a file descriptor.

    Raises:
        OSError: It has gone, or is to be held alone and others hold it.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
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
    """Returns where the folder may be made, the best place first."""
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
        with suppress(OSError):  # it is another user's, or somebody holds it
            lock = hold(folder, alone=True)
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder)
            os.close(lock)
