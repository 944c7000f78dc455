"""What a benchmark ran on: hardware, versions, commit, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from headway_server.runtime import has_exact_int8, usable_cores

ROOT = Path(__file__).resolve().parents[1]
_LIBRARIES = ("onnxruntime", "onnxruntime-gpu", "grpcio", "numpy", "headway-server", "headway-client")


def describe_hardware() -> dict[str, object]:
    """Names processor, cores this process may use, memory, GPUs, and what else kept the machine busy beforehand."""
    return {
        "processor": _processor(),
        "usable_cores": usable_cores(),
        "has_exact_int8": has_exact_int8(),
        "memory_gib": _memory_gib(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Versions of what was measured; without those that are not installed."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """The commit of the tree, with `+` where tracked files differ from it; None where this is no checkout."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no") else "")


def command_line() -> str:
    """The command that was given, as a shell takes it."""
    return shlex.join([Path(sys.executable).name, *sys.argv])


def memory_mib(process_id: int) -> dict[str, float | None]:
    """Resident memory of a process and its highest value so far, in MiB; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{process_id}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    sizes = {name: float(rest.split()[0]) / 1024 for name, _, rest in (line.partition(":") for line in lines)
             if name in ("VmRSS", "VmHWM")}  # fmt: skip
    return {name: round(sizes[key], 1) if key in sizes else None for name, key in _MEMORY}


_MEMORY = (("resident_mib", "VmRSS"), ("peak_resident_mib", "VmHWM"))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _gpus() -> list[str]:
    found = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return found.splitlines() if found else []


def _output(*command: str) -> str | None:
    """Standard output of a command; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else None
