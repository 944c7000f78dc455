"""The translation benchmark runs on its tiny model, and measures what benchmarks/README.md says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OWN_ROWS = ["headway int8, served", "headway fp32, served", "headway int8, bare loop", "headway fp32, bare loop"]
LOADS = [(case, callers) for case in ("greedy", "beam 4") for callers in (1, 8, 32)]


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    command = [sys.executable, str(BENCHMARKS / "translation.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    scratch = tmp_path_factory.mktemp("translation")
    output, picture = scratch / "translation.json", scratch / "translation.svg"
    ended = run_benchmark("--quick", "--rounds", "1", "--output", str(output), "--picture", str(picture))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert json.loads(output.read_text(encoding="utf-8")) == last
    ElementTree.parse(picture)
    return last


def test_every_side_is_measured_greedy_and_with_beams(report: dict) -> None:
    assert [row["name"] for row in report["rows"]] == OWN_ROWS
    for row in report["rows"]:
        assert [(load["case"], load["streams"]) for load in row["loads"]] == LOADS
        assert all(load["tokens_per_s"] > 0 for load in row["loads"])
        assert all(len(load["rounds_tokens_per_s"]) == 2 for load in row["loads"])


def test_the_share_of_the_bare_loop_is_judged_for_every_load(report: dict) -> None:
    assert [target["name"] for target in report["targets"]] == [
        f"{case}, {callers} calls: times headway int8, bare loop" for case, callers in LOADS
    ]
    assert all(target["target"] == 0.85 for target in report["targets"])


def test_memory_is_told_for_both_precisions(report: dict) -> None:
    assert set(report["memory"]) == {"int8", "fp32"}
    assert all(memory["peak_resident_mib"] > memory["cache_mib"] > 0 for memory in report["memory"].values())


def test_a_peer_that_is_not_known_is_refused_by_name() -> None:
    ended = run_benchmark("--quick", "--peers", "CTranslate3")
    assert ended.returncode == 1
    assert "CTranslate3" in ended.stderr
    assert "CTranslate2 int8" in ended.stderr
