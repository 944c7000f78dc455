"""Classifiers from checkpoint to server: probabilities, decisions, pairs and embeddings are PyTorch's."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import loading
from rich.console import Console

from headway_export.exporter import ExportOptions, export
from headway_export.source import ExportSource, from_checkpoint
from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Bundle, Precision, open_bundle
from headway_server.runtime import Runtime
from headway_server.tasks.text.classifier import TextClassifier
from headway_server.tasks.text.model import TextInputs
from headway_server.tasks.tokens.classifier import TokenClassifier
from headway_training.data.sources import OwnData
from headway_training.run import RunOptions, run_training
from headway_training.tokenizers import encode_pairs

ANIMALS = ("cat", "dog", "owl")
TINY = (
    "model.num_layers=1",
    "model.d_model=32",
    "model.num_heads=2",
    "model.d_ff=64",
    "model.max_length=24",
    "model.dropout=0",
    "tokenizer.vocabulary_size=300",
    "optimization.epochs=30",
    "optimization.batch_tokens=400",
    "optimization.learning_rate=0.01",
    "optimization.precision=fp32",
    "optimization.evaluations=2",
)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(device="cpu", num_threads=1)


Exported = tuple[ExportSource, Bundle]


def make(folder: Path, rows: list[tuple[str, ...]], *settings: str) -> Exported:
    """A tiny classifier of the rows, whose first one names the columns, trained and exported in fp32."""
    file = folder / "data.csv"
    file.write_text("".join(",".join(row) + "\n" for row in rows), encoding="utf-8")
    data = OwnData(train=str(file), valid=str(file))
    options = RunOptions(recipe="ag-news", settings=(*TINY, *settings), own_data=data, output=folder / "run")
    source = from_checkpoint(run_training(options, Console(quiet=True)))
    return source, export(source, ExportOptions(store=folder / "store", precisions=(Precision.FP32,)))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Texts that name several animals, or none."""
    generator = random.Random(0)
    rows: list[tuple[str, ...]] = [("text", "label")]
    for _ in range(150):
        present = [animal for animal in ANIMALS if generator.random() < 0.4]
        words = [*present, *generator.sample(["the", "saw", "and", "near", "old"], 3)]
        rows.append((" ".join(generator.sample(words, len(words))), "|".join(present)))
    return make(tmp_path_factory.mktemp("zoo"), rows, "classification.multi_label=true", "model.pooling=max")


