"""Temporary folders in a store, each with a lock beside it that its process holds.

A process that is killed leaves its folder. The system has let go of the lock then, so that the next one removes both.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from headway_server.bundles.reader import read_manifest
from headway_server.errors import BundleError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is removed
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = True

_PREFIX: Final = ".staging-"
_LOCK: Final = ".lock"
_held: Final[dict[Path, int]] = {}
"""Open locks of this process, by folder."""


def new_place(store: Path) -> Path:
    """Returns a path in a store for a temporary folder, which is not made."""
    return store / f"{_PREFIX}{secrets.token_hex(4)}"


def make_held(folder: Path) -> None:
    """Makes a folder of `new_place`, and holds its lock; nothing if there is one."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(_lock_of(folder), os.O_CREAT | os.O_RDWR, 0o600)
    _held[folder] = lock
    if _HAS_LOCKS:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.mkdir(mode=0o700)


def remove_held(folder: Path) -> None:
    """Removes a folder of `new_place`, as far as it is there, the version that was moved aside for it, and its lock."""
    try:
        for left in (folder, aside_of(folder)):
            remove_folder(left)
    finally:
        if (lock := _held.pop(folder, None)) is not None:
            _lock_of(folder).unlink(missing_ok=True)
            os.close(lock)


@contextmanager
def staging_folder(store: Path) -> Iterator[Path]:
    """Creates a temporary folder on the store's file system; it is removed at the end unless it was renamed.

    So is the version that was moved aside for it (`publish`). What killed processes have left is removed first.
    """
    remove_left(store)
    folder = new_place(store)
    try:
        make_held(folder)
        yield folder
    finally:
        remove_held(folder)


def remove_left(store: Path) -> None:
    """Removes the temporary folders of processes that are gone; a version that one had moved aside is put back."""
    if not _HAS_LOCKS:
        return
    for file in store.glob(f"{_PREFIX}*{_LOCK}"):
        with suppress(OSError):  # somebody else holds it, or removes it too
            lock = os.open(file, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder = file.with_name(file.name.removesuffix(_LOCK))
                _put_back(store, aside_of(folder))
                remove_folder(folder)
                file.unlink()
            finally:
                os.close(lock)


def _put_back(store: Path, aside: Path) -> None:
    """Renames a version to what it was called before it was moved aside, or removes it if there is another by now."""
    if not aside.exists():
        return
    try:
        manifest = read_manifest(aside)
    except BundleError:  # it is partly removed
        remove_folder(aside)
        return
    target = store / manifest.name / manifest.version
    if target.exists():
        remove_folder(aside)
    else:
        aside.rename(target)


def remove_folder(folder: Path) -> None:
    """Removes a folder, if it is there, even where the process is told to end meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def aside_of(staged: Path) -> Path:
    """Returns where a version is as long as it is replaced by the folder `staged`."""
    return staged.with_name(f"{staged.name}.replaced")


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_LOCK}")
