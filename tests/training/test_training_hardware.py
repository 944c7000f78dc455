"""Memory limits of machine and container, and the matrix peak of known cards."""

import io

import pytest
import torch
from rich.console import Console

from headway_training.hardware import _free_of_container, _free_of_machine, matrix_flops, peak_flops
from headway_training.progress import TrainingDisplay


def test_the_memory_a_container_leaves_counts_its_cache_as_free(tmp_path):
    assert _free_of_container(tmp_path) is None
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _free_of_container(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert _free_of_container(tmp_path) == 300
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert _free_of_container(tmp_path) == 450


def test_the_memory_of_a_machine_is_what_it_calls_available(tmp_path):
    file = tmp_path / "meminfo"
    assert _free_of_machine(file) is None
    file.write_text("MemTotal:  2000 kB\nMemAvailable:   1500 kB\n")
    assert _free_of_machine(file) == 1500 * 1024


def test_a_card_has_the_peak_of_its_longest_name():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("Some other card") is None


def test_the_matrix_throughput_is_measured():
    assert matrix_flops(torch.device("cpu"), bf16=False) > 0


def test_a_display_tells_the_share_of_waiting_and_of_the_peak(tmp_path):
    out = io.StringIO()
    display = TrainingDisplay(
        Console(file=out, width=200),
        tmp_path,
        unit="tokens",
        num_steps=2,
        first_step=0,
        enabled=True,
        flops_per_unit=3e9,
        peak_flops=1e12,
    )
    with display:
        for step in (1, 2):
            display.step(step, loss=1.0, learning_rate=1e-3, num_units=100, duration_s=2.0, data_wait_s=0.5)
    assert display.throughput == pytest.approx(50)
    assert display.data_wait_share == pytest.approx(0.25)
    assert display.utilisation == pytest.approx(0.15)
    assert "25.0% of the training time was spent waiting for data" in out.getvalue()
