"""The way from a module to a bundle, and what stops it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from tokenizers import Tokenizer

from headway_export.errors import ParityError, SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import EvaluationData, from_checkpoint, from_factory
from headway_server.bundles import Precision, find_bundles, open_bundle
from headway_server.errors import BundleError, StoreError
from headway_server.runtime import Runtime


def test_every_tiny_bundle_opens_and_carries_its_proof(tiny_store):
    bundles = [open_bundle(path) for path in find_bundles(tiny_store)]
    assert len(bundles) == 5
    for bundle in bundles:
        fp32, int8 = bundle.manifest.variants[Precision.FP32], bundle.manifest.variants[Precision.INT8]
        assert fp32.parity.max_relative_logit_error < fp32.parity.bound == 1e-4
        assert fp32.parity.greedy_mismatch_count == 0
        assert fp32.parity.checked_shape_count >= 3
        assert abs(fp32.quality.value - int8.quality.value) <= 0.5
        assert fp32.quality.metric in (bundle.path / "README.md").read_text(encoding="utf-8")


def test_trained_references_are_varied(tiny_checkpoints):
    """A model that repeats one token would prove nothing."""
    from headway_export.reference import generation_logits

    module = from_checkpoint(tiny_checkpoints["generation"]).module
    ids = np.arange(10)
    for _ in range(40):
        ids = np.append(ids, generation_logits(module, ids)[-1].argmax())
    assert len(set(ids[10:])) >= 6


def test_a_module_that_is_not_its_graph_is_refused_and_nothing_is_written(tmp_path, tokenizer_file):
    module = _weights(tmp_path, "foreign.unstable:build")
    source = from_factory(
        "foreign.unstable:build",
        module,
        task="text_classification",
        name="unstable",
        tokenizer_file=tokenizer_file,
        labels=list("abcdefgh"),
    )
    with pytest.raises(ParityError, match=r"Unstable answers the same input .* otherwise after it has read others"):
        export(source, ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,)))
    with pytest.raises(StoreError, match="has no bundle"):
        find_bundles(tmp_path / "store")
    assert list((tmp_path / "store").iterdir()) == []


def test_a_variant_that_loses_too_much_is_refused_and_nothing_is_written(tiny_checkpoints, tmp_path, monkeypatch):
    """Rounding the weights to nothing, as a quantizer with a bug would."""
    source = from_checkpoint(tiny_checkpoints["text_classification"])
    monkeypatch.setattr(
        "headway_export.rewriting.quantize_matrix",
        lambda matrix, *, axis: (np.zeros(matrix.shape, np.int8), np.ones(matrix.shape[1 - axis], np.float32)),
    )
    with pytest.raises(ParityError, match=r"int8: accuracy on weather \(200 examples\) is .*, fp32 has .* bound 0.5"):
        export(source, ExportOptions(store=tmp_path, precisions=(Precision.INT8,)))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_version_is_kept_unless_it_is_to_be_replaced(tiny_checkpoints, tmp_path):
    source = from_checkpoint(tiny_checkpoints["image_classification"])
    options = ExportOptions(store=tmp_path, precisions=(Precision.FP32,))
    first = export(source, options)
    with pytest.raises(BundleError, match="exists already; choose another --version or pass --replace"):
        export(source, options)
    assert open_bundle(first.path).manifest == first.manifest
    export(source, dataclasses.replace(options, replace=True))


def test_large_weights_go_to_external_data_that_is_checked_and_served(tiny_checkpoints, tmp_path):
    source = from_checkpoint(tiny_checkpoints["image_classification"])
    options = ExportOptions(store=tmp_path, precisions=(Precision.FP32,), external_data_threshold_bytes=1)
    bundle = export(source, options)
    data = bundle.path / "fp32" / "model.onnx.data"
    assert "fp32/model.onnx.data" in bundle.manifest.files
    assert data.stat().st_size > (bundle.path / "fp32" / "model.onnx").stat().st_size
    session = Runtime(device="cpu").open(bundle, bundle.manifest.variants[Precision.FP32].graphs["model"])
    assert session.run({"pixel_values": np.zeros((2, 3, 16, 16), np.float32)})["logits"].shape == (2, 3)
    data.write_bytes(data.read_bytes()[:-1] + b"\x00")
    with pytest.raises(BundleError, match=r"model\.onnx\.data"):
        open_bundle(bundle.path)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_the_attention_graph_reads_the_weights_of_the_graph_that_serves(tiny_checkpoints, tmp_path, precision):
    """What it answers is held against the module by the export itself."""
    source = from_checkpoint(tiny_checkpoints["text_classification"])
    bundle = export(source, ExportOptions(store=tmp_path, precisions=(precision,), attention=True))
    files = {Path(name).name: file.size_bytes for name, file in bundle.manifest.files.items() if ".onnx" in name}
    assert set(files) == {"model.onnx", "model.onnx.data", "attention.onnx"}
    assert files["attention.onnx"] < files["model.onnx.data"] / 2


def test_only_the_variants_asked_for_are_kept(tiny_checkpoints, tmp_path):
    bundle = export(
        from_checkpoint(tiny_checkpoints["image_classification"]),
        ExportOptions(store=tmp_path, precisions=(Precision.INT8, Precision.FP16), external_data_threshold_bytes=1),
    )
    assert set(bundle.manifest.variants) == {Precision.INT8, Precision.FP16}
    assert not (bundle.path / "fp32").exists()
    assert bundle.manifest.variants[Precision.FP16].parity.provider == "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "token_classification"}, "labels: 'warm' is no tag; tags are O, and B-x and I-x"),
        ({"schema_version": 9}, "schema version 9"),
        ({"architecture": "gpt"}, "configuration"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tiny_checkpoints, tmp_path, change, message):
    import shutil

    folder = shutil.copytree(tiny_checkpoints["text_classification"], tmp_path / "checkpoint")
    file = folder / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SourceError, match=message):
        from_checkpoint(folder)


def test_a_tokenizer_of_another_model_is_refused(tiny_checkpoints, tmp_path):
    source = from_checkpoint(tiny_checkpoints["generation"])
    source.tokenizer.add_tokens(["one more"])
    with pytest.raises(SourceError, match=r"the tokenizer has a token of id .*, and the model's vocabulary ends at"):
        export(source, ExportOptions(store=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(SourceError, match="is not a checkpoint"):
        from_checkpoint(tmp_path)


def test_a_label_that_the_model_does_not_have_is_refused(tmp_path, tokenizer_file):
    evaluation = tmp_path / "evaluation.jsonl"
    evaluation.write_text('{"text": "t5", "label": 8}', encoding="utf-8")
    with pytest.raises(SourceError, match=r"evaluation\.jsonl: .*label 8: the model has 8 labels, numbered from 0"):
        from_factory(
            "foreign.unstable:build",
            _weights(tmp_path, "foreign.unstable:build"),
            task="text_classification",
            name="unstable",
            tokenizer_file=tokenizer_file,
            labels=list("abcdefgh"),
            evaluation_file=evaluation,
        )


def test_a_text_that_is_cut_keeps_the_special_tokens_around_it(tmp_path, tokenizer_file):
    """As a server cuts it, whatever the tokenizer says of padding and truncation."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_padding(length=20)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = from_factory(
        "foreign.unstable:build",
        _weights(tmp_path, "foreign.unstable:build"),
        task="text_classification",
        name="unstable",
        tokenizer_file=tmp_path / "tokenizer.json",
        labels=list("abcdefgh"),
    )
    assert [ids.tolist() for ids in source.encode(["t5 t6 t7 t8", "t9"], 3)] == [[5, 6, 2], [9, 2]]
    assert source.encode(["t5 t6 t7"], frame=False)[0].tolist() == [5, 6, 7]


def test_evaluation_data_has_a_length():
    data = EvaluationData(dataset="d", metric="accuracy", higher_is_better=True, texts=["a", "b"])
    assert len(data) == 2


def _weights(folder, factory):
    import importlib

    module_name, _, function = factory.partition(":")
    torch.manual_seed(0)
    file = folder / "weights.safetensors"
    save_model(getattr(importlib.import_module(module_name), function)(), str(file))
    return file
