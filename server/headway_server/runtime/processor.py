"""What the processor offers: cores this process may use, and whether int8 products are exact on it."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
_CPU_INFO = Path("/proc/cpuinfo")


def usable_cores() -> int:
    """Returns the cores this process may keep busy: its affinity, cut by the control group's CPU quota, at least 1."""
    cores, quota = _affinity(), _cgroup_quota()
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def describe_cores() -> str:
    """Says where `usable_cores` comes from, for the log."""
    quota = _cgroup_quota()
    limit = "no quota" if quota is None else f"a quota of {quota:g}"
    return f"{usable_cores()} of the machine's {os.cpu_count()}: {_affinity()} by affinity, {limit} by control group"


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cgroup_quota() -> float | None:
    """Returns the least CPU quota, in cores, of the process's control groups; None where there is none.

    A group's quota holds for the groups in it, so that of a service's slice counts too.
    """
    quotas = [_quota_v2(folder) for folder in _cgroup_folders("", _CGROUP)]
    quotas += [_quota_v1(folder) for folder in _cgroup_folders("cpu", _CGROUP / "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Returns the folders of the process's group and those above it, up to `root`.

    In a container the group may be named as the host sees it while `root` is the container's own: then only `root` is
    there.

    Args:
        controller: Of version 1; empty for version 2.
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
