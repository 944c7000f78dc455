"""Folders of vision models, exported by one command and served, against `transformers` itself."""

import io

import numpy as np
import pytest
import tiny_vision
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client
from headway_export.cli import app

from .conftest import serve

EMBEDDERS = ("dinov2", "vit", "resnet")
SIZES = ((64, 48), (33, 90), (120, 77))


@pytest.fixture(scope="module")
def images():
    """Pictures of several sizes."""
    generator = np.random.default_rng(3)
    return [Image.fromarray(generator.integers(0, 256, (9, 9, 3)).astype(np.uint8)).resize(size) for size in SIZES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    found = {family: tiny_vision.write_vision_model(root / family, family) for family in tiny_vision.FAMILIES}
    for family in EMBEDDERS:
        name = f"{family}-vectors"
        found[name] = tiny_vision.write_vision_model(root / name, family, is_classifier=False)
    return found


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for name, folder in folders.items():
        shown = ["--attention"] if name == "dinov2-vectors" else []
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store), *shown])
        assert result.exit_code == 0, f"{name}: {result.output}"
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def run(folder, auto, image):
    """What transformers answers of one picture."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = auto.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(**processor(image, return_tensors="pt"))


def run_attention(folder, image):
    """Attention weights of every layer of transformers, (L, H, T, T)."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        found = model(**processor(image, return_tensors="pt"), output_attentions=True).attentions
    return torch.stack(found)[:, 0].numpy()


def encode(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", tiny_vision.FAMILIES)
def test_probabilities_are_those_of_transformers(folders, client, images, family):
    results = client.classify_image([encode(image) for image in images], model=family).results
    for image, result in zip(images, results, strict=True):
        expected = run(folders[family], transformers.AutoModelForImageClassification, image).logits[0].softmax(-1)
        found = {label.label: label.probability for label in result.labels}
        np.testing.assert_allclose([found[f"LABEL_{number}"] for number in range(5)], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("family", EMBEDDERS)
def test_vectors_are_those_of_transformers(folders, client, images, family):
    name = f"{family}-vectors"
    found = client.embed_image([encode(image) for image in images], model=name, normalize=False).to_numpy()
    assert client.get_model(name).model.task == "image_embedding"
    for image, vector in zip(images, found, strict=True):
        output = run(folders[name], transformers.AutoModel, image)
        expected = output.last_hidden_state[0, 0] if family == "vit" else output.pooler_output[0].flatten()
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4 * float(expected.abs().max()))


def test_a_classifier_gives_what_its_last_layer_reads(folders, client, images):
    vector = client.embed_image(encode(images[0]), model="dinov2", normalize=False)[0].values
    model = transformers.AutoModelForImageClassification.from_pretrained(folders["dinov2"]).eval()
    with torch.inference_mode():
        logits = model.classifier(torch.tensor(vector))
    expected = run(folders["dinov2"], transformers.AutoModelForImageClassification, images[0]).logits[0]
    np.testing.assert_allclose(logits.numpy(), expected.numpy(), atol=1e-4)


def test_attention_is_that_of_transformers(folders, client, images):
    for image in images:
        expected = run_attention(folders["dinov2-vectors"], image)
        [found] = client.inspect_image(encode(image), model="dinov2-vectors")
        assert len(found.patches) == expected.shape[-1] == 1 + found.patch_row_count * found.patch_column_count
        np.testing.assert_allclose(found.attention.to_numpy(), expected.reshape(-1, *expected.shape[2:]), atol=1e-5)
