"""Programs that compare one kind of model with others' run on tiny models: `make test-benchmarks`."""

import json

import pytest
from quick_run import run_benchmark

pytestmark = pytest.mark.comparison


def test_speech_of_several_callers_is_written() -> None:
    arguments = ("--tiny", "--no-peer", "--callers", "1,2", "--clip-seconds", "2", "--new-tokens", "8", "--rounds", "1")
    ended = run_benchmark(*arguments, module="benchmarks.speech")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert [row["callers"] for row in rows] == [1, 2]
    assert all(row["windows_per_s"] > 0 for row in rows)


def test_texts_are_spoken_to_several_callers() -> None:
    arguments = ("--tiny", "--callers", "1,2", "--seconds", "0.5", "--rounds", "1")
    ended = run_benchmark(*arguments, module="benchmarks.speaking")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert sorted(row["callers"] for row in rows) == [1, 1, 2, 2]
    assert all(0 < row["audio_s"] <= 0.5 and row["first_audio_ms"] > 0 for row in rows)


def test_images_are_measured_by_the_same_network_on_every_side() -> None:
    arguments = ("--tiny", "--geometry", "emoji", "--steps", "2", "--callers", "2", "--rounds", "1")
    ended = run_benchmark(*arguments, module="benchmarks.diffusion")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert sorted(row["callers"] for row in last["rows"]) == [1] * 4 + [2] * 4
    assert all(row["images_per_s"] > 0 for row in last["rows"])


def test_a_server_is_measured_as_callers_models_slots_and_workers_grow(tmp_path) -> None:
    picture = tmp_path / "growth.svg"
    ended = run_benchmark("--quick", "--picture", str(picture), module="benchmarks.growth")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert {row["curve"] for row in rows} == {"callers", "workers", "models", "slots"}
    assert all(row["ready_s"] > 0 if "ready_s" in row else row["calls_per_s"] > 0 for row in rows)
    assert picture.read_text().startswith("<svg")
