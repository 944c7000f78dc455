"""Loading a store, and finding the model a call is for."""

import json
import os
import shutil
from pathlib import Path
from threading import Barrier

import pytest
import structlog
import tiny_bundles

from headway_server.bundles import Languages, Manifest, Precision, Task, open_bundle
from headway_server.errors import BundleRejectedError, InvalidInputError, ModelNotFoundError, StoreError, WrongTaskError
from headway_server.runtime import Runtime
from headway_server.serving.host import BundleLoader, ModelHost
from headway_server.settings import ServerSettings
from headway_server.tasks.table import CLASSIFY_IMAGES, CLASSIFY_TOKENS, FAMILIES, GENERATE_TEXTS, TRANSLATE_TEXTS
from headway_server.tasks.text.classifier import TextClassifier


@pytest.fixture
def load(runtime: Runtime):
    return lambda store, **options: ModelHost.open(runtime, ServerSettings(store=store), **options)


def names(host: ModelHost) -> list[str]:
    return [f"{model.bundle.manifest.name}/{model.bundle.manifest.version}" for model in host.models]


# Loading


def test_every_bundle_is_loaded_and_the_latest_version_is_last(tmp_path, load):
    for version in ("9", "10", "1.2"):
        tiny_bundles.write_topic_bundle(tmp_path, version=version)
    tiny_bundles.write_colour_bundle(tmp_path)
    assert names(load(tmp_path)) == ["colours/1", "topics/1.2", "topics/9", "topics/10"]


def test_small_bundles_are_loaded_together_and_a_large_one_alone(tmp_path, monkeypatch):
    """Each checks the available memory before it takes its own."""
    for name in ("a", "b", "c", "d"):
        tiny_bundles.write_topic_bundle(tmp_path, name=name, num_idle_products=20 if name == "c" else 0)
    small, large = (sum(file.stat().st_size for file in (tmp_path / name).rglob("*")) for name in ("a", "c"))
    assert 2 * small < large
    monkeypatch.setattr("headway_server.serving.host.available_bytes", lambda _: 100 * 2 * small)
    loading: set[str] = set()
    beside: dict[str, set[str]] = {}
    two, load = Barrier(2, timeout=20), BundleLoader.load

    def observed(self, path, observer):
        loading.add(path)
        if path in ("a/1", "b/1"):
            two.wait()
        beside[path] = set(loading)
        model = load(self, path, observer)
        loading.discard(path)
        return model

    monkeypatch.setattr(BundleLoader, "load", observed)
    host = ModelHost.open(Runtime(device="cpu", num_threads=2), ServerSettings(store=tmp_path))
    assert names(host) == ["a/1", "b/1", "c/1", "d/1"]
    assert beside["c/1"] == {"c/1"}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "model.onnx").write_bytes(b"x"), "model.onnx has 1 bytes, the manifest says"),
        (lambda folder: flip_a_byte(folder / "model.onnx"), "model.onnx has SHA-256"),
        (lambda folder: flip_a_byte(folder / "tokenizer.json"), "tokenizer.json has SHA-256"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "extra.bin").write_bytes(b"x"), "extra.bin is not in the manifest"),
        (lambda folder: (folder / "bundle.json").unlink(), "bundle.json is missing"),
        (lambda folder: (folder / "bundle.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "bundle.json").write_text('{"schema_version": 99}'), "schema_version is 99"),
        (lambda folder: (folder / "bundle.json").write_text("[" * 100_000), "cannot be read as JSON"),
        (lambda folder: (folder / "bundle.json").write_text("1" * 5_000), "cannot be read as JSON"),
        (lambda folder: (folder / "bundle.json").write_text(" " * (16 * 2**20 + 1)), "has 16,777,217 bytes"),
        (lambda folder: replace_by_fifo(folder / "bundle.json"), "is not a file"),
        (lambda folder: replace_by_fifo(folder / "tokenizer.json"), "tokenizer.json is neither a file nor a folder"),
        (lambda folder: os.mkfifo(folder / "extra"), "extra is neither a file nor a folder"),
        (lambda folder: set_limit(folder, 10**12), "limits.max_input_tokens: Input should be less than"),
    ],
)
def test_a_damaged_bundle_is_rejected_with_its_reason_and_the_others_are_loaded(tmp_path, load, damage, reason):
    tiny_bundles.write_colour_bundle(tmp_path)
    damage(tiny_bundles.write_topic_bundle(tmp_path).path)
    host = load(tmp_path)
    assert names(host) == ["colours/1"]
    [rejected] = host.rejected
    assert rejected.path == "topics/1"
    assert reason in rejected.reason
    assert str(tmp_path) not in rejected.reason


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace_by_fifo(file: Path) -> None:
    """What reads it would wait for ever."""
    file.unlink()
    os.mkfifo(file)


