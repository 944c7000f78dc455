"""How fast the machine reads memory, and what that allows a decode step.

python bandwidth.py THREADS     # bytes a second
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

_BUFFER_BYTES = 1 << 30
"""Far more than any cache holds."""
_BLOCK_ELEMENTS = 1 << 16
_MEASUREMENTS = 7


def measure_bandwidth(num_threads: int) -> float:
    """Reads a buffer of 1 GiB with as many threads; returns bytes a second, the best of several times."""
    # In a process of its own: the buffer goes with it, and NumPy's own threads can be turned off.
    command = [sys.executable, __file__, str(num_threads)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def decode_limit(*, bandwidth: float, weight_bytes: int, cache_bytes_per_token: int, rows: int, length: float) -> float:
    """Tokens a second that reading alone allows a decoder: every step reads all weights and every row's cache.

    Args:
        bandwidth: Bytes a second.
        weight_bytes: Of all weights that a step reads.
        cache_bytes_per_token: Keys and values of one token.
        rows: Sequences in the batch.
        length: Tokens of a sequence, on average.
    """
    return rows * bandwidth / (weight_bytes + rows * length * cache_bytes_per_token)


def _measure(num_threads: int) -> float:
    buffer = np.ones(_BUFFER_BYTES // 4, np.float32)
    parts = np.array_split(buffer, num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        times_s = []
        for _ in range(_MEASUREMENTS):
            begun_s = time.perf_counter()
            list(pool.map(_read, parts))
            times_s.append(time.perf_counter() - begun_s)
    return buffer.nbytes / min(times_s)


def _read(part: NDArray[np.float32]) -> float:
    """Reads every element from memory once; the product's second reading of a block is from the cache."""
    return float(sum(np.dot(block, block) for block in np.array_split(part, max(1, len(part) // _BLOCK_ELEMENTS))))


if __name__ == "__main__":
    print(_measure(int(sys.argv[1])))
