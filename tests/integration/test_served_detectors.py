"""Folders of detectors, exported by one command and served, against `transformers` itself."""

import io

import numpy as np
import pytest
import tiny_detectors
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client
from headway_export.cli import app

from .conftest import serve

SERVED = ("detr", "yolos")
SIZES = ((64, 48), (48, 64), (33, 90), (200, 77), (64, 48))


@pytest.fixture(scope="module")
def images():
    """Pictures of several sizes, two of them of one."""
    generator = np.random.default_rng(3)
    return [Image.fromarray(generator.integers(0, 256, (9, 9, 3)).astype(np.uint8)).resize(size) for size in SIZES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("detectors")
    return {family: tiny_detectors.write_detector(root / family, family) for family in SERVED}


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


def expected_objects(folder, image, threshold):
    """Scores, labels and boxes of one picture by `post_process_object_detection`, in the order of the scores."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModelForObjectDetection.from_pretrained(folder).eval()
    with torch.inference_mode():
        output = model(**processor(image, return_tensors="pt"))
    [found] = processor.post_process_object_detection(output, threshold, target_sizes=[image.size[::-1]])
    order = found["scores"].argsort(descending=True, stable=True)
    return tuple(found[name][order].numpy() for name in ("scores", "labels", "boxes"))


@pytest.mark.parametrize("family", SERVED)
def test_objects_are_those_of_transformers(folders, client, images, family):
    all_scores = np.concatenate([expected_objects(folders[family], image, 0.0)[0] for image in images])
    threshold = tiny_detectors.threshold_within(all_scores)
    results = client.detect_objects([encode(image) for image in images], model=family, threshold=threshold).results
    counts = []
    for image, result in zip(images, results, strict=True):
        scores, labels, boxes = expected_objects(folders[family], image, threshold)
        assert (result.width, result.height) == image.size
        np.testing.assert_allclose([one.score for one in result.objects], scores, atol=1e-4)
        assert [one.label_index for one in result.objects] == labels.tolist()
        assert [one.label for one in result.objects] == [f"LABEL_{label}" for label in labels]
        found = [(one.box.left, one.box.top, one.box.right, one.box.bottom) for one in result.objects]
        np.testing.assert_allclose(np.reshape(found, (-1, 4)), boxes, atol=1e-3 * max(image.size))
        counts.append(len(scores))
    assert 0 < sum(counts) < len(all_scores)


def test_images_together_are_answered_as_each_alone(client, images):
    files = [encode(image) for image in images]
    together = client.detect_objects(files, model="detr", threshold=0).results
    for file, result in zip(files, together, strict=True):
        [alone] = client.detect_objects([file], model="detr", threshold=0)
        assert [one.label for one in alone.objects] == [one.label for one in result.objects]
        for first, second in zip(alone.objects, result.objects, strict=True):
            np.testing.assert_allclose(first.score, second.score, atol=1e-6)


def test_the_best_objects_of_some_labels_are_asked_for(client, images):
    [every] = client.detect_objects(encode(images[0]), model="detr", threshold=0)
    labels = {every.objects[1].label, every.objects[-1].label}
    [found] = client.detect_objects(encode(images[0]), model="detr", threshold=0, labels=sorted(labels))
    assert found.objects == tuple(one for one in every.objects if one.label in labels)
    [best] = client.detect_objects(
        encode(images[0]), model="detr", threshold=0, labels=sorted(labels), max_object_count=1
    )
    assert best.objects == found.objects[:1]
    id_ = client.prepare_image(encode(images[0]), model="detr")[0].image_id
    [prepared] = client.detect_objects(image_ids=[id_], model="detr", threshold=0)
    assert prepared.objects == every.objects
