"""The classification benchmark runs on its tiny models, measures what its README says, and judges it rightly."""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

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
    "models",
    "rows",
    "failures",
    "targets",
}
OWN_ROWS = ["headway, served", "gRPC echo", "bare, in order", "bare, sorted"]
MODELS = ["random-bert-base", "random-vit-b16", "ag-news", "cifar10"]


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    command = [sys.executable, str(BENCHMARKS / "classification.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("classification")
    output, picture = folder / "classification.json", folder / "classification.svg"
    ended = run_benchmark("--quick", "--output", str(output), "--picture", str(picture))
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
    assert report["settings"]["size"] == "tiny"
    assert [model["name"] for model in report["models"]] == MODELS
    assert report["failures"] == []


def test_every_row_is_measured_with_every_model_and_number_of_callers(report: dict) -> None:
    assert [row["name"] for row in report["rows"]] == OWN_ROWS
    for row in report["rows"]:
        texts_alone = row["name"] == "bare, sorted"
        models = [name for name in MODELS if not texts_alone or name in ("random-bert-base", "ag-news")]
        assert [(load["model"], load["callers"]) for load in row["loads"]] == [(m, c) for m in models for c in (1, 8)]
        for load in row["loads"]:
            assert load["inputs_per_s"] > 0
            assert len(load["rounds_inputs_per_s"]) == report["settings"]["rounds"]


@pytest.mark.parametrize(
    ("option", "name", "known"),
    [("--peers", "nobody", "LitServe"), ("--models", "nothing", "random-bert"), ("--models", "none", "random-bert")],
)
def test_an_unknown_name_is_told(option: str, name: str, known: str) -> None:
    ended = run_benchmark("--quick", option, name)
    assert ended.returncode == 1
    assert f"known are {known}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_setups_are_taken_over_from_an_earlier_run(module, tmp_path) -> None:
    contestants, environment = module("classifier_peers.contestants"), module("classifier_peers.environment")
    [peer, *_] = environment.PEERS
    one, other, *_ = peer.setups(2)
    loads = [
        {"model": "m", "callers": 1, "setting": one.name},
        {"model": "m", "callers": 8, "setting": other.name},
        {"model": "n", "callers": 1, "setting": "something that is tried no more"},
    ]
    report = {"rows": [{"name": peer.name, "loads": loads}, {"name": "bare", "loads": [{"no": "setting"}]}]}
    choices = contestants.read_choices(report)
    measurer = contestants.PeerMeasurer([peer.name], tmp_path, threads=2, precision="int8", choices=choices)
    for model, callers, taken in (("m", (1, 8), True), ("m", (1, 8, 32), False), ("n", (1,), False)):
        assert measurer._take_over(peer, SimpleNamespace(name=model), callers) is taken
    assert measurer._best == {(peer.name, "m", 1): one, (peer.name, "m", 8): other}


def test_a_file_without_setups_is_told(tmp_path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"rows": [{}]}', encoding="utf-8")
    ended = run_benchmark("--quick", "--setups", str(file))
    assert ended.returncode == 1
    assert "give the file that an earlier run of this benchmark wrote" in ended.stderr


def test_texts_have_the_lengths_of_news(module) -> None:
    texts = module("texts")
    lengths = texts.random_lengths(1000, seed=1)
    for percent, expected in zip(texts.PERCENTS, texts.LENGTHS, strict=True):
        assert abs(np.percentile(lengths, percent) - expected) <= max(2, 0.1 * expected)
    tokenizer = texts.make_tokenizer(2000)
    assert tokenizer.get_vocab_size() == 2000
    some = texts.random_texts(2000, 50, seed=2)
    assert [len(tokenizer.encode(text).ids) for text in some] == texts.random_lengths(50, seed=2)


async def test_callers_are_counted_by_the_part_of_their_calls_within_the_window(module) -> None:
    closed_loop = module("closed_loop")
    asked: list[int] = []

    async def ask(number: int) -> None:
        asked.append(number)
        await asyncio.sleep(0.02)

    figures = await closed_loop.measure_callers(ask, num_callers=4, seconds=0.4)
    assert asked == list(range(len(asked)))
    assert 0 < figures["requests_per_s"] <= 4 / 0.02
    assert figures["latency_p99_ms"] >= figures["latency_p50_ms"] >= 20


async def test_a_call_that_fails_ends_the_measurement(module) -> None:
    async def ask(number: int) -> None:
        await asyncio.sleep(0.001)
        if number == 20:
            raise LookupError(number)

    with pytest.raises(LookupError):
        await module("closed_loop").measure_callers(ask, num_callers=4, seconds=30)


def test_a_peer_pads_where_its_setup_makes_batches_of_texts_as_they_come(module) -> None:
    classification = module("classification")
    figures = classification.Figures()
    settings = {
        ("bert", "LitServe", 8): "2 workers, batches of 16",
        ("bert", "LitServe", 1): "2 workers, batches of 16",
        ("bert", "BentoML", 8): "2 workers, batches of 1",
        ("bert", "OpenVINO f32", 8): "batches of 8, sorted",
        ("vit", "LitServe", 8): "2 workers, batches of 16",
    }
    for (model, row, callers), setting in settings.items():
        figures.add(model, row, callers, {"setting": setting})
    figures.add("bert", "headway, served", 8, {"inputs_per_s": 1.0})
    assert classification._padded(figures, ["bert"]) == {("bert", "LitServe", 8)}


def test_targets_are_judged_by_the_rounds_own_ratios(module) -> None:
    targets = module("classification_targets")
    rounds = {
        ("bert", targets.OURS, 8): [95.0, 30.0, 200.0],
        ("bert", targets.BARE, 8): [100.0, 30.0, 100.0],
        ("bert", "LitServe", 8): [80.0, 30.0, 100.0],
        ("bert", "BentoML", 8): [80.0, 30.0, 100.0],
        ("tiny", targets.OURS, 1): [900.0] * 3,
        ("tiny", targets.ECHO, 1): [2000.0] * 3,
        ("tiny", targets.BARE, 1): [2000.0] * 3,
        ("tiny", "LitServe", 1): [700.0] * 3,
    }
    verdicts = {v.name: v for v in targets.judge(rounds, {}, big=["bert"], padded={("bert", "LitServe", 8)})}
    share = verdicts["bert, 8 callers: share of the best fixed batch, bare"]
    assert (share.value, share.is_hit) == (1.0, True)
    assert not verdicts["bert, 8 callers: times LitServe"].is_hit  # 1.19 of a peer that pads, where 1.3 is asked for
    assert verdicts["bert, 8 callers: times BentoML"].is_hit
    assert verdicts["tiny, 1 callers: share of echo and best batch one after the other"].value == pytest.approx(0.9)
    assert not verdicts["tiny, 1 callers: times LitServe"].is_hit
