"""What is kept on disk until it is read: weights, the sources that a decoder attends to, and answers of PyTorch.

They are mapped, so that they take memory that the system may take back, as weights do that are read from files.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headway_export.errors import SourceError
from headway_export.space import free_on_disk
from headway_training.folders import first_line

_LEAST_BYTES = 1 << 20
"""Of arrays that are written; fewer are held as they are."""


def spooled(arrays: Mapping[str, NDArray[Any]], folder: Path) -> dict[str, NDArray[Any]]:
    """Writes arrays to a temporary file of a folder and returns them as they are mapped from it, in their order.

    The file is gone when the last of them is.
    """
    large = {name: array for name, array in arrays.items() if array.size}
    if sum(array.nbytes for array in large.values()) < _LEAST_BYTES:
        return dict(arrays)
    found = dict(arrays)
    with tempfile.TemporaryFile(dir=folder) as file:
        starts = []
        for array in large.values():
            file.seek(-(-file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE)
            starts.append(file.tell())
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for (name, array), start in zip(large.items(), starts, strict=True):
        found[name] = np.frombuffer(mapped, array.dtype, array.size, start).reshape(array.shape)
    return found


def zeros_on_disk(count: int, dtype: str, folder: Path) -> NDArray[Any]:
    """Returns (N,) zeros that are mapped from a temporary file of a folder, to be written to; few are in memory."""
    num_bytes = count * np.dtype(dtype).itemsize
    if num_bytes < _LEAST_BYTES:
        return np.zeros(count, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(num_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype)


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes a file of safetensors, for the time of an export.

    Raises:
        SourceError: The disk is full.
    """
    try:
        save_file(dict(tensors), file, {"format": "pt"})
    except (OSError, SafetensorError) as error:  # the library wraps the system's errors
        free = free_on_disk(file.parent)
        raise SourceError(
            f"{file.parent}: weights in fp32 cannot be written there for the time of the export ({first_line(error)}, "
            f"{free >> 20} MiB are free); make room, or name another folder with --store"
        ) from error
