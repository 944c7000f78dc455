"""Bundles are found, checked whole, and written whole or not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from headway_server.bundles import (
    attention_layers,
    find_bundles,
    open_bundle,
    path_key,
    publish,
    read_manifest,
    staging_folder,
)
from headway_server.errors import BundleError, StoreError

SHIPPED = sorted((Path(__file__).parents[3] / "models").glob("*/*"))
WITHOUT_ATTENTION_GRAPH = {
    "segment": "segmenters have none",
    "detect": "detectors have none",
    "caption": "each word brings its own map",
    "fashion-mnist-diffusion": "image generators have none",
    "telephone-speech": "models that speak have none",
    "telephone-transcriber": "transcribers have none",
}
SHOWN = [folder for folder in SHIPPED if folder.parent.name not in WITHOUT_ATTENTION_GRAPH]


def test_the_shipped_models_are_small_and_whole() -> None:
    sizes = [sum(entry.size_bytes for entry in open_bundle(folder).manifest.files.values()) for folder in SHIPPED]
    assert sum(sizes) < 56_000_000


@pytest.mark.parametrize("folder", SHOWN, ids=[folder.parent.name for folder in SHOWN])
def test_every_shipped_model_has_its_attention_shown(folder: Path) -> None:
    manifest = open_bundle(folder).manifest
    for variant in manifest.variants.values():
        assert attention_layers(variant.graphs["attention"].outputs)
        assert variant.attention is not None
        assert variant.attention.max_row_sum_error < 1e-4
    assert "## Attention" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def bundle(classifier_store: Path, tmp_path: Path) -> Path:
    """A bundle that may be damaged."""
    original = min(classifier_store.glob("*/*"))
    return shutil.copytree(original, tmp_path / original.parent.name / original.name)


def _edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def edit(bundle: Path) -> None:
        file = bundle / "bundle.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


_A_FILE = {"sha256": "0" * 64, "size_bytes": 1}


def _graph_file(manifest: dict) -> str:
    return next(iter(manifest["variants"].values()))["graphs"]["model"]["file"]


def _flip_a_byte(bundle: Path) -> None:
    file = next(bundle.rglob("*.onnx"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_a_byte, "it was changed or is damaged: copy the bundle again"),
        (lambda path: next(path.rglob("*.onnx")).write_bytes(b""), "has 0 bytes, the manifest says"),
        (lambda path: next(path.rglob("*.onnx")).unlink(), "is missing; export the model again"),
        (lambda path: (path / "extra.txt").write_text("x"), "extra.txt is not in the manifest"),
        (
            _edit(lambda m: m["files"].update({"chat_template.jinja": _A_FILE})),
            "chat_template.jinja belongs to generation",
        ),
        (lambda path: (path / "bundle.json").unlink(), "bundle.json is missing"),
        (lambda path: (path / "bundle.json").write_text("{"), "cannot be read as JSON"),
        (lambda path: (path / "bundle.json").write_bytes(b"\xff\xfe"), "cannot be read as JSON"),
        (lambda path: (path / "bundle.json").write_text("[]"), "schema_version is None, this server reads 1"),
        (_edit(lambda manifest: manifest.update(schema_version=2)), "schema_version is 2, this server reads 1"),
        (_edit(lambda manifest: manifest.update(surprise=1)), "surprise: Extra inputs are not permitted"),
        (_edit(lambda manifest: manifest.update(labels=[])), "labels: .* needs it"),
        (_edit(lambda manifest: manifest.update(variants={})), "variants: at least one is needed"),
        (_edit(lambda manifest: manifest["files"].pop(_graph_file(manifest))), "is not among the files"),
        (_edit(lambda manifest: manifest["files"].update({"../up.onnx": _A_FILE})), "String should match"),
        (_edit(lambda manifest: manifest["files"].update({"/up.onnx": _A_FILE})), "String should match"),
        (
            _edit(lambda manifest: manifest["limits"].update(max_input_tokens=0)),
            r"limits\.max_input_tokens: .*equal to 1",
        ),
        (_edit(lambda manifest: manifest.update(sampling_defaults={"temperature": 5})), "temperature: .*equal to 2"),
        (_edit(lambda manifest: manifest.update(sampling_defaults={"top_k": -3})), "top_k: .*equal to 0"),
        (_edit(lambda manifest: manifest.update(name="another")), "the manifest is of another/"),
        (_edit(lambda manifest: manifest.update(name="../up")), "name: String should match"),
    ],
)
def test_a_damaged_bundle_is_refused_and_says_what_is_wrong(bundle, damage, message):
    damage(bundle)
    with pytest.raises(BundleError, match=message):
        open_bundle(bundle)


def test_a_mask_decoder_of_other_tensors_is_refused_and_is_to_be_exported_again(tmp_path: Path) -> None:
    shipped = next(folder for folder in SHIPPED if folder.parent.name == "segment")
    shutil.copy(shipped / "bundle.json", tmp_path)
    images = {"name": "image_index", "dtype": "int64", "shape": ["prompts"]}  # of the shared embeddings, once an input
    _edit(lambda manifest: manifest["variants"]["int8"]["graphs"]["decoder"]["inputs"].insert(1, images))(tmp_path)
    with pytest.raises(BundleError, match=r"decoder: has the tensors .*image_index.*; export the model again"):
        read_manifest(tmp_path)


def test_a_whole_bundle_opens_and_its_manifest_survives_json(bundle):
    opened = open_bundle(bundle)
    assert read_manifest(bundle) == opened.manifest
    assert opened.file("bundle.json").is_file()


def test_a_store_that_is_missing_or_empty_says_how_to_make_one(tmp_path):
    with pytest.raises(StoreError, match="no such folder; make one with headway-export"):
        find_bundles(tmp_path / "nowhere")
    (tmp_path / "model").mkdir()
    with pytest.raises(StoreError, match="has no bundle"):
        find_bundles(tmp_path)


def test_folders_that_no_model_can_be_called_are_no_bundles(bundle):
    store = bundle.parent.parent
    (store / ".staging-x" / "1").mkdir(parents=True)
    (store / "lost+found" / "1").mkdir(parents=True)
    assert find_bundles(store) == [bundle]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_is_a_bad_bundle_and_no_more(bundle):
    closed = bundle.parent.parent / "closed"
    closed.mkdir(mode=0)
    assert find_bundles(bundle.parent.parent) == [closed, bundle]
    with pytest.raises(BundleError, match="cannot be read"):
        open_bundle(closed)


ORDERS = [
    "1 1.9 1.10 2 10 2026-11-21",
    "8 v9 10 v11",
    "v1.9 v1.10",
    "1.0.0-dev 1.0.0-alpha1 1.0.0-alpha.2 1.0.0-beta 1.0.0-rc1 1.0.0-rc2 1.0.0-rc10 1.0.0 1.0.0-gpu 1.0.1-rc1 1.0.1",
    "1.0.dev3 1.0a1 1.0b2 1.0rc1 1.0 1.0.1",
    "1-nightly 1-snapshot.2 1-pre 1 1-post1",
    "candidate 1",
    "1.0 1.0-a 1.0-b",
    "run9 run10",
    "2026-11-21 2026-11-21.1 2026-12-02",
    "01 1",
]


@pytest.mark.parametrize("order", ORDERS)
def test_versions_are_ordered_as_people_read_them(order):
    keys = [path_key(f"model/{version}") for version in order.split()]
    assert all(earlier < later for earlier, later in pairwise(keys))


def test_a_store_lists_the_versions_of_a_model_in_their_order(tmp_path):
    for version in ("10", "v9", "11-rc1", "11"):
        (tmp_path / "model" / version).mkdir(parents=True)
    assert [folder.name for folder in find_bundles(tmp_path)] == ["v9", "10", "11-rc1", "11"]


def test_a_version_that_exists_is_not_overwritten(bundle):
    store = bundle.parent.parent
    with staging_folder(store) as folder:
        staged = shutil.copytree(bundle, folder / "again")
        with pytest.raises(BundleError, match="exists already; choose another --version or pass --replace"):
            publish(staged, store)
        assert publish(staged, store, replace=True).path == bundle
    assert not list(store.glob(".staging-*"))


_KILLED = """
import os, signal, sys
from pathlib import Path
from headway_server.bundles import staging_folder
from headway_server.bundles.staging import aside_of
store, version = Path(sys.argv[1]), sys.argv[2:]
with staging_folder(store) as folder:
    (folder / "weights").write_text("x")
    if version:
        Path(version[0]).rename(aside_of(folder))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("was_aside", [False, True])
