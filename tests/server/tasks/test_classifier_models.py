"""Classifiers on real sessions: the same answer alone and in a batch, and bundles that do not fit."""

import asyncio
import threading
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import tiny_bundles
from loading import loading
from PIL import Image
from tokenizers import Tokenizer
from waiting import until

from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Bundle, describe_files, open_bundle, write_manifest
from headway_server.errors import BundleError, InvalidInputError, OverloadedError, RuntimeUnavailableError
from headway_server.runtime import Runtime
from headway_server.tasks.images.classifier import ImageClassifier
from headway_server.tasks.outputs import LabelReader
from headway_server.tasks.text.classifier import TextClassifier
from headway_server.tasks.text.model import TextInputs


@pytest.fixture
async def topics(classifier_store, runtime):
    model = TextClassifier.load(open_bundle(classifier_store / "topics" / "1"), runtime, loading())
    model.start()
    yield model
    model.close()


@pytest.fixture
async def colours(classifier_store, runtime):
    bundle = open_bundle(classifier_store / "colours" / "1")
    model = ImageClassifier.load(
        bundle, runtime, loading(batching=BatchingSettings(max_batch_images=3), max_image_mib=1, max_image_megapixels=1)
    )
    model.start()
    yield model
    model.close()


async def classify(model: TextClassifier, texts: list[str]):
    return await model.classify(TextInputs(texts=texts), top_k=3, deadline=None)


@pytest.mark.parametrize("side", ["right", "left"])
async def test_a_text_that_is_too_long_is_cut_on_the_side_that_the_bundle_names(classifier_store, runtime, side):
    bundle = open_bundle(classifier_store / "topics" / "1")
    own = replace(bundle, manifest=bundle.manifest.model_copy(update={"truncation_side": side}))
    first, last = (members[0] for members in list(tiny_bundles.TOPICS.values())[:2])
    long = " ".join([first] * 200 + [last] * 200)
    most = bundle.manifest.limits.max_input_tokens
    num_words = most - Tokenizer.from_file(str(bundle.file("tokenizer.json"))).num_special_tokens_to_add(False)
    kept = " ".join([first if side == "right" else last] * num_words)
    model = TextClassifier.load(own, runtime, loading())
    model.start()
    cut = await model.classify(TextInputs(texts=[long], truncate=True), top_k=3, deadline=None)
    whole = await classify(model, [kept])
    model.close()
    assert cut.results[0].truncated
    assert cut.results[0].labels == whole.results[0].labels


def random_texts(count: int) -> list[str]:
    generator = np.random.default_rng(3)
    words = [word for members in tiny_bundles.TOPICS.values() for word in members]
    return [" ".join(generator.choice(words, generator.integers(1, 31))) for _ in range(count)]


def reference(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """The topic model by its definition, in double precision."""
    ids = tokenizer.encode(text).ids
    vectors = np.zeros((20, 3))
    for topic in range(3):
        for strength in range(3):
            vectors[3 + 3 * topic + strength, topic] = 2 + strength
    logits = vectors[ids].mean(0) @ (np.eye(3) + 0.1)
    return np.exp(logits) / np.exp(logits).sum()


async def test_an_answer_is_the_same_alone_in_a_batch_and_by_definition(topics, classifier_store):
    texts = random_texts(100)
    tokenizer = Tokenizer.from_file(str(classifier_store / "topics" / "1" / "tokenizer.json"))
    together = await classify(topics, texts)
    for text, batched in zip(texts, together.results, strict=True):
        [alone] = (await classify(topics, [text])).results
        expected = reference(text, tokenizer)
        for scored in alone.labels:
            in_batch = next(other.probability for other in batched.labels if other.label == scored.label)
            assert scored.probability == pytest.approx(in_batch, abs=1e-6)
            assert scored.probability == pytest.approx(expected[topics.labels.index(scored.label)], abs=1e-5)


async def test_labels_of_large_classifiers_are_made_off_the_event_loop(tmp_path, runtime, monkeypatch):
    model = TextClassifier.load(tiny_bundles.write_topic_bundle(tmp_path, num_labels=1000), runtime, loading())
    threads: set[str] = set()
    read = LabelReader.read
    monkeypatch.setattr(
        LabelReader, "read", lambda *inputs: (threads.add(threading.current_thread().name), read(*inputs))[1]
    )
    model.start()
    try:
        answer = await model.classify(TextInputs(texts=["goal"] * 20), top_k=1000, deadline=None)
    finally:
        model.close()
    assert {len(result.labels) for result in answer.results} == {1000}
    assert all(name.startswith("batcher-topics") for name in threads), threads


async def test_an_image_is_the_same_alone_and_in_a_batch(colours):
    generator = np.random.default_rng(4)
    images = []
    for _ in range(10):
        buffer = BytesIO()
        width, height = generator.integers(8, 60, 2)
        Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8)).save(buffer, "PNG")
        images.append(buffer.getvalue())
    together = await colours.classify(images, top_k=3, deadline=None)
    for data, batched in zip(images, together.results, strict=True):
        alone = await colours.classify([data], top_k=3, deadline=None)
        assert alone.results[0].labels == batched.labels
    assert len({result.labels for result in together.results}) == 10, "the images must not all be answered alike"


