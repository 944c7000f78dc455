"""Memory and disk that an export takes, by what exports were seen to take (docs/decisions/mapped-weights.md).

They are looked at before anything is computed, so that an export which cannot end does not begin.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

from headway_export.errors import SourceError
from headway_server.bundles import Precision
from headway_server.runtime import available_bytes

FLOAT_BYTES: Final = 4
_GIB: Final = 1 << 30
_COPIES: Final = 2.0
"""Of the weights in fp32 that an export holds: in the module, which its graphs share, and packed by a session."""
_MAPPED_COPIES: Final = 0.5
"""The same where weights are mapped from disk and fp32 only judges: what int8 and int4 hold of them, and pack."""
_WRITING_BYTES: Final = 3 * _GIB // 4
"""What an export computes with where a model writes: answers that are kept, a cache, rows of logits."""
_READING_BYTES: Final = 3 * _GIB // 10
"""The same of models that only read."""
_SCORE_ARRAYS: Final = 6
"""Of attention scores of the longest input that PyTorch and a session hold, where two inputs are computed together."""
_LONGEST_WHOLE: Final = 2048
"""Positions from which on scores of models that only read take no more: they attend in chunks (`ChunkAttention`)."""
_LOGIT_ARRAYS: Final = 2
_MOST_LOGITS_BYTES: Final = 1 << 27
"""Of a text that are compared at a time."""
_BYTES_OF_WEIGHT: Final = {
    Precision.FP32: 4.0,
    Precision.FP16: 2.0,
    Precision.INT8: 1.1,
    Precision.INT8_STATIC: 1.1,
    Precision.INT4: 0.8,  # tables are in int8, and a block of 32 has a scale
}
"""On disk, scales included."""


def working_bytes(*, writes: bool, num_heads: int, length: int, vocab_size: int) -> int:
    """Returns about how many bytes an export computes with, beside weights.

    Args:
        writes: True of a model with a decoder.
        num_heads: Of a layer that attends to the longest input.
        length: Positions of that input.
        vocab_size: Logits of a position.
    """
    logits = min(FLOAT_BYTES * length * vocab_size, _MOST_LOGITS_BYTES) if writes else 0
    scores = FLOAT_BYTES * num_heads * (length if writes else min(length, _LONGEST_WHOLE)) ** 2
    return (_WRITING_BYTES if writes else _READING_BYTES) + _LOGIT_ARRAYS * logits + _SCORE_ARRAYS * scores


def check_memory(
    owner: str,
    num_weights: int,
    *,
    working: int = 0,
    is_mapped: bool = False,
    least: float = 0,
    can_shrink: bool = True,
) -> None:
    """Checks that a model fits into memory.

    Args:
        owner: Whose weights they are, for the message.
        num_weights: How many they are.
        working: Bytes that are needed beside them (`working_bytes`).
        is_mapped: True if they are mapped from disk, in fp32, and the bundle has no fp32.
        least: How many times they are held at least, however they are read.
        can_shrink: False if neither fewer precisions nor a smaller length would help, so that neither is advised.

    Raises:
        SourceError: It does not.
    """
    copies = max(_MAPPED_COPIES if is_mapped else _COPIES, least)
    available, needed = available_bytes("cpu"), copies * FLOAT_BYTES * num_weights + working
    if available is not None and needed > available:
        beside = f" and {bytes_text(working)} beside" if working else ""
        advised = ["export it on a larger machine"]
        if can_shrink and working > 2 * _WRITING_BYTES:
            advised.insert(0, "give a smaller --max-length")
        if can_shrink and not is_mapped:
            advised.insert(0, "leave fp32 out by --precision int8 or int4, with disk for twice that")
        raise SourceError(
            f"{owner}: is too large for this machine: its {num_weights:,} weights take "
            f"{bytes_text(FLOAT_BYTES * num_weights)} in fp32, an export needs about {copies:g} times that{beside}, "
            f"{bytes_text(needed)}, and {bytes_text(available)} of memory are free; {', or '.join(advised)}"
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
