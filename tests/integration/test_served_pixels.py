"""Folders of models of pixels, exported by one command and served, against `transformers` itself."""

import io

import numpy as np
import pytest
import tiny_pixel_models
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client, InvalidArgumentError
from headway_export.cli import app

from .conftest import serve

SIZES = ((64, 48), (90, 133), (150, 77))


@pytest.fixture(scope="module")
def images():
    """Pictures of several sizes."""
    generator = np.random.default_rng(3)
    return [Image.fromarray(generator.integers(0, 256, (9, 9, 3)).astype(np.uint8)).resize(size) for size in SIZES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pixels")
    return {
        family: tiny_pixel_models.write_pixel_model(root / family, family, is_depth=family in tiny_pixel_models.DEPTH)
        for family in tiny_pixel_models.SERVED
    }


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for name, folder in folders.items():
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store)])
        assert result.exit_code == 0, f"{name}: {result.output}"
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
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
