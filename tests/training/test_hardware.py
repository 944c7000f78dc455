"""Memory limits of machine and container, and the matrix peak of known cards."""

import io
import subprocess
import sys
import time

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console

from headway_training import hardware
from headway_training.hardware import _left_by_cgroups, available_bytes, free_threads, matrix_flops, peak_flops
from headway_training.progress import TrainingDisplay


def test_the_memory_left_is_that_of_every_control_group_above_the_process(tmp_path):
    own = tmp_path / "cgroup"
    root = tmp_path / "sys"
    service = root / "system.slice" / "train.service"
    service.mkdir(parents=True)
    assert list(_left_by_cgroups(root, own)) == []
    own.write_text("1:name=systemd:/x\n0::/system.slice/train.service\n")
    for folder, limit in ((root, "max"), (service.parent, "1000"), (service, "max")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\n")
    assert list(_left_by_cgroups(root, own)) == [300]
    (service.parent / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert list(_left_by_cgroups(root, own)) == [450]
    own.write_text("0::/of/another/namespace\n")
    (root / "memory.max").write_text("900\n")
    assert list(_left_by_cgroups(root, own)) == [200]


def test_a_machine_has_some_memory():
    assert available_bytes(torch.device("cpu")) > 2**20


def test_a_card_has_the_peak_of_its_longest_name():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("Some other card") is None


def test_the_matrix_throughput_is_measured():
    assert matrix_flops(torch.device("cpu"), bf16=False) > 0


@pytest.mark.parametrize(
    ("busy", "stated", "expected"),
    [
        ((0, 0, 0, 0), None, 4),
        ((100, 3, 0, 5), None, 3),
        ((60, 60, 60, 60), None, 2),
        ((100, 100, 100, 100), None, 1),
        ((100, 100, 100, 100), "4", 4),
    ],
)
def test_a_run_takes_the_cores_that_are_free(monkeypatch, busy, stated, expected):
    monkeypatch.setattr(hardware.psutil, "cpu_percent", lambda **_: list(busy))
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if stated is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", stated)
    torch.set_num_threads(4)
    assert free_threads() == expected


def test_a_slow_machine_multiplies_small_matrices_and_is_measured_once(monkeypatch):
    sizes = []

    def multiply(left, right):
        sizes.append(len(left))
        time.sleep(0.02)

    monkeypatch.setattr(hardware, "_multiply", multiply)
    hardware._matrix_flops.cache_clear()
    measured = {matrix_flops(torch.device("cpu"), bf16=True) for _ in range(3)}
    hardware._matrix_flops.cache_clear()
    assert len(measured) == 1
    assert set(sizes) == {256}
    assert len(sizes) < 10


def test_a_display_shows_the_share_of_waiting_and_of_the_peak():
    out = io.StringIO()
    display = TrainingDisplay(
        Console(file=out, width=200),
        Accelerator(),
        unit="tokens",
        num_steps=2,
        first_step=0,
        flops_per_unit=3e9,
        peak_flops=1e12,
    )
    with display:
        for step in (1, 2):
            display.step(step, loss=1.0, learning_rate=1e-3, num_units=100, duration_s=2.0, data_wait_s=0.5)
    assert display.throughput == pytest.approx(50)
    assert display.data_wait_share == pytest.approx(0.25)
    assert display.utilisation == pytest.approx(0.15)
    assert "trained on 50 tokens/s; 25.0% of the training time was spent waiting for data" in out.getvalue()


_PROGRAM = """
import ctypes
import resource
from headway_training.hardware import keep_freed_memory
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


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can keep what is freed")
def test_what_is_freed_is_taken_again_without_asking_the_kernel() -> None:
    """Eight times 64 MiB, of which every page would be new."""
    faults = {
        keeps: int(subprocess.check_output([sys.executable, "-c", _PROGRAM.format(keeps=keeps)], text=True))
        for keeps in (False, True)
    }
    assert faults[True] < 1000 < 8 * 1000 < faults[False]
