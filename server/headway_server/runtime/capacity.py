"""How much memory a device has left for state."""

from __future__ import annotations

import ctypes
from pathlib import Path

from headway_server.runtime.memory import load_cudart
from headway_server.runtime.session import Device

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_KIB = 1024


def available_bytes(device: Device) -> int | None:
    """Returns the memory, in bytes, that can be taken without pushing anything out; None where nothing tells.

    On the CPU that is what the kernel calls available, cut by the control group's limit; on CUDA, what is free.
    """
    if device == "cuda":
        return _free_on_cuda()
    limits = [limit for limit in (_available_in_machine(), _left_in_cgroup()) if limit is not None]
    return max(0, min(limits)) if limits else None


def _available_in_machine() -> int | None:
    """Returns MemAvailable of /proc/meminfo."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * _KIB for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_cgroup() -> int | None:
    """Returns what the control group (version 2, else 1) lets this process take; its file cache gives way."""
    for folder, limit, used, cache in (
        (_CGROUP, "memory.max", "memory.current", "inactive_file"),
        (_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (folder / limit).read_text(encoding="ascii").strip()
            taken = int((folder / used).read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):
            continue
        if most == "max":
            return None
        reclaimable = next((int(line.split()[1]) for line in stat if line.startswith(f"{cache} ")), 0)
        return int(most) - taken + reclaimable
    return None


def _free_on_cuda() -> int | None:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if load_cudart().cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) != 0:
        return None
    return free.value
