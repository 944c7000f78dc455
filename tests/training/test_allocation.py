"""Memory that is freed and taken again."""

import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes
import resource
from headway_training.allocation import keep_freed_memory
assert not {keeps} or keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def take() -> None:
    block = libc.malloc(2**26)
    libc.memset(block, 1, 2**26)
    libc.free(block)
take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone can be told to keep what is freed")
def test_what_is_freed_is_taken_again_without_asking_the_kernel() -> None:
    """Eight times 64 MiB, of which every page would be new."""
    faults = {
        keeps: int(subprocess.check_output([sys.executable, "-c", _PROGRAM.format(keeps=keeps)], text=True))
        for keeps in (False, True)
    }
    assert faults[True] < 1000 < 8 * 1000 < faults[False]