def set_limit(folder: Path, max_input_tokens: int) -> None:
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["limits"]["max_input_tokens"] = max_input_tokens
    (folder / "bundle.json").write_text(json.dumps(manifest))


class PanicException(BaseException):
    """Named as what libraries written in Rust raise; it is no Exception."""


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), MemoryError("9 TiB"), RecursionError()])
async def test_a_library_that_panics_or_runs_out_of_memory_rejects_one_bundle(tmp_path, load, monkeypatch, error):
    tiny_bundles.write_topic_bundle(tmp_path)
    tiny_bundles.write_colour_bundle(tmp_path)

    def fail(*_):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(TextClassifier, "load", fail)
        host = load(tmp_path)
        assert names(host) == ["colours/1"]
        assert [bundle.reason for bundle in host.rejected] == ["cannot be loaded; the server's log says why"]
        with pytest.raises(BundleRejectedError, match="the server's log says why"):
            await host.load("topics", "1")
    await host.load("topics", "1")
    assert names(host) == ["colours/1", "topics/1"]
    host.close()


def test_a_bundle_under_another_name_is_rejected(tmp_path, load):
    bundle = tiny_bundles.write_topic_bundle(tmp_path)
    shutil.copytree(bundle.path, tmp_path / "renamed" / "1")
    [rejected] = load(tmp_path).rejected
    assert rejected.path == "renamed/1"
    assert "the manifest is of topics/1" in rejected.reason


def test_a_task_without_a_family_is_rejected(tmp_path, load):
    tiny_bundles.write_topic_bundle(tmp_path)
    tiny_bundles.write_colour_bundle(tmp_path)
    families = {task: family for task, family in FAMILIES.items() if task is not Task.IMAGE_CLASSIFICATION}
    host = load(tmp_path, families=families)
    assert names(host) == ["topics/1"]
    assert host.rejected[0].reason == "is for image_classification, which this server does not serve"


def test_an_error_that_nobody_foresaw_is_told_in_the_log_alone(tmp_path, load, monkeypatch):
    tiny_bundles.write_colour_bundle(tmp_path)
    tiny_bundles.write_topic_bundle(tmp_path)

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/secret/path")

    monkeypatch.setattr(TextClassifier, "load", fail)
    with structlog.testing.capture_logs() as lines:
        [rejected] = load(tmp_path).rejected
    assert rejected.reason == "cannot be loaded; the server's log says why"
    assert [type(line["exc_info"]) for line in lines if line["event"] == "bundle rejected"] == [PermissionError]


def test_a_store_without_a_usable_bundle_is_refused_with_a_reason(tmp_path, load):
    for name in ("a", "b"):
        flip_a_byte(tiny_bundles.write_topic_bundle(tmp_path, name=name).path / "model.onnx")
    with pytest.raises(
        StoreError, match=r"none of its bundles can be served: a/1: .*SHA-256.*; the log says why 1 more"
    ):
        load(tmp_path)


def test_a_missing_or_empty_store_is_refused(tmp_path, load):
    with pytest.raises(StoreError, match="no such folder; make one with headway-export"):
        load(tmp_path / "missing")
    with pytest.raises(StoreError, match="has no bundle"):
        load(tmp_path)


# Finding


class NamedModel:
    """A model that is only looked for."""

    device = "cpu"
    precision = Precision.FP32
    is_alive = True

    def __init__(self, bundle) -> None:
        self.bundle = bundle


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    return tiny_bundles.write_topic_bundle(tmp_path_factory.mktemp("one")).manifest


