"""The demo as a user runs it: a server of its own, every RPC called, wrong answers found, nothing left running."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from headway_client import Client
from headway_client.channel import Channel
from headway_server.services.registry import SERVICES

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "demo" / "samples"
sys.path.insert(0, str(ROOT / "demo"))

from calls import Calls, _show  # noqa: E402
from draw import draw_pictures  # noqa: E402 (of the demo's folder)
from examples import EXAMPLES, Example  # noqa: E402
from server_process import running_server  # noqa: E402
from write_samples import DRAWN  # noqa: E402


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "demo" / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_drawings_are_pictures_that_differ() -> None:
    drawings = draw_pictures()
    assert set(drawings) == {"airplane", "automobile", "dog", "frog", "horse", "ship", "truck"}
    assert len(set(drawings.values())) == len(drawings)
    for content in drawings.values():
        with Image.open(io.BytesIO(content)) as image:
            assert (image.format, image.size, image.mode) == ("PNG", (128, 128), "RGB")


def test_the_shipped_models_answer_examples_of_every_rpc_rightly_on_one_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = set()
    for name in ("unary", "stream", "session"):
        original = getattr(Channel, name)

        def record(channel, call, *arguments, original=original):
            called.add(call.path.rpartition("/")[2])
            return original(channel, call, *arguments)

        monkeypatch.setattr(Channel, name, record)
    with running_server(ROOT / "models") as (address, _), Client(address, timeout_s=120) as client:
        client.wait_ready()
        failed = Calls(client).call_every_rpc()
    assert failed == []
    rpcs = {method.name for service in SERVICES for method in service.descriptor.methods}
    assert {name for example in EXAMPLES for name in example.rpcs.split(", ")} == rpcs == called - {"Check"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 42
    assert max(map(len, lines)) <= 100
    checked = sum(bool(example.expected) for example in EXAMPLES)
    assert sum(line.startswith("✓") for line in lines) == checked
    assert lines[-2].startswith("· No model here can do AnswerQuestion, ")


def test_a_wrong_answer_is_marked_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    with Client("127.0.0.1:1") as client:
        failed = _show(client, [Example("ClassifyImage", "a drawn ship", lambda *_: "a person 61%", "ship")])
    assert failed == ["ClassifyImage (a drawn ship): a person 61%"]
    assert capsys.readouterr().out.startswith("✗ ClassifyImage          a drawn ship")


def test_another_store_says_what_it_has_no_model_for_and_answers_about_the_users_files(tmp_path: Path) -> None:
    for name in ("cifar10", "telephone-transcriber"):
        shutil.copytree(ROOT / "models" / name, tmp_path / name)
    ended = run_demo(
        "--store",
        str(tmp_path),
        str(SAMPLES / "scene.png"),
        "--audio",
        str(SAMPLES / "said.wav"),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\x1b" not in ended.stdout  # no control codes where the output is no terminal
    assert "\n· TranslateText          A man rides a bicycle.    its model is not here " in ended.stdout
    assert "\n✓ ClassifyImage          a drawn ship " in ended.stdout
    labels, caption, transcript, last = ended.stdout.splitlines()[-4:]
    assert labels.startswith("· ClassifyImage          scene.png ")
    assert caption.startswith("· CaptionImage           scene.png                 its model is not here")
    assert transcript.startswith("· TranscribeSpeech       said.wav                  three seven one")
    assert "yours" in transcript
    assert "The server has stopped." in last


def test_a_file_that_the_server_refuses_is_named_and_fails_the_demo(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "models" / "cifar10", tmp_path / "store" / "cifar10")
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(b"\x89PNG\r\n\x1a\n no picture")
    ended = run_demo("--store", str(tmp_path / "store"), str(damaged))
    assert ended.returncode == 1
    assert "✗ ClassifyImage          damaged.png" in ended.stdout
    assert "ClassifyImage (damaged.png): INVALID_ARGUMENT: images[0]" in ended.stderr


def test_what_is_not_there_is_told_before_a_server_starts(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    for arguments in ([str(absent)], ["--audio", str(absent)]):
        ended = run_demo("--store", str(tmp_path), *arguments)
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"demo: {absent}: no such file\n")
    ended = run_demo("--store", str(absent))
    assert ended.returncode == 2


def test_a_store_without_bundles_ends_the_demo_with_the_servers_words(tmp_path: Path) -> None:
    ended = run_demo("--store", str(tmp_path))
    assert ended.returncode == 1
    assert "the server did not start" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_samples_are_small_and_the_documents_commands_can_take_them() -> None:
    assert sum(file.stat().st_size for file in SAMPLES.iterdir()) < 100_000
    assert {file.name for file in SAMPLES.iterdir()} == {*DRAWN, "said.wav", "train.csv", "valid.csv"}
    for name, picture in DRAWN.items():
        with Image.open(SAMPLES / name) as sample, Image.open(io.BytesIO(picture)) as drawn:
            assert sample.tobytes() == drawn.tobytes()
    rows = {}
    for part in ("train", "valid"):
        with (SAMPLES / f"{part}.csv").open(newline="") as file:
            rows[part] = [(row["text"], row["label"]) for row in csv.DictReader(file)]
        assert len(set(Counter(label for _, label in rows[part]).values())) == 1  # as many of each label
    assert len(set(rows["train"] + rows["valid"])) == 40
