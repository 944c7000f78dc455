"""Folders of detectors, exported by one command and served, against `transformers` itself."""

import base64
import io
import json

import httpx2
import numpy as np
import pytest
import tiny_detectors
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client, InvalidArgumentError
from headway_client.cli import app as command
from headway_export.cli import app

from .conftest import serve_saying

SERVED = ("detr", "yolos")
ZERO_SHOT = tiny_detectors.ZERO_SHOT
GROUNDING = "grounding-dino"
SIZES = ((64, 48), (48, 64), (33, 90), (200, 77), (64, 48))


@pytest.fixture(scope="module")
def images():
    """Pictures of several sizes, two of them of one."""
    generator = np.random.default_rng(3)
    return [Image.fromarray(generator.integers(0, 256, (9, 9, 3)).astype(np.uint8)).resize(size) for size in SIZES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("detectors")
    fixed = {family: tiny_detectors.write_detector(root / family, family) for family in SERVED}
    grounding = {GROUNDING: tiny_detectors.write_grounding_detector(root / GROUNDING, GROUNDING)}
    return fixed | {name: tiny_detectors.write_zero_shot_detector(root / name, name) for name in ZERO_SHOT} | grounding


@pytest.fixture(scope="module")
def addresses(folders, tmp_path_factory):
    """The addresses of gRPC and of HTTP."""
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


def expected_of_labels(folder, image, labels, threshold):
    """Scores, labels and boxes of one picture by the library with the caller's labels, in the order of the scores."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForZeroShotObjectDetection.from_pretrained(folder).eval()
    texts = tokenizer(list(labels), padding=True, return_tensors="pt")
    with torch.inference_mode():
        output = model(**processor(image, return_tensors="pt"), **texts)
    [found] = processor.post_process_object_detection(output, threshold, target_sizes=[image.size[::-1]])
    order = found["scores"].argsort(descending=True, stable=True)
    return tuple(found[name][order].numpy() for name in ("scores", "labels", "boxes"))


@pytest.mark.parametrize("family", ZERO_SHOT)
def test_objects_of_the_callers_labels_are_those_of_transformers(folders, client, images, family):
    labels = tiny_detectors.LABELS
    all_scores = np.concatenate([expected_of_labels(folders[family], image, labels, 0.0)[0] for image in images])
    threshold, seen = tiny_detectors.threshold_within(all_scores), set()
    for _ in range(2):  # the second time images and labels are cached
        results = client.detect_objects(
            [encode(image) for image in images], model=family, threshold=threshold, labels=labels
        ).results
        for image, result in zip(images, results, strict=True):
            scores, numbers, boxes = expected_of_labels(folders[family], image, labels, threshold)
            np.testing.assert_allclose([one.score for one in result.objects], scores, atol=1e-4)
            assert [one.label for one in result.objects] == [labels[number] for number in numbers]
            found = [(one.box.left, one.box.top, one.box.right, one.box.bottom) for one in result.objects]
            np.testing.assert_allclose(np.reshape(found, (-1, 4)), boxes, atol=1)
            seen |= set(numbers.tolist())
    assert len(seen) > 1
    [alone] = client.detect_objects(encode(images[0]), model=family, threshold=0, labels=labels[:1])
    scores, _, _ = expected_of_labels(folders[family], images[0], labels[:1], 0.0)
    np.testing.assert_allclose([one.score for one in alone.objects], scores, atol=1e-4)
    [suppressed] = client.detect_objects(
        encode(images[0]), model=family, threshold=0, labels=labels[:1], nms_threshold=0
    )
    kept = [one.box for one in suppressed.objects]
    assert alone.objects[0] == suppressed.objects[0]
    assert 0 < len(kept) < len(alone.objects)
    for number, first in enumerate(kept):
        for second in kept[:number]:
            width = min(first.right, second.right) - max(first.left, second.left)
            assert min(width, min(first.bottom, second.bottom) - max(first.top, second.top)) <= 1e-3


def expected_of_text(folder, image, labels):
    """Scores, labels and boxes of one picture by the library with joined labels, in the order of the scores."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForZeroShotObjectDetection.from_pretrained(folder).eval()
    texts = tokenizer(". ".join(labels) + ".", return_tensors="pt")
    with torch.inference_mode():
        output = model(**processor(image, return_tensors="pt"), **texts)
    whole = transformers.GroundingDinoProcessor(processor, tokenizer)
    [found] = whole.post_process_grounded_object_detection(
        output, texts["input_ids"], threshold=0.0, target_sizes=[image.size[::-1]]
    )
    ids = texts["input_ids"][0].tolist()
    ends = [place for place, index in enumerate(ids) if index == tokenizer.convert_tokens_to_ids(".")]
    parts = [output.logits[0, :, start + 1 : end].amax(dim=1) for start, end in zip([0, *ends], ends, strict=False)]
    order = found["scores"].argsort(descending=True, stable=True)
    numbers = torch.stack(parts, dim=1).argmax(dim=1)
    return tuple(one[order].numpy() for one in (found["scores"], numbers, found["boxes"]))


@pytest.mark.parametrize("labels", [tiny_detectors.LABELS, tiny_detectors.LABELS[1:3], ("Seven ",)])
def test_objects_of_labels_read_with_the_image_are_those_of_transformers(folders, client, images, labels):
    expected = [
        expected_of_text(folders[GROUNDING], image, [label.strip().lower() for label in labels]) for image in images
    ]
    threshold = tiny_detectors.threshold_within(np.concatenate([scores for scores, _, _ in expected]))
    files, seen = [encode(image) for image in images], set()
    for _ in range(2):  # the second time features are cached
        results = client.detect_objects(files, model=GROUNDING, threshold=threshold, labels=labels).results
        for image, result, (scores, numbers, boxes) in zip(images, results, expected, strict=True):
            count = int((scores > threshold).sum())
            np.testing.assert_allclose([one.score for one in result.objects], scores[:count], atol=1e-4)
            assert [one.label for one in result.objects] == [labels[number] for number in numbers[:count]]
            found = [(one.box.left, one.box.top, one.box.right, one.box.bottom) for one in result.objects]
            np.testing.assert_allclose(np.reshape(found, (-1, 4)), boxes[:count], atol=1e-3 * max(image.size))
            seen |= set(numbers[:count].tolist())
    assert len(seen) > 1 or labels != tiny_detectors.LABELS


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([], "labels: is empty, and {model} has no labels of its own; give 1 to 256 texts"),
        (["four", ""], "labels[1]: is empty"),
        (["four", " \n"], "labels[1]: has no text"),
        (["four", "five", "four"], "labels[2]: repeats labels[0]"),
        (["x"] * 1_000, "labels: has 1000 elements, the limit is 256; leave some out"),
        (["x"] * 10_000, "request: brings the fields of the request to more than"),
        (["a very long label " * 20], "labels"),
        ([f"label {number}" for number in range(200)], "labels: have 41 tokens up to labels["),
        (["four. five"], "labels[0]: has '.', which separates labels; leave it out"),
        (["four?"], "labels[0]: has '?', which separates labels"),
    ],
)
@pytest.mark.parametrize("model", [*ZERO_SHOT, GROUNDING])
def test_labels_that_cannot_be_looked_for_are_refused_in_a_sentence(client, images, model, labels, says):
    if model != GROUNDING and ("separates" in says or "up to" in says or "no text" in says):
        assert client.detect_objects(encode(images[0]), model=model, labels=labels).results
        return
    with pytest.raises(InvalidArgumentError) as refused:
        client.detect_objects(encode(images[0]), model=model, labels=labels)
    assert says.format(model=model) in str(refused.value)


