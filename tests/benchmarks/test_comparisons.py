"""Programs that compare one kind of model with others' run on tiny models: `make test-benchmarks`."""

import json
from pathlib import Path

import pytest
import tiny_segmenter
from benchmarks import sam
from quick_run import run_benchmark

pytestmark = pytest.mark.comparison


def test_the_time_of_the_cores_is_told_by_thread_and_by_operator(tmp_path: Path) -> None:
    output = tmp_path / "shares.json"
    ended = run_benchmark(
        "time-shares", "--quick", "--models", "ag-news", "--py-spy", "absent", "--output", str(output)
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert sum(row["shares"].values()) == pytest.approx(1.0, abs=0.01)
    assert sum(row["kinds"].values()) == pytest.approx(1.0, abs=0.05)
    assert row["kinds"]["products"] > 0


def test_prompts_are_measured_served_and_beside_sam_of_the_same_sizes(tmp_path: Path) -> None:
    tiny_segmenter.write_segmenter_bundle(tmp_path)
    ended = run_benchmark("--quick", "--store", str(tmp_path), module="benchmarks.segmentation")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    served = {(row["side"], row["callers"]) for row in last["callers"]}
    assert served == {(side, count) for side in ("shared runs", "one prompt a run") for count in (1, 8)}
    assert {(row["side"], row["images"]) for row in last["sam_decoders"]} == {
        (side, count) for side in sam.SIDES for count in (1, 8)
    }
    assert all(row["prompts_per_s"] > 0 for row in (*last["callers"], *last["sam_decoders"]))
    assert [row["encoder"] for row in last["sam_encoders"]] == [sam.THEIRS, sam.OURS, sam.OURS_INT8]
    assert [row["clicks"] for row in last["clicks"]] == [4] * 4


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
    # Of the graphs that diffusers' pipeline reads, which a tiny run writes and does not time.
    assert last["velocity_error"] < 1e-4
