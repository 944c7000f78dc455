"""Keeps the memory that a training step frees for the step after it.

By its defaults the allocator of glibc gives a large block back to the kernel as soon as it is freed, and the next step
has it zeroed again, page by page. Batches of texts differ in length, so their blocks are hardly met again: the
translation recipe is a third faster where they are kept, and takes twice the memory, since a block that is kept does
not suit the next one to the byte (docs/training.md).
"""

from __future__ import annotations

import ctypes

# mallopt(3)
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees, but for what lies at the end of its heap beyond 2 GiB.

    Returns:
        Whether the C library can be told so: glibc can.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _LARGEST))
