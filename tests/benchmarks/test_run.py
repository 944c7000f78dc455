"""The benchmark runs on a store of tiny models, and its last line holds what benchmarks/README.md says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOAD_KEYS = {
    "callers",
    "requests_per_s",
    "latency_p50_ms",
    "latency_p99_ms",
    "call_count",
    "error_count",
    "limit",
    "share_of_limit",
}
STREAM_KEYS = {"first_token_p50_ms", "first_token_p99_ms", "token_gap_p50_ms", "token_gap_p99_ms"}
DECODING_LIMIT_KEYS = {"rows", "inputs_per_s", "tokens_per_s", "step_p50_ms"}
EXTRA_KEYS = {
    "generation": ({"tokens_per_s", *STREAM_KEYS}, DECODING_LIMIT_KEYS),
    "translation": ({"tokens_per_s"}, DECODING_LIMIT_KEYS),
    "text_classification": (set(), {"batch_size", "inputs_per_s"}),
    "image_classification": (set(), {"batch_size", "inputs_per_s"}),
}


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)


@pytest.fixture(scope="module")
def report(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    file = tmp_path_factory.mktemp("results") / "latest.json"
    length = ["--rounds", "1", "--seconds", "0.5", "--starts", "1", "--new-tokens", "12"]
    ended = run_benchmark("--store", str(tiny_store), "--output", str(file), *length)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert json.loads(file.read_text(encoding="utf-8")) == last
    return last


def test_the_last_line_holds_the_documented_keys(report: dict) -> None:
    assert set(report) == {
        "schema_version",
        "started_at",
        "command",
        "git_commit",
        "hardware",
        "versions",
        "settings",
        "server",
        "models",
    }
    assert {"python", "onnxruntime", "grpcio", "headway-server"} <= set(report["versions"])
    assert {"processor", "usable_cores", "memory_gib"} <= set(report["hardware"])
    assert report["server"]["start_s"]["median"] > 0
    assert {model["task"] for model in report["models"]} == set(EXTRA_KEYS)
    for model in report["models"]:
        load_keys, limit_keys = EXTRA_KEYS[model["task"]]
        for load in model["loads"]:
            assert set(load) == LOAD_KEYS | load_keys
            assert set(load["limit"]) == limit_keys


def test_every_model_answers_every_number_of_callers(report: dict) -> None:
    for model in report["models"]:
        assert [load["callers"] for load in model["loads"]] == [1, 8, 32]
        for load in model["loads"]:
            assert (load["error_count"], load["call_count"] > 0) == (0, True), model["name"]
            assert load["limit"]["inputs_per_s"] > 0


def test_a_store_that_is_not_there_is_told(tmp_path: Path) -> None:
    ended = run_benchmark("--store", str(tmp_path / "absent"))
    assert ended.returncode == 1
    assert "no such folder" in ended.stderr
    assert "Traceback" not in ended.stderr
