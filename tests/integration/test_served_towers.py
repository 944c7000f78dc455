"""Folders of models of two towers, exported by one command and served, against `transformers` itself."""

import io
import json

import numpy as np
import pytest
import tiny_clips
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client
from headway_export.cli import app
from headway_export.huggingface import FolderOptions, sources_from_folder

from .conftest import serve

SERVED = ("clip", "siglip", "siglip-left", "siglip2")
LABELS = ["red", "a dog and a cat", "the sea", "green grass"]
SIZES = ((64, 48), (33, 90))


@pytest.fixture(scope="module")
def images():
    """Pictures of several sizes."""
    generator = np.random.default_rng(3)
    return [Image.fromarray(generator.integers(0, 256, (9, 9, 3)).astype(np.uint8)).resize(size) for size in SIZES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("towers")
    return {family: tiny_clips.write_towers(root / family, family) for family in tiny_clips.FAMILIES}


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for family in SERVED:
        more = ("--precision", "fp32", "--precision", "int8") if family == "clip" else ()
        result = CliRunner().invoke(app, ["hf", str(folders[family]), "--store", str(store), *more])
        assert result.exit_code == 0, f"{family}: {result.output}"
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def run(folder, texts, images):
    """What transformers answers, which pads as its own processor does."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    padding = "max_length" if "siglip" in folder.name else True
    inputs = tokenizer(texts, padding=padding, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        return model(**processor(images, return_tensors="pt"), **inputs)


def encode(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", SERVED)
def test_vectors_are_those_of_transformers_and_share_a_space(folders, client, images, family):
    expected = run(folders[family], LABELS, images)
    found = client.embed_image([encode(image) for image in images], model=f"{family}-image").to_numpy()
    np.testing.assert_allclose(found, expected.image_embeds.numpy(), atol=1e-5)
    found = client.embed_text(LABELS, model=f"{family}-text").to_numpy()
    np.testing.assert_allclose(found, expected.text_embeds.numpy(), atol=1e-5)
    models = [client.get_model(f"{family}-{side}").model for side in ("image", "text")]
    assert [model.task for model in models] == ["image_embedding", "text_embedding"]
    assert models[0].embedding_space == models[1].embedding_space != ""


@pytest.mark.parametrize("family", SERVED)
def test_labels_of_the_callers_have_the_probabilities_of_transformers(folders, client, images, family):
    logits = run(folders[family], [f"an {label} in it" for label in LABELS], images).logits_per_image
    expected = logits.sigmoid() if family.startswith("siglip") else logits.softmax(-1)
    results = client.classify_image(
        [encode(image) for image in images],
        model=f"{family}-image",
        candidate_labels=LABELS,
        templates=["an {} in it"],
    )
    for row, result in zip(expected.numpy(), results, strict=True):
        found = {label.label: label.probability for label in result.labels}
        np.testing.assert_allclose([found[label] for label in LABELS], row, atol=1e-5)


def test_a_text_past_the_fixed_length_is_cut_as_transformers_cuts_it(folders, client, images):
    text = "a dog and a cat by the sea in the green grass of the house on the road"
    expected = run(folders["siglip"], [text], images[:1]).text_embeds
    found = client.embed_text(text, model="siglip-text", truncate=True)
    assert found[0].truncated
    np.testing.assert_allclose(found.to_numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", [family for family in tiny_clips.FAMILIES if family not in SERVED])
def test_further_families_are_read(folders, family):
    """`sources_from_folder` holds the vectors of the towers against those of the whole model."""
    image, text = sources_from_folder(folders[family], FolderOptions(name="mine"))[0]
    assert (image.name, text.name) == ("mine-image", "mine-text")
    assert image.space == text.space is not None


def test_int8_of_the_towers_is_held_against_fp32(client):
    for side in ("image", "text"):
        agreement = json.loads(client.get_model(f"clip-{side}").manifest_json)["variants"]["int8"]["agreement"]
        assert agreement["figures"]["mean_cosine"] >= agreement["limits"]["mean_cosine"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "generation"], "has towers for image_embedding and text_embedding, and --task is generation"),
        (["--pooling", "mean"], "--pooling is not for a model of two towers"),
        (["--max-length", "20"], "--max-length 20: texts are padded to 24 tokens"),
    ],
)
def test_what_is_not_for_two_towers_is_refused(folders, tmp_path, flags, message):
    result = CliRunner().invoke(app, ["hf", str(folders["siglip-fast"]), "--store", str(tmp_path), *flags])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not any(tmp_path.iterdir())


def test_a_task_limits_what_is_exported(folders):
    (source,), _ = sources_from_folder(folders["siglip-fast"], FolderOptions(task="text_embedding"))
    assert (source.name, source.task) == ("siglip-fast-text", "text_embedding")
