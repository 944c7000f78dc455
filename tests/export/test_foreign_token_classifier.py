"""A token classifier from outside the kit: its labels are tags, and its evaluation data are spans."""

import json

import pytest
import torch
from foreign import token_classifier
from safetensors.torch import save_model

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_factory
from headway_server.bundles import Precision

TAGS = ("I-name", "O", "B-name")


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    file = tmp_path / "weights.safetensors"
    save_model(token_classifier.build(), str(file))
    return file


def source(weights, tokenizer_file, labels=TAGS, evaluation_file=None):
    return from_factory(
        "foreign.token_classifier:build",
        weights,
        task="token_classification",
        name="mine",
        tokenizer_file=tokenizer_file,
        labels=labels,
        evaluation_file=evaluation_file,
    )


def test_it_is_exported_with_logits_a_token_and_measured_by_its_spans(weights, tokenizer_file, tmp_path):
    rows = [
        {"text": "t5 t9 t11", "spans": [[0, 5, "name"]]},
        {"text": "t7 t8", "spans": [[3, 5, "name"], [0, 2, "other"]]},
    ]
    evaluation = tmp_path / "spans.jsonl"
    evaluation.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,))
    manifest = export(source(weights, tokenizer_file, evaluation_file=evaluation), options).manifest
    assert manifest.labels == TAGS
    variant = manifest.variants[Precision.FP32]
    assert variant.graphs["model"].outputs[0].shape == ("batch", "length", 3)
    assert variant.parity.max_relative_logit_error < 1e-5
    assert (variant.quality.metric, variant.quality.example_count) == ("span_f1", 2)
    assert 0 <= variant.quality.value <= 100


def test_the_card_tells_of_labels_that_are_found_badly(weights, tokenizer_file, tmp_path):
    rows = [{"text": "t5 t9 t11 t30", "spans": [[3, 5, "name"]]}] * 12
    evaluation = tmp_path / "spans.jsonl"
    evaluation.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,))
    bundle = export(source(weights, tokenizer_file, evaluation_file=evaluation), options)
    assert "- `name`: F1 " in (bundle.path / "README.md").read_text(encoding="utf-8")
    assert "% of 12" in (bundle.path / "README.md").read_text(encoding="utf-8")


def test_labels_that_are_no_tags_are_refused(weights, tokenizer_file):
    with pytest.raises(SourceError, match="labels: 'name' is no tag; tags are O, and B-x and I-x"):
        source(weights, tokenizer_file, labels=("name", "O", "B-name"))


def test_evaluation_data_without_spans_is_refused(weights, tokenizer_file, tmp_path):
    evaluation = tmp_path / "labels.jsonl"
    evaluation.write_text(json.dumps({"text": "t5", "label": 1}), encoding="utf-8")
    with pytest.raises(
        SourceError, match=r"cannot be read as evaluation data of token_classification \(example 1: spans: "
    ):
        source(weights, tokenizer_file, evaluation_file=evaluation)