@pytest.fixture(scope="module")
def second_animal(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Pairs whose class is the animal of the second text, for a model with types of tokens."""
    generator = random.Random(1)
    rows: list[tuple[str, ...]] = [("text", "text_pair", "label")]
    for _ in range(150):
        first, second = generator.choice(ANIMALS), generator.choice(ANIMALS)
        rows.append((f"the {first}", f"a {second}", second))
    settings = ("classification.text_pairs=optional", "model.num_token_types=2", "model.pooling=first")
    return make(tmp_path_factory.mktemp("pairs"), rows, *settings)


async def started(bundle: Bundle, runtime: Runtime, precision: Precision) -> TextClassifier:
    model = TextClassifier.load(
        bundle, runtime, loading(batching=BatchingSettings(max_batch_tokens=256), precision=precision)
    )
    model.start()
    return model


def inputs(texts: list[str], pairs: list[str] | None = None, *, truncate: bool = False) -> TextInputs:
    return TextInputs(texts=texts, text_pairs=pairs, truncate=truncate)


async def test_several_labels_are_answered_with_pytorchs_probabilities_and_the_fitted_thresholds(zoo, runtime):
    source, bundle = zoo
    scheme = bundle.manifest.classification
    assert scheme is not None
    assert (scheme.kind, len(scheme.thresholds)) == ("multi_label", 3)
    assert bundle.manifest.variants[Precision.FP32].quality.metric == "micro_f1"
    assert bundle.manifest.variants[Precision.FP32].quality.value > 90
    texts = ["the cat saw dog", "near old", "owl and cat and dog"]
    model = await started(bundle, runtime, Precision.FP32)
    answer = await model.classify(inputs(texts), top_k=3, deadline=None)
    model.close()
    for text, result in zip(texts, answer.results, strict=True):
        ids = torch.tensor([source.tokenizer.encode(text).ids])
        with torch.inference_mode():
            logits = source.module(ids, torch.ones_like(ids))[0]
        expected = (logits / scheme.temperature).sigmoid().tolist()
        found = {scored.label: scored for scored in result.labels}
        for index, label in enumerate(source.labels):
            assert found[label].probability == pytest.approx(expected[index], abs=1e-5)
            assert found[label].is_selected == (expected[index] >= scheme.thresholds[index])
        assert {label for label, scored in found.items() if scored.is_selected} == set(ANIMALS) & set(text.split())


async def test_pairs_are_read_as_in_training_whole_and_shortened(second_animal, runtime):
    source, bundle = second_animal
    assert bundle.manifest.text_pairs == "optional"
    [names] = {tuple(spec.name for spec in v.graphs["model"].inputs) for v in bundle.manifest.variants.values()}
    assert names == ("input_ids", "attention_mask", "token_type_ids")
    texts = ["the cat", "the cat", "the owl " * 20, "the dog"]
    pairs = ["a cat", "a dog", "a owl", "a dog " * 30]
    model = await started(bundle, runtime, Precision.FP32)
    answer = await model.classify(inputs(texts, pairs, truncate=True), top_k=3, deadline=None)
    alone = await model.classify(inputs(["the cat"]), top_k=3, deadline=None)
    model.close()
    ids, types = encode_pairs(source.tokenizer, texts, pairs, 24)
    temperature = bundle.manifest.classification.temperature
    for row, result in enumerate(answer.results):
        tensors = [torch.tensor([ids[row]]), torch.ones(1, len(ids[row]), dtype=torch.long), torch.tensor([types[row]])]
        with torch.inference_mode():
            expected = (source.module(*tensors)[0] / temperature).softmax(-1).tolist()
        by_label = {scored.label: scored.probability for scored in result.labels}
        assert [by_label[label] for label in source.labels] == pytest.approx(expected, abs=1e-5)
        assert result.num_tokens == len(ids[row])
    assert [result.labels[0].label for result in answer.results[:2]] == ["cat", "dog"]
    assert [result.truncated for result in answer.results] == [False, False, True, True]
    assert alone.results[0].num_tokens == len(source.tokenizer.encode("the cat").ids)


def test_the_card_tells_how_far_probabilities_can_be_trusted(zoo, second_animal):
    for (_, bundle), words in ((zoo, "A label applies from a probability"), (second_animal, "its likeliest label")):
        card = (bundle.path / "README.md").read_text(encoding="utf-8")
        assert "## Calibration" in card
        assert words in card
        figures = bundle.manifest.variants[Precision.FP32].calibration
        assert figures is not None
        assert f"{figures.expected_calibration_error:.4f}" in card
        assert figures.bin_count == 15


def pooled(module: torch.nn.Module, *tensors: torch.Tensor) -> np.ndarray:
    with torch.inference_mode():
        return module.logits_and_embedding(*tensors)[1][0].numpy()


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
async def test_texts_are_the_same_alone_and_in_any_batch(tiny_store, tiny_checkpoints, runtime, precision):
    """fp32 to 1e-5; int8 bit for bit, where a text's length is all that its padding changes."""
    source = from_checkpoint(tiny_checkpoints["text_classification"])
    bundle = open_bundle(next((tiny_store / source.name).iterdir()))
    model = await started(bundle, runtime, precision)
    generator = np.random.default_rng(0)
    texts = [text[: generator.integers(5, 1 + len(text))] for text in source.evaluation.texts[:40]]
    labels_alone, vectors_alone = [], []
    for text in texts:
        answer = await model.classify(inputs([text]), top_k=len(source.labels), deadline=None)
        labels_alone.append({scored.label: scored.probability for scored in answer.results[0].labels})
        answer = await model.embed(inputs([text]), normalize=False, deadline=None)
        vectors_alone.append(answer.results[0].values)
    for _ in range(5):
        order = generator.permutation(40)[: generator.integers(2, 41)].tolist()
        batch = [texts[index] for index in order]
        labelled = await model.classify(inputs(batch), top_k=len(source.labels), deadline=None)
        embedded = await model.embed(inputs(batch), normalize=False, deadline=None)
        for index, labels, vector in zip(order, labelled.results, embedded.results, strict=True):
            found = {scored.label: scored.probability for scored in labels.labels}
            if precision is Precision.INT8:
                assert found == labels_alone[index]
                np.testing.assert_array_equal(vector.values, vectors_alone[index])
            assert found == pytest.approx(labels_alone[index], abs=1e-5)
            assert vector.values == pytest.approx(vectors_alone[index], abs=1e-5)
    model.close()
    if precision is Precision.FP32:
        for text, vector in zip(texts, vectors_alone, strict=True):
            ids = torch.tensor([source.tokenizer.encode(text).ids])
            expected = pooled(source.module, ids, torch.ones_like(ids))
            assert vector == pytest.approx(expected, abs=float(1e-4 * np.abs(expected).max()))


def test_image_embeddings_are_pytorchs(tiny_store, tiny_checkpoints, runtime):
    source = from_checkpoint(tiny_checkpoints["image_classification"])
    bundle = open_bundle(next((tiny_store / source.name).iterdir()))
    assert bundle.manifest.embedding.pooling == source.module.pooling
    assert bundle.manifest.image_preprocessing is not None
    size = (bundle.manifest.image_preprocessing.height, bundle.manifest.image_preprocessing.width)
    pixels = np.random.default_rng(0).normal(size=(5, 3, *size)).astype(np.float32)
    session = runtime.open(bundle, bundle.manifest.variants[Precision.FP32].graphs["model"])
    found = session.run({"pixel_values": pixels}, ["embedding"])
    assert set(found) == {"embedding"}
    for row, image in zip(found["embedding"], pixels, strict=True):
        expected = pooled(source.module, torch.from_numpy(image)[None])
        assert row == pytest.approx(expected, abs=float(1e-4 * np.abs(expected).max()))


def test_an_old_checkpoint_without_a_temperature_is_exported_with_1(tiny_checkpoints, tiny_store):
    source = from_checkpoint(tiny_checkpoints["text_classification"])
    assert source.classification is None
    manifest = open_bundle(next((tiny_store / source.name).iterdir())).manifest
    assert manifest.classification is None
    figures = manifest.variants[Precision.INT8].calibration
    assert figures is not None
    assert figures.expected_calibration_error == figures.uncalibrated


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
async def test_a_token_classifiers_vectors_are_pytorchs_alone_and_in_company(
    tiny_store, tiny_checkpoints, runtime, precision
):
    source = from_checkpoint(tiny_checkpoints["token_classification"])
    bundle = open_bundle(next((tiny_store / source.name).iterdir()))
    assert bundle.manifest.embedding.pooling == "mean"
    model = TokenClassifier.load(
        bundle, runtime, loading(batching=BatchingSettings(max_batch_tokens=256), precision=precision)
    )
    model.start()
    texts = list(source.evaluation.texts[:20])
    together = await model.embed(inputs(texts, truncate=True), normalize=False, deadline=None)
    for text, result in zip(texts, together.results, strict=True):
        alone = await model.embed(inputs([text], truncate=True), normalize=False, deadline=None)
        assert result.values == pytest.approx(alone.results[0].values, abs=1e-5)
        if precision is Precision.FP32 and not result.truncated:
            ids = torch.tensor([source.tokenizer.encode(text).ids])
            expected = pooled(source.module, ids, torch.ones_like(ids))
            assert result.values == pytest.approx(expected, abs=float(1e-4 * np.abs(expected).max()))
    model.close()
