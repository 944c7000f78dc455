"""Memory and disk that an export takes, by what exports were seen to take (docs/decisions/mapped-weights.md).

They are looked at before anything is computed, so that an export which cannot end does not begin.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

from headway_export.errors import SourceError
from headway_server.bundles import Precision, Task
from headway_server.runtime import available_bytes

FLOAT_BYTES: Final = 4
_GIB: Final = 1 << 30
_COPIES: Final = 2.5
"""Of the weights in fp32 that an export holds at least: the module, which the graph shares, and the session that proves
it."""
_MAPPED_COPIES: Final = 1.0
"""The same where weights are mapped from disk and fp32 only judges, as opened without a second layout of them."""
_WORKING_BYTES: Final = {Task.TRANSCRIPTION: 2 * _GIB}
"""Of what is computed with, beside weights: attention scores of whole windows."""
_BYTES_OF_WEIGHT: Final = {
    Precision.FP32: 4.0,
    Precision.FP16: 2.0,
    Precision.INT8: 1.1,
    Precision.INT8_STATIC: 1.1,
    Precision.INT4: 0.8,  # tables are in int8, and a block of 32 has a scale
}
"""On disk, scales included."""


def check_memory(
    owner: str, num_weights: int, task: Task | None = None, *, is_mapped: bool = False, least: float = 0
) -> None:
    """Checks that a model fits into memory.

    Args:
        owner: Whose weights they are, for the message.
        num_weights: How many they are.
        task: What the model does; None: what needs no more than its weights.
        is_mapped: True if they are mapped from disk, in fp32, and the bundle has no fp32.
        least: How many times they are held at least, however they are read.

    Raises:
        SourceError: It does not.
    """
    copies = max(_MAPPED_COPIES if is_mapped else _COPIES, least)
    working = 0 if task is None else _WORKING_BYTES.get(task, 0)
    available, needed = available_bytes("cpu"), copies * FLOAT_BYTES * num_weights + working
    if available is not None and needed > available:
        beside = f" and {bytes_text(working)} to compute with" if working else ""
        raise SourceError(
            f"{owner}: is too large for this machine: its {num_weights:,} weights take "
            f"{bytes_text(FLOAT_BYTES * num_weights)} in fp32, an export needs at least {copies:g} times that{beside}, "
            f"{bytes_text(needed)}, and {bytes_text(available)} of memory are free; "
            + ("" if is_mapped else "leave fp32 out by --precision int8 or int4, with disk for twice that, or ")
            + "export it on a larger machine"
        )


def bundle_bytes(num_weights: int, precisions: Collection[Precision], *, writes_judge: bool = True) -> int:
    """Returns about how many bytes a bundle of so many weights takes while it is made.

    Args:
        num_weights: How many there are.
        precisions: What is kept.
        writes_judge: True if fp32 is written although it is not kept.
    """
    written = {*precisions, Precision.FP32} if writes_judge else set(precisions)
    return int(num_weights * sum(_BYTES_OF_WEIGHT[precision] for precision in written))


def free_on_disk(folder: Path) -> int:
    """Returns the bytes that are free where a folder is, or is to be made."""
    folder = folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(there).free


def check_disk(owner: str, folder: Path, num_bytes: int) -> None:
    """Checks that there is room on the disk.

    Args:
        owner: What is written, for the message.
        folder: Where to.
        num_bytes: How many there will be.

    Raises:
        SourceError: There is none.
    """
    if num_bytes > (free := free_on_disk(folder)):
        raise SourceError(
            f"{owner}: needs about {bytes_text(num_bytes)} of disk while it is exported, and {bytes_text(free)} are "
            f"free below {folder}; make room, ask for fewer precisions, or name another folder with --store"
        )


def bytes_text(num_bytes: float) -> str:
    """Returns a number of bytes for people."""
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB / 2 else f"{num_bytes / 2**20:.1f} MiB"
