"""Folders of models of pixels, exported by one command and served, against `transformers` itself."""

import base64
import io
import json

import httpx2
import numpy as np
import pytest
import tiny_pixel_models
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client, InvalidArgumentError
from headway_client.cli import app as command
from headway_export.cli import app

from .conftest import serve_saying

SIZES = ((64, 48), (90, 133), (150, 77))


@pytest.fixture(scope="module")
def images():
    """Pictures of several sizes."""
    generator = np.random.default_rng(3)
    return [Image.fromarray(generator.integers(0, 256, (9, 9, 3)).astype(np.uint8)).resize(size) for size in SIZES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pixels")
    written = {
        family: tiny_pixel_models.write_pixel_model(root / family, family, is_depth=family in tiny_pixel_models.DEPTH)
        for family in tiny_pixel_models.SERVED
    }
    return written | {"clipseg": tiny_pixel_models.write_zero_shot_model(root / "clipseg")}


@pytest.fixture(scope="module")
def addresses(folders, tmp_path_factory):
    """Those of gRPC and of HTTP."""
    store = tmp_path_factory.mktemp("store")
    for name, folder in folders.items():
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store)])
        assert result.exit_code == 0, f"{name}: {result.output}"
    flags = ("--precision", "fp32", "--http-port", "0", "--log-level", "warning")
    for line in serve_saying(store, tmp_path_factory.mktemp("log") / "server.log", *flags):
        yield line.split()[0], line.partition("http=")[2].split()[0]


@pytest.fixture(scope="module")
def client(addresses):
    with Client(addresses[0]) as connected:
        yield connected


def encode(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def served(families):
    return [family for family in families if family in tiny_pixel_models.SERVED]


@pytest.mark.parametrize("family", served(tiny_pixel_models.SEMANTIC))
def test_labels_are_those_of_transformers(folders, client, images, family):
    results = client.classify_pixels([encode(image) for image in images], model=family).results
    for image, result in zip(images, results, strict=True):
        expected = tiny_pixel_models.expected_labels(folders[family], image)
        found = result.to_numpy()
        assert (result.width, result.height) == image.size == found.shape[::-1]
        assert (found == expected).mean() >= 0.999
        assert [one.label for one in result.labels] == [f"LABEL_{one.label_index}" for one in result.labels]
        shares = np.bincount(found.ravel(), minlength=tiny_pixel_models.NUM_LABELS) / found.size
        for one in result.labels:
            assert one.share == pytest.approx(shares[one.label_index])
            assert one.score > 0
        assert len(result.labels) == np.count_nonzero(shares)
        assert [one.share for one in result.labels] == sorted((one.share for one in result.labels), reverse=True)
    assert max(len(result.labels) for result in results) > 1


@pytest.mark.parametrize("family", served(tiny_pixel_models.DEPTH))
def test_depth_is_that_of_transformers(folders, client, images, family):
    results = client.estimate_depth([encode(image) for image in images], model=family).results
    for image, result in zip(images, results, strict=True):
        expected = tiny_pixel_models.expected_depth(folders[family], image)
        found = result.to_numpy()
        assert (result.width, result.height) == image.size == found.shape[::-1]
        largest = np.abs(expected).max()
        assert expected.max() - expected.min() > 0.01 * largest
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * largest)


def levels_of(png):
    with Image.open(io.BytesIO(png)) as opened:
        return np.asarray(opened)


def test_maps_of_the_callers_labels_are_those_of_transformers(folders, client, images):
    labels = tiny_pixel_models.LABELS
    for _ in range(2):  # the second time images and labels are cached
        results = client.classify_pixels([encode(image) for image in images], model="clipseg", labels=labels).results
        for image, result in zip(images, results, strict=True):
            logits = tiny_pixel_models.expected_maps(folders["clipseg"], image, labels)
            probabilities = logits.sigmoid().numpy()
            assert {one.label: one.label_index for one in result.labels} == {name: i for i, name in enumerate(labels)}
            assert (result.to_numpy() == logits.argmax(0).numpy()).mean() >= 0.999
            for one in result.labels:
                expected = probabilities[one.label_index]
                assert np.ptp(expected) > 0.05
                assert np.abs(levels_of(one.probability_map) / 255 - expected).max() <= 0.6 / 255
                chosen = result.to_numpy() == one.label_index
                assert one.share == pytest.approx(chosen.mean())
                assert one.score == pytest.approx(expected[chosen].mean() if chosen.any() else 0, abs=1e-4)
    assert max(sum(one.share > 0 for one in result.labels) for result in results) > 1


@pytest.mark.parametrize(
    ("model", "labels", "says"),
    [
        ("clipseg", [], "labels: is empty, and clipseg has no labels of its own; give 1 to 64 texts"),
        ("clipseg", ["four", "five", "four"], "labels[2]: repeats labels[0]"),
        ("clipseg", ["four", ""], "labels[1]: is empty"),
        ("clipseg", ["x"] * 65, "labels: has 65 elements, the limit is 64; leave some out"),
        ("clipseg", ["a very long label " * 20], "labels[0]: has "),
        ("segformer", ["sky"], "labels: is given, and segformer has 5 labels of its own"),
    ],
)
def test_labels_that_cannot_be_looked_for_are_refused_in_a_sentence(client, images, model, labels, says):
    with pytest.raises(InvalidArgumentError) as refused:
        client.classify_pixels(encode(images[0]), model=model, labels=labels)
    assert says in str(refused.value)


def test_every_door_takes_the_callers_labels(addresses, client, images, tmp_path):
    file, labels = encode(images[0]), list(tiny_pixel_models.LABELS)
    [expected] = client.classify_pixels(file, model="clipseg", labels=labels)
    grpc, http = addresses
    body = {"model": "clipseg", "images": [base64.b64encode(file).decode()], "labels": labels}
    answer = httpx2.post(f"http://{http}/headway.v1.SemanticSegmentationService/ClassifyPixels", json=body).json()
    assert [base64.b64decode(one["probabilityMap"]) for one in answer["results"][0]["labels"]] == [
        one.probability_map for one in expected.labels
    ]
    pixels = np.asarray(images[0].convert("RGB"))[np.newaxis]
    tensors = client.infer("clipseg", {"pixels": pixels}, parameters={"labels": json.dumps(labels)})
    assert list(tensors["probability_map"]) == [one.probability_map for one in expected.labels]
    (tmp_path / "picture.png").write_bytes(file)
    flags = [word for label in labels for word in ("--label", label)]
    words = ["classify-pixels", str(tmp_path / "picture.png"), "--model", "clipseg", "--server", grpc, "--json"]
    told = CliRunner().invoke(command, [*words, *flags, "--probability-maps", str(tmp_path)])
    assert told.exit_code == 0, told.output
    for one in expected.labels:
        assert (tmp_path / f"{one.label_index}.png").read_bytes() == one.probability_map
    assert [one["label"] for one in json.loads(told.output)["labels"]] == [one.label for one in expected.labels]


def test_a_prepared_image_is_answered_as_one_sent(client, images):
    file = encode(images[1])
    for call, name in ((client.classify_pixels, "segformer"), (client.estimate_depth, "depth_anything")):
        [sent] = call(file, model=name)
        [prepared] = client.prepare_image(file, model=name)
        [found] = call(image_ids=[prepared.image_id], model=name)
        assert found == sent


def test_an_image_that_a_model_cannot_read_is_refused_by_its_size(client):
    with pytest.raises(InvalidArgumentError, match=r"294 x 70 for this model.*12250 pixels.*multiples of 14"):
        client.estimate_depth(encode(Image.new("RGB", (420, 100))), model="depth_anything")
