"""Folders of segmenters, exported by one command and served, against `transformers` itself."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiny_segmenters
from PIL import Image
from tiny_segmenters import BOX, POINT, SEVERAL, Library
from typer.testing import CliRunner

from headway_client import Client, SegmentPrompt
from headway_export.cli import app

from .conftest import serve

SERVED = ("sam", "sam2_video")
SIZES = ((90, 60), (48, 130), (64, 64))
PROMPTS = (POINT, BOX, *SEVERAL)
MOST_PIXELS = 1e-3


@pytest.fixture(scope="module")
def images():
    generator = np.random.default_rng(3)
    return [Image.fromarray(generator.integers(0, 256, (7, 7, 3)).astype(np.uint8)).resize(size) for size in SIZES]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    root = tmp_path_factory.mktemp("segmenters")
    return {family: Library(tiny_segmenters.write_segmenter(root / family, family)) for family in SERVED}


@pytest.fixture(scope="module")
def client(libraries, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for name, library in libraries.items():
        result = CliRunner().invoke(app, ["hf", str(library.folder), "--store", str(store)])
        assert result.exit_code == 0, f"{name}: {result.output}"
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def encode(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def asked(image, prompt):
    scaled = prompt.scaled(*image.size)
    of = {
        label: [point for point, own in zip(scaled.points, scaled.labels, strict=True) if own == label]
        for label in (0, 1)
    }
    return SegmentPrompt(points=of[1], outside_points=of[0], box=scaled.box)


def check(library, image, prompt, masks, earlier=None):
    """Compares answers to a prompt with the library's, and returns the logits of the first."""
    several = prompt == POINT
    pixels, ious, logits = library.answer(image, prompt, several=several, earlier=earlier)
    order = np.argsort(-ious, kind="stable")
    assert len(masks) == (1 if prompt in SEVERAL else 3)
    for mask, rank in zip(masks, order, strict=False):
        assert mask.predicted_iou == pytest.approx(ious[rank], abs=1e-4)
        assert (mask.to_numpy() != pixels[rank]).mean() <= MOST_PIXELS
    return logits[order[0]]


@pytest.mark.parametrize("family", SERVED)
def test_masks_of_prompts_of_many_images_at_once_are_those_of_transformers(libraries, client, images, family):
    def ask(image):
        prompts = [asked(image, prompt) for prompt in PROMPTS]
        return client.segment_image(encode(image), model=family, prompts=prompts).results

    with ThreadPoolExecutor(len(images)) as pool:
        answers = list(pool.map(ask, images))
    for image, results in zip(images, answers, strict=True):
        for prompt, result in zip(PROMPTS, results, strict=True):
            check(libraries[family], image, prompt, result.masks)


@pytest.mark.parametrize("family", SERVED)
def test_a_session_gives_the_last_mask_to_the_model(libraries, client, images, family):
    image, library = images[0], libraries[family]
    with client.segment_interactively(encode(image), model=family) as session:
        earlier = check(library, image, POINT, session.add(points=asked(image, POINT).points))
        more = asked(image, SEVERAL[0])
        check(library, image, SEVERAL[0], session.add(outside_points=more.outside_points), earlier)


@pytest.mark.parametrize("family", SERVED)
def test_everything_is_found_in_the_image_alone(client, images, family):
    image = images[1]
    segments = list(
        client.segment_everything(
            encode(image), model=family, points_per_side=3, min_predicted_iou=0.0, min_stability=0.0
        )
    )
    assert segments
    for mask in segments:
        assert mask.area == mask.to_numpy().sum() > 0
        assert mask.to_numpy().shape == image.size[::-1]
