"""The generation benchmark runs on its tiny model, measures what benchmarks/README.md says, and judges it rightly."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
KEYS = {
    "schema_version",
    "started_at",
    "command",
    "git_commit",
    "hardware",
    "versions",
    "settings",
    "model",
    "bandwidth",
    "rows",
    "latency",
    "memory",
    "targets",
}
OWN_ROWS = ["headway int8, served", "headway fp32, served", "headway int8, bare loop", "headway fp32, bare loop"]
LOADS = [(prompt_set, streams) for prompt_set in ("128", "32-256") for streams in (1, 8, 32)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generation")


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    command = [sys.executable, str(BENCHMARKS / "generation.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


@pytest.fixture(scope="module")
def report(scratch: Path) -> dict:
    output, picture = scratch / "generation.json", scratch / "generation.svg"
    ended = run_benchmark("--quick", "--new-tokens", "8", "--output", str(output), "--picture", str(picture))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert json.loads(output.read_text(encoding="utf-8")) == last
    ElementTree.parse(picture)
    return last


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the folder of scripts."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_the_last_line_holds_the_documented_keys(report: dict) -> None:
    assert set(report) == KEYS
    assert report["settings"]["geometry"] == "tiny"
    assert report["bandwidth"]["gb_per_s"] > 0


def test_every_row_is_measured_with_every_load(report: dict) -> None:
    assert [row["name"] for row in report["rows"]] == OWN_ROWS
    for row in report["rows"]:
        assert [(load["case"], load["streams"]) for load in row["loads"]] == LOADS
        for load in row["loads"]:
            assert len(load["rounds_tokens_per_s"]) == report["settings"]["rounds"]
            assert load["tokens_per_s"] > 0


def test_newcomers_and_running_streams_are_measured(report: dict) -> None:
    latency = report["latency"]
    assert latency["first_token_ms"]["count"] == latency["idle_first_token_ms"]["count"] == 2
    assert latency["gap_ms"]["count"] > 0


def test_memory_is_weights_and_cache_and_the_rest(report: dict) -> None:
    for memory in report["memory"].values():
        parts = memory["weights_mib"] + memory["cache_mib"] + memory["beyond_mib"]
        assert parts == pytest.approx(memory["peak_resident_mib"], abs=0.2)


def test_an_unknown_peer_is_told() -> None:
    ended = run_benchmark("--quick", "--peers", "nobody")
    assert ended.returncode == 1
    assert "known are CTranslate2 int8" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_prompts_have_the_length_they_are_said_to_have(module) -> None:
    random_gpt, prompts = module("random_gpt"), module("prompts")
    tokenizer: Tokenizer = random_gpt.make_tokenizer(1024)
    drawn = prompts.PromptSource(tokenizer, shortest=32, longest=256, seed=5).take(64)
    for prompt in drawn:
        assert tokenizer.encode(prompt.text, add_special_tokens=False).ids == list(prompt.token_ids)
    lengths = [len(prompt.token_ids) for prompt in drawn]
    assert 32 <= min(lengths) < 40
    assert 248 < max(lengths) <= 256
    assert len({prompt.text for prompt in drawn}) == len(drawn)


def test_a_full_size_vocabulary_has_exactly_its_tokens(module) -> None:
    random_gpt = module("random_gpt")
    tokenizer = random_gpt.make_tokenizer(50257)
    assert tokenizer.get_vocab_size() == 50257
    assert set(tokenizer.get_vocab().values()) == set(range(50257))


def test_targets_are_judged_by_the_rounds_own_ratios(module) -> None:
    targets = module("targets")
    ours, bare, peer = targets.OURS, "headway int8, bare loop", "CTranslate2 int8"
    rounds = {(ours, "128", 8): [90.0, 45.0, 300.0], (bare, "128", 8): [100.0, 50.0, 150.0]}
    rounds |= {(peer, "128", 8): [50.0, 25.0, 100.0]}
    latency = {
        "gap_ms": {"median": 10.0, "p99": 30.1},
        "idle_first_token_ms": {"median": 40.0},
        "first_token_ms": {"median": 90.0},
    }
    verdicts = targets.judge(rounds, latency, {"beyond_mib": 300.5})
    assert [(verdict.value, verdict.target, verdict.is_hit) for verdict in verdicts] == [
        (0.9, 0.9, True),
        (1.8, 2.0, False),
        (30.1, 30.0, False),
        (90.0, 90.0, True),
        (300.5, 300.0, False),
    ]


def test_what_memory_allows_counts_weights_once_and_caches_by_row(module) -> None:
    limit = module("bandwidth").decode_limit
    assert limit(bandwidth=1000.0, weight_bytes=80, cache_bytes_per_token=2, rows=1, length=10) == 10
    assert limit(bandwidth=1000.0, weight_bytes=80, cache_bytes_per_token=2, rows=4, length=10) == 25
