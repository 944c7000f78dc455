"""int8 without evaluation data is judged by fp32's answers."""

import dataclasses

import numpy as np
import pytest

from headway_export.agreement import LIMITS
from headway_export.errors import ParityError
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint
from headway_server.bundles import Precision

BOTH = (Precision.FP32, Precision.INT8)
OF_LABELS = {"mean_kl_divergence", "top_agreement"}


@pytest.mark.parametrize(
    "task", ["generation", "translation", "text_classification", "token_classification", "image_classification"]
)
def test_the_manifest_and_the_card_say_how_near_int8_is_to_fp32(tiny_checkpoints, tmp_path, task):
    source = dataclasses.replace(from_checkpoint(tiny_checkpoints[task]), evaluation=None)
    bundle = export(source, ExportOptions(store=tmp_path, precisions=BOTH))
    assert bundle.manifest.variants[Precision.FP32].agreement is None
    agreed = bundle.manifest.variants[Precision.INT8].agreement
    assert (agreed.dataset, set(agreed.figures)) == ("generated", OF_LABELS)
    assert (
        0 < agreed.figures["mean_kl_divergence"] < LIMITS["mean_kl_divergence"] == agreed.limits["mean_kl_divergence"]
    )
    assert "Its answers were held against those of fp32." in bundle.file("README.md").read_text()
    if task in ("generation", "translation"):
        graph = bundle.manifest.variants[Precision.INT8].graphs["decoder"]
        assert "int8" in {tensor.dtype for tensor in graph.inputs}


@pytest.mark.parametrize("task", ["generation", "translation", "text_classification"])
def test_texts_that_are_given_are_what_is_answered(tiny_checkpoints, tmp_path, task):
    whole = from_checkpoint(tiny_checkpoints[task])
    texts = tuple(text[:200] for text in whole.evaluation.texts[:5])
    source = dataclasses.replace(whole, evaluation=None, texts=texts, texts_name="own.txt")
    bundle = export(source, ExportOptions(store=tmp_path, precisions=(Precision.INT8,)))
    agreed = bundle.manifest.variants[Precision.INT8].agreement
    assert agreed.dataset == "own.txt"
    assert agreed.example_count >= 5 or task == "generation"
    assert agreed.figures["top_agreement"] >= LIMITS["top_agreement"]


def test_a_variant_that_answers_otherwise_is_refused_and_nothing_is_written(tiny_checkpoints, tmp_path, monkeypatch):
    """Rounding the weights to nothing, as a quantizer with a bug would."""
    source = dataclasses.replace(from_checkpoint(tiny_checkpoints["text_classification"]), evaluation=None)
    monkeypatch.setattr(
        "headway_export.rewriting.quantize_matrix",
        lambda matrix, *, axis: (np.zeros(matrix.shape, np.int8), np.ones(matrix.shape[1 - axis], np.float32)),
    )
    with pytest.raises(ParityError, match=r"int8: (mean_kl_divergence|top_agreement) with fp32 on 64 inputs"):
        export(source, ExportOptions(store=tmp_path, precisions=BOTH))
    assert list(tmp_path.iterdir()) == []