def test_what_a_killed_process_leaves_in_a_store_is_removed_by_the_next(bundle, was_aside):
    """A version that it had moved aside is put back; what a process that runs has is left alone."""
    store, before = bundle.parent.parent, sorted(file.name for file in bundle.rglob("*"))
    words = [str(store), *([str(bundle)] if was_aside else [])]
    killed = subprocess.run([sys.executable, "-c", _KILLED, *words], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(store.glob(".staging-*"))) == 2 + was_aside
    assert bundle.exists() != was_aside
    with staging_folder(store) as own:
        (own / "weights").write_text("y")
        assert sorted(store.glob(".staging-*")) == [own, own.with_name(f"{own.name}.lock")]
        assert sorted(file.name for file in bundle.rglob("*")) == before
        with staging_folder(store) as other:
            assert own.exists()
            assert other != own
        assert (own / "weights").read_text() == "y"
    assert not list(store.glob(".staging-*"))


def test_a_bundle_that_is_not_whole_is_not_published(bundle):
    store = bundle.parent.parent
    with staging_folder(store) as folder:
        staged = shutil.copytree(bundle, folder / "again")
        _flip_a_byte(staged)
        _edit(lambda manifest: manifest.update(version="2"))(staged)
        with pytest.raises(BundleError, match="it was changed or is damaged"):
            publish(staged, store)
    assert find_bundles(store) == [bundle]
