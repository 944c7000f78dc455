"""What a training ran on, for the model card."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import torch

_LIBRARIES = ("headway-training", "torch", "tokenizers", "sacrebleu", "scikit-learn", "numpy")


def describe_hardware(device: torch.device, num_processes: int = 1) -> str:
    """Names the processor or the GPU, with the number of cores or devices that were used."""
    if device.type == "cuda":
        return f"{num_processes} x {torch.cuda.get_device_name(device)}"
    cores = num_processes * torch.get_num_threads()
    return f"{_processor()}, {cores} {'core' if cores == 1 else 'cores'}"


def library_versions() -> dict[str, str]:
    """Versions of what decides a training's result."""
    return {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}


def _processor() -> str:
    """Name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
