"""A suite of wrong models: each computes something else than its graph, and each is refused.

The four that they are made of are right and pass, so what is refused is the fault and not the model.
"""

import re

import numpy as np
import pytest
import torch
from foreign import wrong
from safetensors.torch import save_model

from headway_export import graphs, rewriting, tracing
from headway_export.errors import ParityError, SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import ExportSource, from_factory
from headway_server.bundles import ImagePreprocessing, Languages, Precision, SpecialTokens

SEED = 3
PIXELS = ImagePreprocessing(
    height=wrong.SIDE, width=wrong.SIDE, resize="stretch", interpolation="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3
)
REASONS = {
    "ChangesItsMind": r"answers the same input \(outputs\) otherwise after it has read others: .*, bound 1e-05",
    "AlignsElsewhere": r"alignment \(\d+, \d+\) of a target of \d+ tokens: .* from PyTorch's weights, bound 1e-04",
    "WrongFrom32": r"batch 1, targets of \[96\] tokens: relative difference",
    "WrongAtTheEnd": r"batch 1, targets of \[96\] tokens: relative difference",
}
"""What is said of a model, where it is not that an output differs."""


@pytest.fixture
def source_of(tmp_path, tokenizer_file):
    def make(build: str, kind: str) -> ExportSource:
        torch.manual_seed(SEED)
        weights = tmp_path / "weights.safetensors"
        save_model(getattr(wrong, build)(), str(weights))
        text = {"tokenizer_file": tokenizer_file, "special_tokens": SpecialTokens(pad=0, bos=1, eos=2)}
        labels = [f"label {number}" for number in range(wrong.CLASSES)]
        further = {
            "text": {"task": "text_classification", "labels": labels, **text},
            "decoder": {"task": "generation", **text},
            "translator": {"task": "translation", "languages": Languages(source="en", target="de"), **text},
            "image": {"task": "image_classification", "labels": labels, "image_preprocessing": PIXELS},
        }[kind]
        return from_factory(f"foreign.wrong:{build}", weights, name="wrong", **further)

    return make


def kinds(*classes, kind):
    return [pytest.param(one.__name__, kind, id=one.__name__) for one in classes]


WRONG = [
    *kinds(*wrong.TEXT, kind="text"),
    *kinds(*wrong.DECODERS, kind="decoder"),
    *kinds(*wrong.TRANSLATORS, kind="translator"),
    *kinds(*wrong.IMAGES, kind="image"),
]
RIGHT = [
    pytest.param(one.__name__, kind, id=one.__name__)
    for one, kind in zip(wrong.RIGHT, ("text", "decoder", "translator", "image"), strict=True)
]


@pytest.mark.parametrize(("build", "kind"), WRONG)
def test_a_wrong_model_is_refused_and_nothing_is_written(source_of, tmp_path, build, kind):
    reason = REASONS.get(build, "relative difference")
    with pytest.raises(ParityError) as error:
        export(source_of(build, kind), ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,)))
    assert re.search(reason, str(error.value)), str(error.value)
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize(("build", "kind"), RIGHT)
def test_the_models_that_they_are_made_of_pass(source_of, tmp_path, build, kind):
    bundle = export(source_of(build, kind), ExportOptions(store=tmp_path, precisions=(Precision.FP32,)))
    parity = bundle.manifest.variants[Precision.FP32].parity
    assert parity.max_relative_logit_error < 1e-5
    assert parity.greedy_mismatch_count == 0


def test_a_factory_that_returns_one_module_twice_is_refused(source_of, tmp_path):
    source = source_of("build_shared", "text")
    with pytest.raises(SourceError, match="came as one object, which cannot be held against itself"):
        export(source, ExportOptions(store=tmp_path, precisions=(Precision.FP32,)))


def test_numbers_that_fp16_does_not_have_are_refused(source_of, tmp_path):
    source = source_of("Overflows", "text")
    assert export(source, ExportOptions(store=tmp_path, precisions=(Precision.FP32,)))
    with pytest.raises(ParityError, match=r"output logits .* the variant gives numbers that are not finite"):
        export(source, ExportOptions(store=tmp_path, precisions=(Precision.FP16,), version="2"))


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("decoder", "scale of cached attention"),
        ("decoder", "logits of asked positions"),
        ("decoder", "verified drafts"),
        ("translator", "rows of a source"),
        ("translator", "ranking"),
    ],
)
def test_a_fault_of_the_exporter_itself_is_refused(source_of, tmp_path, monkeypatch, kind, place):
    monkeypatch.setattr("headway_export.exporter.trace", tracing.trace)  # what was traced before has no fault
    _break(monkeypatch, place)
    with pytest.raises(ParityError):
        export(source_of(kind.title(), kind), ExportOptions(store=tmp_path, precisions=(Precision.FP32,)))


def _break(monkeypatch, place):
    """Puts a fault into the graphs that the exporter makes."""
    if place == "scale of cached attention":
        attend = graphs.CachedAttention.__call__

        def scaled(self, *tensors, **named):
            return attend(self, *tensors, **{**named, "scale": 0.3})

        monkeypatch.setattr(graphs.CachedAttention, "__call__", scaled)
    elif place == "logits of asked positions":

        def of_the_first(module, hidden, positions):
            return module.logits(hidden[:, :1].expand(-1, positions.shape[1], -1)).float()

        monkeypatch.setattr(graphs, "_logits_at", of_the_first)
    elif place == "verified drafts":
        chain = rewriting.AddVerification._chain

        def one_behind(operator, lengths):
            return chain(operator, [lengths[0], *lengths[:-1]])

        monkeypatch.setattr(rewriting.AddVerification, "_chain", staticmethod(one_behind))
    elif place == "rows of a source":
        attend = graphs.CrossAttention.__call__

        def flipped(self, query, **named):
            return attend(self, query.flip(0), **named).flip(0)

        monkeypatch.setattr(graphs.CrossAttention, "__call__", flipped)
    else:
        rank = rewriting.RankLogits._rank

        def off_by_one(tape, *inputs):
            ids, values = rank(tape, *inputs)
            return tape.op("Add", [ids, rewriting.record_constant(tape, np.array([1]))]), values

        monkeypatch.setattr(rewriting.RankLogits, "_rank", staticmethod(off_by_one))
