"""What the processor offers: cores this process may use, and whether int8 products are exact on it."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_CGROUP_V1_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_CPU_INFO = Path("/proc/cpuinfo")


def usable_cores() -> int:
    """Returns the cores this process may keep busy: its affinity, cut by the control group's CPU quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def _cgroup_quota() -> float | None:
    """Returns the control group's CPU quota in cores, or None where there is none (versions 2 and 1)."""
    try:
        quota, period = _CGROUP_CPU_MAX.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = _CGROUP_V1_QUOTA.read_text(encoding="ascii").strip()
            period = _CGROUP_V1_PERIOD.read_text(encoding="ascii").strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)


def has_exact_int8() -> bool:
    """Tells whether products of uint8 and int8 are summed without saturation.

    On x86 that needs the VNNI instructions; without them ONNX Runtime adds pairs of products in 16 bits, which overflow
    for large values, so that an int8 variant may answer worse there than where it was measured.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        flags = _CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_vnni" in flags or "avx_vnni" in flags