@pytest.mark.parametrize("model", [*ZERO_SHOT, GROUNDING])
def test_images_of_any_shape_are_answered_or_refused_in_a_sentence(client, model):
    [tiny] = client.detect_objects(encode(Image.new("RGB", (1, 1))), model=model, labels=["four"], threshold=0)
    assert (tiny.width, tiny.height) == (1, 1)
    with pytest.raises(InvalidArgumentError, match=r"images\[0\]: announces more pixels than the limit"):
        client.detect_objects(encode(Image.new("RGB", (20_000, 9_000))), model=model, labels=["four"])
    thin = encode(Image.new("RGB", (4_000, 2)))
    assert client.detect_objects(thin, model=model, labels=["four"]).results


def test_labels_of_the_caller_are_refused_by_a_model_with_its_own(client, images):
    with pytest.raises(InvalidArgumentError, match=r"labels\[0\]: is 'a red car', which is no label of detr"):
        client.detect_objects(encode(images[0]), model="detr", labels=["a red car"])


def test_every_door_takes_the_callers_labels(addresses, client, images, tmp_path):
    file, labels = encode(images[0]), list(tiny_detectors.LABELS)
    [expected] = client.detect_objects(file, model="owlvit", labels=labels, threshold=0.0, nms_threshold=0.5)
    assert len({one.label for one in expected.objects}) > 1
    expected_rows = [(one.label, one.label_index, one.score) for one in expected.objects]
    grpc, http = addresses
    body = {
        "model": "owlvit",
        "images": [base64.b64encode(file).decode()],
        "labels": labels,
        "threshold": 0,
        "nmsThreshold": 0.5,
    }
    answer = httpx2.post(f"http://{http}/headway.v1.ObjectDetectionService/DetectObjects", json=body).json()
    found = [(one["label"], one.get("labelIndex", 0), one["score"]) for one in answer["results"][0]["objects"]]
    assert found == [(label, index, pytest.approx(score, abs=1e-6)) for label, index, score in expected_rows]
    pixels = np.asarray(images[0].convert("RGB"))[np.newaxis]
    tensors = client.infer(
        "owlvit", {"pixels": pixels}, parameters={"labels": json.dumps(labels), "threshold": 0.0, "nms_threshold": 0.5}
    )
    assert [one.decode() if isinstance(one, bytes) else one for one in tensors["label"]] == [
        label for label, _, _ in expected_rows
    ]
    np.testing.assert_allclose(tensors["score"], [score for _, _, score in expected_rows], atol=1e-6)
    (tmp_path / "picture.png").write_bytes(file)
    flags = [word for label in labels for word in ("--label", label)]
    words = ["detect-objects", str(tmp_path / "picture.png"), "--model", "owlvit", "--server", grpc, "--json"]
    told = CliRunner().invoke(command, [*words, "--threshold", "0", "--nms-threshold", "0.5", *flags])
    assert told.exit_code == 0, told.output
    assert [one["label"] for one in json.loads(told.output)["objects"]] == [label for label, _, _ in expected_rows]
