"""What a training runs on: its names for the model card, its memory, and its matrix throughput."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from pathlib import Path

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
"""Dense matrix products with bf16 (T4: fp16) inputs, from data sheets, by a part of the card's name, longest first."""
_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_INFO = Path("/proc/meminfo")
_PROBE_SIZE = 1024
_PROBE_S = 0.1


def describe_hardware(device: torch.device, num_processes: int = 1) -> str:
    """Names the processor or the GPU, with the number of cores or devices that were used."""
    if device.type == "cuda":
        return f"{num_processes} x {torch.cuda.get_device_name(device)}"
    cores = num_processes * torch.get_num_threads()
    return f"{_processor()}, {cores} {'core' if cores == 1 else 'cores'}"


def library_versions() -> dict[str, str]:
    """Versions of what decides a training's result."""
    return {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}


def available_bytes(device: torch.device) -> int | None:
    """Memory that a training may take: free on the GPU, or what machine and container leave; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [limit for limit in (_free_of_machine(_MEMORY_INFO), _free_of_container(_CGROUP)) if limit is not None]
    return min(limits, default=None)


def _free_of_machine(file: Path) -> int | None:
    """`MemAvailable`, in bytes."""
    if not file.is_file():
        return None
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_of_container(folder: Path) -> int | None:
    """What a control group (version 2) leaves of its limit, with the file cache that it gives back."""
    limit, used, statistics = (folder / name for name in ("memory.max", "memory.current", "memory.stat"))
    if not (limit.is_file() and used.is_file()):
        return None
    text = limit.read_text(encoding="utf-8").strip()
    if text == "max":
        return None
    cached = 0
    if statistics.is_file():
        pairs = (line.split() for line in statistics.read_text(encoding="utf-8").splitlines())
        cached = next((int(value) for name, value in pairs if name == "inactive_file"), 0)
    return max(0, int(text) - int(used.read_text(encoding="utf-8")) + cached)


def matrix_flops(device: torch.device, *, bf16: bool) -> float:
    """Floating-point operations a second of matrix products, measured for a tenth of a second."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    left, right = (torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype, device=device) for _ in range(2))
    _multiply(left, right)  # the first one is slow
    start_s, count = time.perf_counter(), 0
    while time.perf_counter() - start_s < _PROBE_S:
        _multiply(left, right)
        count += 1
    return 2 * _PROBE_SIZE**3 * count / (time.perf_counter() - start_s)


def _multiply(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.mm(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)


def peak_flops(card: str) -> float | None:
    """Matrix peak of a GPU by its name, in floating-point operations a second; None for one that is not known."""
    names = sorted(_PEAK_TFLOPS, key=len, reverse=True)
    return next((_PEAK_TFLOPS[name] * 1e12 for name in names if name in card), None)


def device_peak_flops(device: torch.device) -> float | None:
    """Matrix peak of the GPU that is trained on; None for a CPU, and for a card that is not known."""
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
