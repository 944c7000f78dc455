"""The demo as a user runs it: a server of its own, every RPC called, nothing left running."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_segmenter
from PIL import Image

ROOT = Path(__file__).parents[2]
SECTIONS = [
    "ListModels",
    "GetModel",
    "GenerateText",
    "StreamGenerateText",
    "TranslateText",
    "StreamTranslateText",
    "ClassifyText",
    "ClassifyTokens",
    "EmbedText",
    "InspectText",
    "ScoreText",
    "ClassifyImage",
    "DetectObjects",
    "EmbedImage",
    "SynthesizeSpeech",
    "TranscribeSpeech",
    "GenerateImage",
    "PrepareImage",
    "SegmentImage",
    "ClassifyImage",
    "CaptionImage",
]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "demo" / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """The demo's own drawings, written by its program."""
    command = [sys.executable, str(ROOT / "demo" / "draw.py"), str(tmp_path / "pictures")]
    subprocess.run(command, check=True, timeout=60)
    return sorted((tmp_path / "pictures").iterdir())


def test_drawings_are_pictures_that_differ(pictures: list[Path]) -> None:
    assert [picture.stem for picture in pictures] == ["airplane", "automobile", "frog", "horse", "ship", "truck"]
    contents = [picture.read_bytes() for picture in pictures]
    assert len(set(contents)) == len(contents)
    for content in contents:
        with Image.open(io.BytesIO(content)) as image:
            assert (image.format, image.size, image.mode) == ("PNG", (128, 128), "RGB")


def test_every_call_is_answered_in_a_section_of_its_own(tiny_store: Path, pictures: list[Path]) -> None:
    ended = run_demo("--store", str(tiny_store), str(pictures[0]))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.findall(r"^([A-Z]\w+)  ", ended.stdout, flags=re.MULTILINE) == SECTIONS
    assert "\x1b" not in ended.stdout  # no control codes where the output is no terminal
    assert "failed" not in ended.stdout
    assert f"question  {pictures[0]}" in ended.stdout
    assert ended.stdout.count("timing") == 8
    assert "The server has stopped." in ended.stdout.splitlines()[-1]


def test_it_ends_with_a_click_its_crop_a_name_for_it_and_a_german_caption(
    captioner_store: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(captioner_store, store)
    for name in ("clip-image", "clip-text"):
        shutil.copytree(ROOT / "models" / name, store / name)
    tiny_segmenter.write_segmenter_bundle(store)
    picture = tmp_path / "halves.png"
    image = Image.new("RGB", (80, 40), (30, 200, 30))
    image.paste("white", (0, 0, 30, 40))
    image.save(picture)
    ended = run_demo("--store", str(store), str(picture))
    assert "Traceback" not in ended.stderr
    *_, prepared, cut_out, named, captioned = re.split(r"^(?=[A-Z]\w+  )", ended.stdout, flags=re.MULTILINE)
    assert f"question  {picture}" in prepared
    assert "question  the segment at 40,20" in cut_out
    assert "answer    2,000 pixels, 62% of the image, box 30,0 to 80,40" in cut_out
    assert re.search(r"answer    a \w+ \d+\.\d%, a \w+ \d+\.\d%, a \w+ \d+\.\d%\n  model     clip-image 1", named)
    assert re.search(r"answer    eine \w+ Wand\n  model     colours 1", captioned)


def test_a_picture_that_the_server_refuses_is_told_and_the_rest_answered(tiny_store: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(b"\x89PNG\r\n\x1a\n no picture")
    ended = run_demo("--store", str(tiny_store), str(damaged))
    assert ended.returncode == 1
    assert "failed    INVALID_ARGUMENT: images[0]" in ended.stdout
    assert "a drawing of: ship" in ended.stdout
    assert "failed: ClassifyImage" in ended.stderr


def test_what_is_not_there_is_told_before_a_server_starts(tmp_path: Path) -> None:
    ended = run_demo("--store", str(tmp_path), str(tmp_path / "absent.png"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"demo: {tmp_path / 'absent.png'}: no such file\n"
    ended = run_demo("--store", str(tmp_path / "absent"))
    assert ended.returncode == 2


def test_a_store_without_bundles_ends_the_demo_with_the_servers_words(tmp_path: Path) -> None:
    ended = run_demo("--store", str(tmp_path))
    assert ended.returncode == 1
    assert "the server did not start" in ended.stderr
    assert "Traceback" not in ended.stderr
