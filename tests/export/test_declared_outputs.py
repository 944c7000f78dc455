"""A model without state declares its outputs: any names, any axes, all of them proved and served as declared."""

import re

import numpy as np
import pytest
import torch
from foreign import several_outputs
from safetensors.torch import save_model
from torch._subclasses.fake_tensor import FakeTensor

from headway_export import reference
from headway_export.errors import ParityError, SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_factory
from headway_export.tracing import declare_outputs, make_spec
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


class _Keeping(torch.nn.Module):
    """Keeps what it read, and doubles it by a library that reads values where it is asked to."""

    def __init__(self, *, reads_values):
        super().__init__()
        self.reads_values, self.runs = reads_values, []
        self.last = None
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, given):
        self.runs.append(type(given).__name__)
        self.last = given
        self.seen = given[:, 0]
        return {"doubled": torch.from_numpy(2 * given.numpy()) if self.reads_values else 2 * given}


@pytest.mark.parametrize(("reads_values", "runs"), [(False, ["FakeTensor"] * 2), (True, ["FakeTensor", "Tensor"] * 2)])
def test_outputs_are_declared_without_values_where_none_are_read(reads_values, runs):
    module = _Keeping(reads_values=reads_values)
    [found] = declare_outputs(module, module, [make_spec("given", "float32", "batch", 4)])
    assert (found.name, found.dtype, found.shape) == ("doubled", "float32", ("batch", 4))
    assert module.runs == runs
    assert not isinstance(module.last, FakeTensor)
    assert not isinstance(module.seen, FakeTensor)
