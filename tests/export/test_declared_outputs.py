"""A model without state declares its outputs: any names, any axes, all of them proved and served as declared."""

import re

import numpy as np
import pytest
import torch
from foreign import several_outputs
from safetensors.torch import save_model

from headway_export import reference
from headway_export.errors import ParityError, SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_factory
from headway_server.bundles import Precision
from headway_server.runtime import Runtime


@pytest.fixture
def exported(tmp_path, tokenizer_file):
    def make(build):
        torch.manual_seed(0)
        weights = tmp_path / "weights.safetensors"
        save_model(getattr(several_outputs, build)(), str(weights))
        source = from_factory(
            f"foreign.several_outputs:{build}",
            weights,
            task="text_classification",
            name="mine",
            tokenizer_file=tokenizer_file,
            labels=("red", "green", "blue"),
        )
        return source, export(source, ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,)))

    return make


def test_every_output_is_declared_with_its_axes_and_gives_pytorchs_values(exported):
    source, bundle = exported("build")
    graph = bundle.manifest.variants[Precision.FP32].graphs["model"]
    assert {spec.name: (spec.dtype, spec.shape) for spec in graph.outputs} == {
        "logits": ("float32", ("batch", 3)),
        "token_scores": ("float32", ("batch", "length")),
        "likeliest_token": ("int64", ("batch",)),
        "prototypes": ("float32", ("batch", 4, several_outputs.WIDTH)),
    }
    ids = np.random.default_rng(0).integers(0, 80, (3, 11))
    found = Runtime(device="cpu").open(bundle, graph).run({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    for row, text in enumerate(ids):
        for name, expected in reference.outputs(source.module, text).items():
            np.testing.assert_allclose(found[name][row], expected, rtol=1e-4, atol=1e-5)


def test_an_output_beside_the_logits_that_is_not_pytorchs_is_refused(exported):
    """It changes from call to call, which is the reason that is told; the difference was seen in that output."""
    with pytest.raises(ParityError, match="Drifting answers the same input") as told:
        exported("build_drifting")
    assert re.match(r"output token_scores \(\d+,\) at batch \d, .* bound 1e-04", str(told.value.__context__))


def test_a_classifier_without_logits_is_refused(exported):
    with pytest.raises(SourceError, match="the model gives scores; text_classification needs an output logits"):
        exported("build_unnamed")


def test_an_axis_that_is_none_of_the_inputs_is_refused(exported):
    with pytest.raises(SourceError, match=r"output token_scores is 10 and 8 .* an axis is fixed, or as long as"):
        exported("build_twice_as_long")
