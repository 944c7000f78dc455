"""Texts, images and recordings of one's own judge int8 in place of drawn ones: --texts, --images, --audio."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_huggingface
import tiny_speech
import tiny_vision
from PIL import Image
from safetensors.torch import save_model
from typer.testing import CliRunner

from headway_export import synthetic
from headway_export.cli import app
from headway_export.errors import SourceError
from headway_export.given import GivenInputs
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.source import from_factory
from headway_server.bundles import ImagePreprocessing, Precision, open_bundle
from headway_server.preprocessing.image import ImageLimits, ImagePreprocessor

BOTH = ("--precision", "fp32", "--precision", "int8")


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A folder `photos` of images of several sizes, a folder `calls` of recordings of 8 kHz, and `lines.txt`."""
    folder, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    (folder / "photos" / "more").mkdir(parents=True)
    for number, image in enumerate(synthetic.draw_images(80, 40, 50, rng)):
        name = f"photos/{'more/' * (number % 2)}{number}.{'png' if number % 3 else 'jpg'}"
        Image.fromarray(image[: 30 + number % 10]).save(folder / name)
    (folder / "photos" / "notes.txt").write_text("not an image")
    (folder / "calls").mkdir()
    for number, sound in enumerate(synthetic.draw_speech(12, 8_000, 3 * 8_000, rng)):
        (folder / "calls" / f"{number}.wav").write_bytes(tiny_speech.wav(sound, 8_000))
    (folder / "lines.txt").write_text(
        "\n".join(f"{first} {second} rain" for first in "abcdefghi" for second in "klmnopqr")
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A model folder for each flag."""
    folder = tmp_path_factory.mktemp("models")
    tiny_huggingface.write_model(folder / "bert", "bert", "ForSequenceClassification")
    tiny_huggingface.write_tokenizer(folder / "bert")
    return {
        "texts": folder / "bert",
        "images": tiny_vision.write_vision_model(folder / "vit", "vit"),
        "audio": tiny_speech.write_whisper(folder / "whisper"),
    }


def path_of(own: Path, flag: str) -> Path:
    return own / {"texts": "lines.txt", "images": "photos", "audio": "calls"}[flag]


@pytest.mark.parametrize("flag", ["texts", "images", "audio"])
def test_a_model_folder_is_judged_by_what_is_given(folders, own, tmp_path, flag):
    path = path_of(own, flag)
    result = CliRunner().invoke(app, ["hf", str(folders[flag]), "--store", str(tmp_path), f"--{flag}", str(path)])
    assert result.exit_code == 0, result.output
    bundle = open_bundle(tmp_path / folders[flag].name / "1")
    agreed = bundle.manifest.variants[Precision.INT8].agreement  # made without being asked for, since it can be judged
    assert agreed.dataset == path.name
    # Of 72 texts, 80 images and 24 windows every fourth is for scales; of a window two texts are written.
    assert agreed.example_count == {"texts": 54, "images": 60, "audio": 36}[flag]


def test_without_data_the_note_says_which_flag_gives_some(folders, tmp_path):
    result = CliRunner().invoke(app, ["hf", str(folders["images"]), "--store", str(tmp_path)])
    assert "inputs that --images FOLDER gives" in " ".join(result.output.split())


def test_a_module_of_ones_own_is_judged_by_what_is_given(own, tmp_path):
    save_model(importlib.import_module("foreign.image_classifier").build(), str(tmp_path / "weights.safetensors"))
    preprocessing = {"height": 16, "width": 16, "mean": [0.5] * 3, "std": [0.5] * 3}
    preprocessing |= {"resize": "shorter_side", "resize_size": 20, "interpolation": "bicubic"}
    (tmp_path / "preprocessing.json").write_text(json.dumps(preprocessing))
    arguments = ["--model", "foreign.image_classifier:build", "--weights", str(tmp_path / "weights.safetensors")]
    arguments += ["--task", "image_classification", "--labels", "a,b,c,d", "--name", "mine", "--store", str(tmp_path)]
    arguments += ["--preprocessing", str(tmp_path / "preprocessing.json"), "--images", str(own / "photos"), *BOTH]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    agreed = open_bundle(tmp_path / "mine" / "1").manifest.variants[Precision.INT8].agreement
    assert (agreed.dataset, agreed.example_count) == ("photos", 60)
    wrong = CliRunner().invoke(app, [*arguments, "--texts", str(own / "lines.txt")])
    assert wrong.exit_code == 1
    assert "image_classification reads no texts; give --images FOLDER in its place" in " ".join(wrong.output.split())


def test_images_become_what_a_server_makes_of_them(own):
    preprocessing = ImagePreprocessing(
        height=16, width=16, resize="shorter_side", resize_size=20, interpolation="bicubic", mean=(0,) * 3, std=(1,) * 3
    )
    source = from_factory_of_images(preprocessing, own)
    [given] = GivenInputs(images=own / "photos").add_to((source,))
    limits = ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20)
    first = min(file for file in (own / "photos").rglob("*") if file.suffix in {".png", ".jpg"})
    expected = ImagePreprocessor(preprocessing, limits).prepare(first.read_bytes()).pixel_values
    np.testing.assert_allclose(given.images[0].transpose(2, 0, 1) / 255, expected, atol=1e-6)


def from_factory_of_images(preprocessing, folder):
    weights = folder / "weights.safetensors"
    save_model(importlib.import_module("foreign.image_classifier").build(), str(weights))
    parts = {"task": "image_classification", "name": "mine", "labels": list("abcd")}
    return from_factory("foreign.image_classifier:build", weights, image_preprocessing=preprocessing, **parts)


def test_recordings_are_resampled_and_cut_into_windows(folders, own):
    source, _ = from_folder(folders["audio"], FolderOptions(given=GivenInputs(audio=own / "calls")))
    window = tiny_speech.SECONDS * tiny_speech.RATE
    assert {len(one) for one in source.recordings} == {window, window // 2}  # of three seconds at half the rate
    assert len(source.recordings) == 24
    assert source.texts_name == "calls"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"audio": "calls"}, "reads no audio; give --images FOLDER in its place"),
        ({"images": "missing"}, "is no folder"),
        ({"images": "calls"}, "holds no file of JPEG, PNG, WebP, BMP or GIF"),
        ({"images": "damaged"}, r"--images .*damaged: cut.png: is not an image this server can read"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_sentence(folders, own, given, message):
    (own / "damaged").mkdir(exist_ok=True)
    (own / "damaged" / "cut.png").write_bytes(b"\x89PNG\r\n")
    options = FolderOptions(given=GivenInputs(**{flag: own / name for flag, name in given.items()}))
    with pytest.raises(SourceError, match=message):
        from_folder(folders["images"], options)


def test_a_recording_that_is_damaged_and_a_file_without_texts_are_refused(folders, own):
    (own / "noise").mkdir(exist_ok=True)
    (own / "noise" / "a.wav").write_bytes(b"RIFFxxxx")
    with pytest.raises(SourceError, match=r"--audio .*noise: a.wav: cannot be decoded"):
        from_folder(folders["audio"], FolderOptions(given=GivenInputs(audio=own / "noise")))
    (own / "empty.txt").write_text("\n \n")
    with pytest.raises(SourceError, match=r"--texts .*empty.txt: holds no text"):
        from_folder(folders["texts"], FolderOptions(given=GivenInputs(texts=own / "empty.txt")))