def png(width: int, height: int, seed: int = 4) -> bytes:
    buffer = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


async def test_a_damaged_image_fails_its_call_and_no_other(colours):
    whole = png(40, 30)
    calls = [colours.classify([data], top_k=1, deadline=None) for data in (whole, whole[:60], whole)]
    first, damaged, last = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(damaged, InvalidInputError)
    assert "images[0]: is a damaged or truncated PNG image" in str(damaged)
    assert first.results == last.results
    assert colours._admission._num_admitted == 0


@pytest.mark.parametrize(("side", "expected"), [(32, 16), (96, 10), (224, 2), (512, 2)])
def test_batches_on_the_cpu_hold_as_many_images_as_their_pixels_allow(side, expected):
    assert BatchingSettings().batch_images("cpu", side * side) == expected
    assert BatchingSettings().batch_images("cuda", side * side) == 32
    assert BatchingSettings(max_batch_images=5).batch_images("cpu", side * side) == 5


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_the_padding_of_a_batch_is_bounded_with_one_lane_as_with_several(classifier_store, num_lanes):
    runtime = Runtime(device="cpu", num_threads=2, num_lanes=num_lanes)
    model = TextClassifier.load(open_bundle(classifier_store / "topics" / "1"), runtime, loading())
    assert model._batcher._queue._max_padding != BatchingSettings().batch_tokens("cpu"), "that would be no bound"


async def test_a_refused_text_gives_its_permit_back(topics):
    with pytest.raises(InvalidInputError, match=r"texts\[1\]: has 51 tokens"):
        await classify(topics, ["goal", "goal " * 50])
    assert topics._admission._num_admitted == 0


async def test_a_full_queue_refuses_before_any_work(topics):
    with topics._admission.admit(4000), pytest.raises(OverloadedError, match="topics has 4000 texts waiting"):
        await classify(topics, ["goal"] * 200)


async def test_waiting_bytes_are_bounded_beside_the_count(classifier_store, runtime, colours):
    bundle = open_bundle(classifier_store / "topics" / "1")
    model = TextClassifier.load(bundle, runtime, loading(batching=BatchingSettings(max_waiting_mib=1)))
    with model._admission.admit(1, 2**20 - 7), pytest.raises(OverloadedError, match="this call brings 392;"):
        await classify(model, ["gööl", "up"])
    with colours._admission.admit(1, 2**28), pytest.raises(OverloadedError, match="limit is 268435456 and this call"):
        await colours.classify([b"x"], top_k=1, deadline=None)


async def test_a_cancelled_call_leaves_nothing_behind(topics):
    with topics._batcher._lanes:  # the model is busy
        calls = [asyncio.create_task(classify(topics, ["goal"] * 200)) for _ in range(5)]
        await until(lambda: len(topics._batcher._queue) > 0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert len(topics._batcher._queue) == 0
        assert topics._admission._num_admitted == 0
    assert (await classify(topics, ["goal"])).results[0].labels[0].label == "sports"


def rewritten(bundle: Bundle, **fields: object) -> Bundle:
    """Gives a bundle another manifest, with hashes that fit."""
    manifest = bundle.manifest.model_copy(update={"files": describe_files(bundle.path), **fields})
    write_manifest(bundle.path, manifest)
    return open_bundle(bundle.path)


def test_labels_that_do_not_fit_the_graph_are_a_bad_bundle(tmp_path: Path, runtime: Runtime):
    bundle = rewritten(tiny_bundles.write_topic_bundle(tmp_path), labels=("one", "two"))
    with pytest.raises(BundleError, match=r"logits is \(3,\) of one input, by the manifest it is \(2,\)"):
        TextClassifier.load(bundle, runtime, loading())


def test_a_graph_that_is_not_onnx_is_a_bad_bundle(tmp_path: Path, runtime: Runtime):
    bundle = tiny_bundles.write_topic_bundle(tmp_path)
    bundle.file("model.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match=r"model\.onnx: ONNX Runtime .* cannot load it"):
        TextClassifier.load(rewritten(bundle), runtime, loading())


def test_a_precision_that_the_bundle_does_not_have_is_named(classifier_store: Path, runtime: Runtime):
    bundle = open_bundle(classifier_store / "topics" / "1")
    with pytest.raises(RuntimeUnavailableError, match="topics/1: has no int8 variant"):
        TextClassifier.load(bundle, runtime, loading(precision="int8"))
