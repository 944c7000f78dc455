"""Files that a run goes on from, written so that neither a killed process nor a power cut leaves a part of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives another path to write to; what is there at the end of the block takes the place of `path`.

    The content is on the disk before it has its name, and the name before the block is left: what is done after it
    may rely on the file. Missing folders are made. Several processes may write the same file at once, each elsewhere.
    """
    new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f"{path.name}.{secrets.token_hex(4)}.writing")
    try:
        yield staging
        _flush(staging)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    for folder in (path.parent, *(one.parent for one in new)):
        _flush(folder)


def _flush(path: Path) -> None:
    """Has the system write a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
