"""What this process may take of the machine, where control groups limit it."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headway_server.runtime import machine

MIB = 2**20


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hierarchy of control groups, in which this process is `/services/headway`."""
    (tmp_path / "own").write_text("4:memory:/services/headway\n3:cpu,cpuacct:/services/headway\n0::/services/headway\n")
    root = tmp_path / "groups"
    for hierarchy in ("", "cpu", "memory"):
        (root / hierarchy / "services" / "headway").mkdir(parents=True)
    monkeypatch.setattr(machine, "_CGROUP", root)
    monkeypatch.setattr(machine, "_CGROUP_OF_PROCESS", tmp_path / "own")
    return root


@pytest.mark.parametrize(("content", "expected"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5)])
@pytest.mark.parametrize("group", [".", "services", "services/headway"])
def test_the_control_groups_quota_is_read_wherever_it_is_set(cgroup, group, content, expected):
    (cgroup / group / "cpu.max").write_text(content + "\n")
    assert machine._cgroup_quota() == expected
    assert 1 <= machine.usable_cores() <= (2 if expected else 10_000)


def test_the_least_quota_of_the_groups_counts(cgroup):
    for group, quota in ((".", "max"), ("services", "150000"), ("services/headway", "400000")):
        (cgroup / group / "cpu.max").write_text(f"{quota} 100000")
    assert machine._cgroup_quota() == 1.5
    assert "a quota of 1.5 by control group" in machine.describe_cores()


@pytest.mark.parametrize("group", [".", "services/headway"])
def test_the_first_versions_quota_is_read(cgroup, group):
    for name, value in (("cpu.cfs_quota_us", "300000"), ("cpu.cfs_period_us", "100000")):
        (cgroup / "cpu" / group / name).write_text(value)
    assert machine._cgroup_quota() == 3


def test_a_container_that_sees_its_hosts_group_names_reads_its_own_root(cgroup, tmp_path):
    (tmp_path / "own").write_text("0::/docker/0123456789abcdef\n")
    (cgroup / "cpu.max").write_text("200000 100000")
    assert machine._cgroup_quota() == 2


def test_without_control_groups_there_is_no_quota(cgroup, tmp_path):
    (tmp_path / "own").unlink()
    assert machine._cgroup_quota() is None
    assert "no quota by control group" in machine.describe_cores()


def limit_memory(folder: Path, limit_mib: float | str, used_mib: float, cache_mib: float) -> None:
    """Writes the files of a group of version 2."""
    limit = limit_mib if isinstance(limit_mib, str) else round(limit_mib * MIB)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{round(used_mib * MIB)}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {round(cache_mib * MIB)}\nactive_file 2\n")


@pytest.mark.parametrize("group", [".", "services", "services/headway"])
def test_the_memory_limit_is_read_wherever_it_is_set(cgroup, group):
    for folder in (cgroup, cgroup / "services", cgroup / "services" / "headway"):
        limit_memory(folder, "max", 1, 0)
    limit_memory(cgroup / group, 3, 2, 0.5)
    assert machine.available_bytes("cpu") == round(1.5 * MIB)


def test_the_least_that_a_limit_leaves_counts(cgroup):
    limit_memory(cgroup / "services", 8, 7, 0)  # other services of the slice have taken most of it
    limit_memory(cgroup / "services" / "headway", 4, 1, 0)
    assert machine.available_bytes("cpu") == MIB


@pytest.mark.parametrize("group", [".", "services", "services/headway"])
def test_the_first_versions_memory_limit_is_read(cgroup, group):
    folder = cgroup / "memory" / group
    for name, value in (("memory.limit_in_bytes", 3 * MIB), ("memory.usage_in_bytes", 2 * MIB)):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"cache 7\ntotal_inactive_file {MIB // 2}\n")
    assert machine.available_bytes("cpu") == round(1.5 * MIB)


def test_a_group_that_has_taken_more_than_its_limit_leaves_nothing(cgroup):
    limit_memory(cgroup, 3, 4, 0)
    assert machine.available_bytes("cpu") == 0


def test_without_a_limit_there_is_what_the_machine_has(cgroup, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 5 * MIB}))
    assert machine.available_bytes("cpu") == 5 * MIB
    (cgroup / "memory.max").write_text("nonsense\n")
    assert machine.available_bytes("cpu") == 5 * MIB
    limit_memory(cgroup, 100, 1, 0)
    assert machine.available_bytes("cpu") == 5 * MIB


_FREED = """
import numpy as np
from headway_server.runtime import map_large_arrays
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) >> 10
np.ones(1 << 21)  # from then on the C library takes arrays of up to 16 MiB from its heap
map_large_arrays()
before = anonymous()
held = []
for _ in range(8):
    large = [np.ones(1 << 20), np.ones(1 << 20)]
    held.append(np.ones(1 << 12))
    del large
print(anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's files")
def test_large_arrays_go_back_to_the_system_when_they_are_freed():
    found = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 8, "MiB of 16 that were freed"
