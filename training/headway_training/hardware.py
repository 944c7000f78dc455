"""The machine that a run is on: its name for the model card, its memory, and its matrix throughput."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

_LIBRARIES = ("headway-training", "torch", "tokenizers", "sacrebleu", "scikit-learn", "numpy")
_PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "T4": 65.0,
}
"""Dense matrix products with bf16 (T4: fp16) inputs, from data sheets, by a part of the card's name."""
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_PROBE_SIZES = (256, 512, 1024)
_PROBE_S = 0.1
_LOOK_S = 0.25
"""Time over which the load of the cores is measured."""
_TRIM_THRESHOLD, _MMAP_MAX, _LARGEST = -1, -4, 2**31 - 1  # mallopt(3)


def describe_hardware(device: torch.device, num_processes: int = 1) -> str:
    """Names the processor or the GPU, with the number of cores or devices that are used."""
    if device.type == "cuda":
        return f"{num_processes} x {torch.cuda.get_device_name(device)}"
    cores = num_processes * torch.get_num_threads()
    return f"{_processor()}, {cores} {'core' if cores == 1 else 'cores'}"


def free_threads() -> int:
    """Threads for a run on the CPU: as many as cores are free at the moment, at least 1.

    A thread that waits for its core holds up all others at the end of every operation: on two busy cores, two threads
    took 40 s for a run that takes one 5 s. OMP_NUM_THREADS, where it is set, decides.
    """
    most = torch.get_num_threads()
    if most == 1 or "OMP_NUM_THREADS" in os.environ:
        return most
    busy: list[float] = psutil.cpu_percent(interval=_LOOK_S, percpu=True)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(busy))
    free = sum(100 - share for core, share in enumerate(busy) if core in own) / 100
    return max(1, min(most, round(free)))


def library_versions() -> dict[str, str]:
    """Versions of what decides a run's result."""
    return {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}


def available_bytes(device: torch.device) -> int:
    """Memory that a run may take: the free memory of the GPU, or that of the machine within its control groups."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([int(psutil.virtual_memory().available), *_left_by_cgroups(_CGROUPS, _OWN_CGROUP)])


def _left_by_cgroups(root: Path, own: Path) -> Iterator[int]:
    """What the process's control group (version 2), and each one above it, leaves of its limit.

    The file cache that the kernel gives back counts as left.
    """
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in (root / name, *(root / name).parents):
        if not folder.is_relative_to(root):
            return
        limit, used, statistics = (folder / file for file in ("memory.max", "memory.current", "memory.stat"))
        if limit.is_file() and used.is_file() and (text := limit.read_text(encoding="utf-8").strip()) != "max":
            pairs = (line.split() for line in statistics.read_text(encoding="utf-8").splitlines())
            cached = next((int(value) for key, value in pairs if key == "inactive_file"), 0)
            yield max(0, int(text) - int(used.read_text(encoding="utf-8")) + cached)


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, except for what lies beyond 2 GiB at the end of its heap.

    By default glibc gives a large block back to the kernel as soon as it is freed, and the next step has it zeroed
    again, page by page. The translation recipe is a third faster where blocks are kept, and takes twice the memory
    (docs/journal/training-loop.md).

    Returns:
        True if the C library can do it: glibc can.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _LARGEST))


def matrix_flops(device: torch.device, *, bf16: bool) -> float:
    """Floating-point operations a second of matrix products, measured once in a process for a tenth of a second."""
    return _matrix_flops(device, torch.bfloat16 if bf16 else torch.float32, torch.get_num_threads())


@functools.cache
def _matrix_flops(device: torch.device, dtype: torch.dtype, _num_threads: int) -> float:
    for size in _PROBE_SIZES:
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        _multiply(left, right)  # the first one is slow
        start_s = time.perf_counter()
        _multiply(left, right)
        if 8 * (time.perf_counter() - start_s) > _PROBE_S:  # as long as one of the next size takes
            break
    start_s, count = time.perf_counter(), 0
    while time.perf_counter() - start_s < _PROBE_S:
        _multiply(left, right)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - start_s)


def _multiply(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.mm(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)


def peak_flops(card: str) -> float | None:
    """Matrix peak of a GPU by its name, in floating-point operations a second; None for an unknown one."""
    longest_first = sorted(_PEAK_TFLOPS, key=len, reverse=True)
    return next((_PEAK_TFLOPS[name] * 1e12 for name in longest_first if name in card), None)


def device_peak_flops(device: torch.device) -> float | None:
    """Matrix peak of the GPU in use; None for a CPU and for an unknown card."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _processor() -> str:
    """Name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