@pytest.fixture
def make(manifest, classifier_store):
    """Makes a host of (name, version, task) or, for translation, (name, version, source, target)."""
    bundle = open_bundle(classifier_store / "topics" / "1")

    def host(*models: tuple[str, ...]) -> ModelHost:
        made = []
        for name, version, *rest in models:
            languages = Languages(source=rest[0], target=rest[1]) if len(rest) == 2 else None
            task = Task.TRANSLATION if languages else Task(rest[0])
            update = {"name": name, "version": version, "task": task, "languages": languages}
            changed = type(bundle)(path=bundle.path, manifest=manifest.model_copy(update=update))
            made.append(NamedModel(changed))
        return ModelHost(made)

    return host


def found(model) -> str:
    return f"{model.bundle.manifest.name}/{model.bundle.manifest.version}"


def test_the_only_model_of_a_task_needs_no_name_and_the_latest_version_is_taken(make):
    host = make(("a", "1.9", "generation"), ("a", "1.10", "generation"), ("b", "1", "image_classification"))
    assert found(host.find(GENERATE_TEXTS, "", "")) == "a/1.10"
    assert found(host.find(GENERATE_TEXTS, "a", "")) == "a/1.10"
    assert found(host.find(GENERATE_TEXTS, "a", "1.9")) == "a/1.9"
    assert found(host.find(GENERATE_TEXTS, "", "1.9")) == "a/1.9"


def test_of_several_models_one_must_be_named(make):
    host = make(("a", "1", "generation"), ("b", "1", "generation"))
    with pytest.raises(InvalidInputError, match="several models can generate text; name one of a, b") as caught:
        host.find(GENERATE_TEXTS, "", "")
    assert caught.value.field == "model"


def test_a_version_that_was_made_for_the_task_is_preferred_to_a_later_one_that_was_not(make):
    host = make(("a", "1", "token_classification"), ("a", "2", "text_classification"))
    assert found(host.find(CLASSIFY_TOKENS, "a", "")) == "a/1"
    assert found(host.get("a", "")) == "a/2"


def test_a_wrong_task_names_who_can(make):
    host = make(("a", "1", "generation"), ("b", "1", "image_classification"))
    with pytest.raises(WrongTaskError, match="a/1 is for generation and cannot classify images; ask b"):
        host.find(CLASSIFY_IMAGES, "a", "")
    with pytest.raises(WrongTaskError, match="no loaded model can translate texts; loaded are a, b"):
        host.find_translation(TRANSLATE_TEXTS, "", "", "", "")
    with pytest.raises(ModelNotFoundError, match="model 'c' is not loaded; loaded are a, b"):
        host.find(GENERATE_TEXTS, "c", "")


def test_a_translation_is_found_by_its_languages(make):
    host = make(("en-de", "1", "en", "de"), ("en-fr", "1", "en", "fr"))
    assert found(host.find_translation(TRANSLATE_TEXTS, "", "", "en", "fr")) == "en-fr/1"
    assert found(host.find_translation(TRANSLATE_TEXTS, "", "", "", "DE")) == "en-de/1"
    assert found(host.find_translation(TRANSLATE_TEXTS, "en-fr", "", "", "")) == "en-fr/1"
    with pytest.raises(InvalidInputError, match="several models can translate texts; name one of en-de, en-fr"):
        host.find_translation(TRANSLATE_TEXTS, "", "", "en", "")


@pytest.mark.parametrize(
    ("name", "source", "target", "field"),
    [("", "en", "it", "target_language"), ("", "fr", "de", "source_language"), ("en-fr", "", "de", "target_language")],
)
def test_languages_nobody_translates_between_are_named_with_those_there_are(make, name, source, target, field):
    host = make(("en-de", "1", "en", "de"), ("en-fr", "1", "en", "fr"))
    with pytest.raises(InvalidInputError, match=r"en-de \(en to de\), en-fr \(en to fr\)") as caught:
        host.find_translation(TRANSLATE_TEXTS, name, "", source, target)
    assert caught.value.field == field
