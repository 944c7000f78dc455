"""Resources of this process: cores, memory, and exactness of int8 products on the processor.

Affinity and control groups limit containers and services; a group's limits apply to all groups within it.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

from headway_server.errors import RuntimeUnavailableError

Device: TypeAlias = Literal["cpu", "cuda"]

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
_CPU_INFO = Path("/proc/cpuinfo")
_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of the C library's `mallopt`."""


# Cores


def usable_cores() -> int:
    """Returns the usable cores of this process: its affinity, limited by the control groups' CPU quota, at least 1."""
    cores, quota = _affinity(), _cgroup_quota()
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def describe_cores() -> str:
    """Describes the source of `usable_cores`, for the log."""
    quota = _cgroup_quota()
    limit = "no quota" if quota is None else f"a quota of {quota:g}"
    return f"{usable_cores()} of the machine's {os.cpu_count()}: {_affinity()} by affinity, {limit} by control group"


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cgroup_quota() -> float | None:
    """Returns the smallest CPU quota of the process's control groups, in cores; None without one."""
    quotas = [_quota_v2(folder) for folder in _cgroup_folders("", _CGROUP)]
    quotas += [_quota_v1(folder) for folder in _cgroup_folders("cpu", _CGROUP / "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def has_exact_int8() -> bool:
    """Returns True if products of uint8 and int8 are summed without saturation; on x86 that takes VNNI instructions."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        flags = _CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_vnni" in flags or "avx_vnni" in flags


# Memory


def available_bytes(device: Device) -> int | None:
    """Returns the memory, in bytes, that can be taken without pushing anything out; None where it is not known.

    On the CPU: the kernel's available memory, limited by the control groups. On CUDA: the free memory.
    """
    if device == "cuda":
        return _free_on_cuda()
    return max(0, min([int(psutil.virtual_memory().available), *_left_in_cgroups()])) // _num_sharers


_num_sharers = 1


def share_memory(num_processes: int) -> None:
    """Divides the memory by a number of equal processes, including this one; called before it allocates any."""
    global _num_sharers  # noqa: PLW0603 (a fact of the process, as its affinity is)
    _num_sharers = num_processes


def format_size(num_bytes: int) -> str:
    """Writes a number of bytes in MiB, or in GiB where it is large."""
    mib = num_bytes / 2**20
    return f"{mib:.1f} MiB" if mib < 10_000 else f"{mib / 1024:.1f} GiB"


def map_large_arrays() -> None:
    """Lets the C library take each array of 4 MiB or more from the system by itself, if it supports that (glibc).

    Such memory goes back as soon as it is freed. Otherwise arrays of up to 32 MiB may be in the heap, which keeps
    what is freed below something that is not.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, 4 << 20)


def give_back_memory() -> None:
    """Returns memory freed in the C library to the system, if the library supports it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _left_in_cgroups() -> Iterator[int]:
    """Yields the remaining bytes under each limit of the process's control groups."""
    for folder in _cgroup_folders("", _CGROUP):
        yield from _left_in_cgroup(folder, "memory.max", "memory.current", "inactive_file")
    for folder in _cgroup_folders("memory", _CGROUP / "memory"):
        yield from _left_in_cgroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left_in_cgroup(folder: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    """Yields the remaining bytes under a control group's limit, if it has one; its file cache counts as free."""
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        if most == "max":
            return
        taken = int((folder / used).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        reclaimable = next((int(line.split()[1]) for line in stat if line.startswith(f"{cache} ")), 0)
        yield int(most) - taken + reclaimable
    except (OSError, ValueError):
        return


def _free_on_cuda() -> int | None:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if load_cudart().cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) != 0:
        return None
    return free.value


def load_cudart() -> ctypes.CDLL:
    """Loads the CUDA runtime, which ONNX Runtime has loaded already.

    Raises:
        RuntimeUnavailableError: It is not there.
    """
    for name in ("libcudart.so.13", "libcudart.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeUnavailableError("the CUDA runtime library libcudart.so.13 was not found; install headway-server[gpu]")


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Returns the folders of the process's control group and of those above it, up to `root`.

    In a container the group may bear the name that the host gives it, while `root` is the container's own: then only
    `root` is there.

    Args:
        controller: Controller of control groups version 1; empty for version 2.
        root: Where the hierarchy is mounted.
    """
    try:
        lines = _CGROUP_OF_PROCESS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = (line.split(":", 2) for line in lines if line.count(":") >= 2)  # number:controllers:path
    path = next((path for _, controllers, path in fields if controller in controllers.split(",")), "/")
    group = root / path.strip("/")
    return [group, *(folder for folder in group.parents if folder.is_relative_to(root))]
