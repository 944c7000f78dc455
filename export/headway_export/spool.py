"""Arrays that are kept on disk until they are read: the sources that a decoder attends to, and answers of PyTorch.

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
