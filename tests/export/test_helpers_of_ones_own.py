"""Modules whose helpers and attributes have names of other protocols: what they are told by, and what is refused."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from foreign.decoder import ForeignDecoder
from foreign.encoder_decoder import ForeignEncoderDecoder
from foreign.recurrent import ForeignRecurrent
from torch import nn
from torch.nn import functional

from headway_export.errors import SourceError
from headway_export.graphs import StatelessAttentionGraph, shows_attention, with_kernel
from headway_export.source import ExportSource
from headway_export.tracing import trace
from headway_server.bundles import Architecture, Limits, Task
from headway_training.models import build_model
from headway_training.models.parts.attention import RecordingKernel, fused_attention, scaled_dot_product_attention
from headway_training.models.protocols import Decoder, StatefulDecoder, decoder_kind, is_recurrent


def with_method(base, name):
    return type("Helped", (base,), {name: lambda *given: given})()


LINEAR = {"vocabulary_size": 9, "max_length": 8, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 8}


def test_a_helper_does_not_make_another_kind_of_model():
    # These have helpers by the names of other protocols, and test_bring_your_own.py exports them.
    assert decoder_kind(ForeignDecoder()) is Decoder
    assert not is_recurrent(ForeignEncoderDecoder())
    assert is_recurrent(ForeignRecurrent())
    assert decoder_kind(build_model("linear", LINEAR)) is StatefulDecoder


class Stateful(nn.Module):
    max_length = 8

    def first_states(self, rows):
        return [torch.zeros(rows, 2)]

    def read(self, input_ids, states):
        return input_ids[..., None].float(), states

    def logits(self, hidden_states):
        return hidden_states


@pytest.mark.parametrize(
    ("module", "task", "found"),
    [
        (
            with_method(Stateful, "hidden_states"),
            Task.GENERATION,
            "it has hidden_states, logits of Decoder and first_states, read, logits of StatefulDecoder; a model",
        ),
        (
            type("Both", (ForeignRecurrent, ForeignEncoderDecoder), {})(),
            Task.TRANSLATION,
            "it has encode_source, step of RecurrentEncoderDecoder and encode, cross_keys_values, decode, logits",
        ),
        (
            with_method(nn.Module, "read"),
            Task.GENERATION,
            "it lacks hidden_states, logits of Decoder and first_states, read_attending, logits of HybridDecoder",
        ),
    ],
)
def test_a_module_of_two_protocols_or_of_none_is_refused_by_what_it_has_or_lacks(module, task, found):
    with pytest.raises(SourceError, match=found):
        trace(module.eval(), task)


class Attending(nn.Module):
    """A classifier of one layer that attends through its attribute `kernel` if that is given to attend."""

    max_length = 16

    def __init__(self, kernel, attends=True):
        super().__init__()
        self.kernel, self.attends = kernel, attends
        self.tokens, self.product = nn.Embedding(50, 32), nn.Linear(32, 96)

    def forward(self, input_ids, attention_mask):
        query, key, value = self.product(self.tokens(input_ids)).unflatten(-1, (3, 4, 8)).unbind(2)
        kernel = self.kernel if self.attends else scaled_dot_product_attention
        return kernel(query, key, value, attention_mask.bool()[:, None, None]).flatten(2).sum(dim=1)


def gaussian(first, second, width=1.0, height=1.0):
    return height * torch.exp(-((first - second) ** 2) / width)


OTHER_KERNELS = {
    "a number": 3,
    "a tensor": torch.ones(3, 3),
    "a layer": nn.Conv1d(4, 4, 3),
    "a function": gaussian,
    "torch's own": functional.scaled_dot_product_attention,
    "a module that attends": nn.MultiheadAttention(32, 4),
}


@pytest.mark.parametrize("kernel", OTHER_KERNELS)
def test_an_attribute_kernel_that_does_not_attend_is_left_alone(kernel):
    module = Attending(OTHER_KERNELS[kernel], attends=False)
    assert not shows_attention(module)
    assert with_kernel(module, RecordingKernel()) is module


def test_a_classifier_with_another_kernel_is_exported_and_has_no_attention_to_show(tmp_path):
    torch.manual_seed(0)
    module = Attending(gaussian, attends=False).eval()
    ids = np.arange(6).reshape(2, 3)
    graph = trace(module, Task.TEXT_CLASSIFICATION, for_cpu=True).graphs[0]
    ir.save(graph.model, tmp_path / "model.onnx")
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    (found,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(["logits"], feeds)
    with torch.inference_mode():
        expected = module(*map(torch.from_numpy, feeds.values()))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(
        SourceError, match="its attribute kernel is a function of first, second, width, height; the atte"
    ):
        trace(module, Task.TEXT_CLASSIFICATION, attention=True)


def test_a_classifier_with_helpers_of_such_names_shows_its_attention():
    helpers = {name: lambda *_: None for name in ("step", "read", "first_states", "encode_source")}
    module = type("Helped", (Attending,), helpers)(fused_attention)
    traced = trace(module.eval(), Task.TEXT_CLASSIFICATION, attention=True)
    assert [spec.shape for spec in traced.attention.outputs] == [("batch", 4, "length", "length")]


def test_a_kernel_that_computes_more_than_attention_is_refused_before_another_takes_its_place():
    def louder(query, key, value, mask=None):
        return scaled_dot_product_attention(query, key, value, mask, scale=2.0)

    with pytest.raises(SourceError, match="its kernel computes something else than scaled_dot_product_attention"):
        trace(Attending(louder).eval(), Task.TEXT_CLASSIFICATION, for_cpu=True)


def test_registers_are_left_out_of_the_weights_where_a_module_says_that_they_are_the_last_tokens():
    ids = torch.arange(6).reshape(2, 3)
    for name, size in (("num_registers", 3), ("num_trailing_registers", 2)):
        module = Attending(scaled_dot_product_attention)
        setattr(module, name, 1)
        (weights,) = StatelessAttentionGraph(module)(ids, torch.ones_like(ids)).values()
        assert weights.shape == (2, 4, size, size)


@pytest.mark.parametrize(("number", "reads"), [(2, True), (1, False), (nn.Embedding(2, 4), False), (None, False)])
def test_only_a_number_says_that_a_classifier_reads_types_of_tokens(number, reads):
    module = Attending(scaled_dot_product_attention)
    module.num_token_types = number
    source = ExportSource(
        name="mine",
        task=Task.TEXT_CLASSIFICATION,
        module=module,
        make_reference=lambda: module,
        description="",
        license="",
        architecture=Architecture(kind="Attending", parameter_count=1, configuration={}),
        limits=Limits(max_input_tokens=16),
        text_pairs="optional",
    )
    assert source.has_token_types is reads
