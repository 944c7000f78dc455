"""Classifiers of videos, exported by one command and served, against `transformers`."""

import io

import numpy as np
import pytest
import tiny_bundles
import tiny_videos
import torch
import transformers
from PIL import Image
from served_sequences import export

from headway_client import Client, InvalidArgumentError

from .conftest import serve


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("videos")
    return {name: tiny_videos.write_videos(root / name, name) for name in tiny_videos.FAMILIES}


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    store = export(folders, tmp_path_factory.mktemp("store"))
    tiny_bundles.write_motion_bundle(store)
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def frames_of(count, width=56, height=44):
    random = np.random.default_rng(count)
    coarse = random.integers(0, 256, (count, height // 4, width // 4, 3)).astype(np.uint8)
    return [Image.fromarray(one).resize((width, height), Image.Resampling.BILINEAR) for one in coarse]


def grey(level):
    return encoded(Image.new("RGB", (8, 8), (level,) * 3))


def encoded(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", tiny_videos.FAMILIES)
@pytest.mark.parametrize("count", [3, 11])
def test_labels_are_those_of_transformers(folders, client, family, count):
    frames = frames_of(count)
    [result] = client.classify_video(list(map(encoded, frames)), model=family).results
    model = transformers.AutoModelForVideoClassification.from_pretrained(folders[family]).eval()
    chosen = np.linspace(0, count - 1, model.config.num_frames).astype(int)
    assert result.frame_indices == tuple(chosen)
    processor = transformers.AutoImageProcessor.from_pretrained(
        folders[family], **({} if family == "vivit" else {"backend": "pil"})
    )
    inputs = processor([frames[index] for index in chosen], return_tensors="pt")
    with torch.inference_mode():
        expected = model(**inputs).logits[0].softmax(-1)
    assert [one.label for one in result.labels] == [f"LABEL_{index}" for index in expected.argsort(descending=True)]
    assert [one.probability for one in result.labels] == pytest.approx(expected.sort(descending=True)[0], abs=1e-5)


def test_a_video_may_be_one_frame_or_256_and_top_k_limits_labels(client):
    [still] = client.classify_video(grey(90), model="motion", top_k=1).results
    assert ([one.label for one in still.labels], still.frame_indices) == (["steady"], (0, 0, 0, 0))
    [rising] = client.classify_video([grey(level) for level in range(256)], model="motion").results
    assert (rising.labels[0].label, rising.frame_indices) == ("brighter", (0, 85, 170, 255))


@pytest.mark.parametrize(
    ("frames", "options", "words"),
    [
        ([], {}, r"frames: .*1 to 256"),
        ([grey(0)] * 257, {}, r"frames: .*256"),
        ([grey(0), b"no image"], {}, r"frames\[1\]: "),
        ([grey(0), b""], {}, r"frames\[1\]: "),
        ([grey(0)], {"top_k": 4}, "top_k"),
    ],
)
def test_what_is_no_video_is_refused(client, frames, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        client.classify_video(frames, model="motion", **options)
