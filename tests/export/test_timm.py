"""Folders of timm: what they state of themselves and of images, and the models where timm is installed."""

import importlib
import json
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.huggingface.timm_images import TimmImageProcessor
from headway_server.bundles import open_bundle
from headway_server.preprocessing.image import ImageLimits, ImagePreprocessor
from headway_training.folders import read_configuration

STATED = {
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "crop_pct": 0.875,
    "crop_mode": "center",
}


def processor(**values):
    return TimmImageProcessor(SimpleNamespace(data_config=STATED | values))


@pytest.mark.parametrize(("classes", "head"), [(10, "ForImageClassification"), (0, "Model")])
def test_a_folder_of_timm_is_known_by_what_it_states(tmp_path, classes, head):
    stated = {"architecture": "resnet18", "num_classes": classes, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    content = read_configuration(tmp_path)
    assert content["model_type"] == "timm_wrapper"
    assert content["architectures"] == [f"TimmWrapper{head}"]


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_without_timm_its_folder_is_refused_in_a_sentence(tmp_path):
    stated = {"architecture": "resnet18", "num_classes": 10, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    result = CliRunner().invoke(app, ["hf", str(tmp_path), "--store", str(tmp_path / "store")])
    assert result.exit_code == 2
    assert "is a model of timm, which is not installed; install 'headway-export[timm]'" in result.output
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, ("shorter_side", 256)),
        ({"crop_pct": 1.0}, ("shorter_side", 224)),
        ({"crop_mode": "squash"}, ("stretch", 256)),
        ({"crop_mode": "squash", "crop_pct": 1.0, "input_size": (3, 224, 160)}, ("stretch", None)),
    ],
)
def test_what_timm_states_of_images_has_words_in_a_manifest(values, found):
    preprocessing = processor(**values).preprocessing()
    assert (preprocessing.resize, preprocessing.resize_size) == found
    assert (preprocessing.height, preprocessing.width) == (values.get("input_size") or STATED["input_size"])[1:]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"crop_mode": "border"}, "cropped to 224 x 224 by border"),
        ({"input_size": (3, 224, 160)}, "cropped to 224 x 160 by center"),
        ({"input_size": (1, 224, 224)}, "have 1 channels"),
        ({"interpolation": "random"}, "interpolation"),
    ],
)
def test_what_has_no_words_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        processor(**values).preprocessing()


@pytest.mark.parametrize("width", range(41, 49))
def test_a_centre_crop_begins_at_the_even_number_of_two_that_are_as_near(width):
    settings = processor(input_size=(3, 40, 40), crop_pct=1.0, mean=(0.0,) * 3, std=(1.0,) * 3).preprocessing()
    columns = np.broadcast_to(np.arange(width, dtype=np.uint8)[None, :, None], (40, width, 3))
    preprocessor = ImagePreprocessor(settings, ImageLimits(max_bytes=2**20, max_pixels=2**20))
    resized, transform = preprocessor.resize(Image.fromarray(columns), "image")
    start = int(torch.tensor((width - 40) / 2).round())
    assert np.asarray(resized)[0, 0, 0] == start
    assert transform.offset == (-start, 0)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_logits_are_those_of_timm(tmp_path, name):
    timm = pytest.importorskip("timm", reason="timm needs a torchvision that fits torch, which is not installed")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7).eval()
    timm.models.save_for_hf(model, tmp_path / name, safe_serialization=True)
    result = CliRunner().invoke(app, ["hf", str(tmp_path / name), "--store", str(tmp_path / "store"), "--name", "own"])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "store" / "own" / "1"
    edge = open_bundle(folder).manifest.image_preprocessing.height
    pixels = np.random.default_rng(0).standard_normal((2, 3, edge, edge)).astype(np.float32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(pixels)).numpy()
    session = onnxruntime.InferenceSession(folder / "fp32" / "model.onnx")
    np.testing.assert_allclose(session.run(["logits"], {"pixel_values": pixels})[0], expected, rtol=0, atol=1e-4)
