"""Activations with one scale for all rows: two passes a product, clipped beyond what was seen, alike in any company."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from headway_export.activations import noise_growth
from headway_export.errors import ParityError
from headway_export.exporter import ExportOptions, export
from headway_export.rewriting import QuantizeProducts, rewrite, row_maxima_of
from headway_export.source import from_checkpoint
from headway_export.tasks.task import Metric
from headway_export.tasks.text import TextClassification
from headway_export.tracing import trace
from headway_server.bundles import Precision, Task
from headway_server.runtime import Runtime, sum_exactly

WIDTH = 3 * 8 * 8


class Activated(nn.Module):
    """Two products of what an activation function makes of the pixels; one has a bias."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.first = nn.Linear(WIDTH, 64)
        self.second = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, pixel_values):
        activated = self.activation(pixel_values.flatten(1))
        return self.first(activated) + self.second(activated)


def session_of(model):
    options = onnxruntime.SessionOptions()
    sum_exactly(options)
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)


def answers(model, pixels):
    return session_of(model).run(None, {"pixel_values": pixels})[0]


@pytest.fixture(scope="module", params=[nn.Identity(), nn.ReLU(), nn.GELU()], ids=["none", "relu", "gelu"])
def traced(request):
    """A module and its graph in fp32."""
    torch.manual_seed(2)
    module = Activated(request.param).eval()
    return module, trace(module, Task.IMAGE_CLASSIFICATION, image_size=(8, 8)).graphs[0].model


def quantized(model, ranges=None):
    model = model.clone()
    rewrite(model, QuantizeProducts(ranges=ranges or {}))
    return model


def with_fixed_scales(model, largest):
    return quantized(model, dict.fromkeys(row_maxima_of(quantized(model).graph), largest))


def pixels_of(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 3, 8, 8)).astype(np.float32)


def test_a_product_is_one_operator_and_its_quantization_another(traced):
    module, model = traced
    operators = Counter(node.op_type for node in with_fixed_scales(model, 4.0).graph)
    assert (operators["QuantizeLinear"], operators["MatMulIntegerToFloat"]) == (1, 2)
    assert not {"MatMulInteger", "ReduceMax", "Cast", "Mul", "Relu"} & set(operators)
    assert operators["Add"] == 1  # of the two products; the bias is within its product
    assert operators["Gelu"] == isinstance(module.activation, nn.GELU)


def test_answers_are_as_near_as_the_reach_allows(traced):
    module, model = traced
    pixels, reach = pixels_of(16), 5.0
    with torch.inference_mode():
        expected = module(torch.from_numpy(pixels)).numpy()
    levels = {nn.Identity: 127, nn.ReLU: 255, nn.GELU: 215}[type(module.activation)]
    weights = [module.first.weight.detach().numpy(), module.second.weight.detach().numpy()]
    of_activation = 0.501 * reach / levels * sum(np.abs(weight).sum(axis=1) for weight in weights)
    values = np.abs(pixels.reshape(16, -1)).sum(axis=1, keepdims=True)
    of_weights = values * sum(0.501 * np.abs(weight).max(axis=1) / 127 for weight in weights)
    assert (np.abs(answers(with_fixed_scales(model, reach), pixels) - expected) <= of_activation + of_weights).all()


def test_what_lies_beyond_the_reach_is_clipped(traced):
    module, model = traced
    pixels = pixels_of(4)
    with torch.inference_mode():
        clipped = module.activation(torch.from_numpy(pixels).flatten(1)).clip(-1, 1)
        expected = (module.first(clipped) + module.second(clipped)).numpy()
    np.testing.assert_allclose(answers(with_fixed_scales(model, 1.0), pixels), expected, atol=0.05)


def test_an_answer_does_not_depend_on_its_neighbours(traced):
    _, model = traced
    session = session_of(with_fixed_scales(model, 4.0))
    pixels = pixels_of(9)
    together = session.run(None, {"pixel_values": pixels})[0]
    for row in range(9):
        np.testing.assert_array_equal(session.run(None, {"pixel_values": pixels[row : row + 1]})[0][0], together[row])


def test_an_activation_of_which_nothing_is_known_keeps_a_scale_a_row(traced):
    _, model = traced
    unknown = quantized(model, {"another": 1.0})
    np.testing.assert_array_equal(answers(unknown, pixels_of(3)), answers(quantized(model), pixels_of(3)))


def test_an_activation_that_was_zero_wherever_it_was_read_keeps_a_scale_a_row(traced):
    _, model = traced
    found = answers(with_fixed_scales(model, 0.0), pixels_of(3))
    np.testing.assert_array_equal(found, answers(quantized(model), pixels_of(3)))


def test_a_copy_of_a_graph_still_tells_its_maxima(traced):
    _, model = traced
    maxima = row_maxima_of(quantized(model).graph)
    copied = row_maxima_of(quantized(model).clone().graph)
    assert len(maxima) == 1
    assert {name: value.name for name, value in copied.items()} == {name: one.name for name, one in maxima.items()}


def test_noise_grows_with_the_square_of_how_far_rows_differ():
    assert noise_growth(np.full(7, 3, np.float32)) == 1
    assert noise_growth(np.array([4, 1, 0], np.float32)) == pytest.approx((1 + 16) / 2)
    assert noise_growth(np.zeros(3, np.float32)) == 1


@pytest.mark.parametrize("task", ["generation", "translation", "text_classification", "image_classification"])
def test_a_variant_with_fixed_scales_is_proved_and_served_first(tiny_checkpoints, tmp_path, task):
    precisions = (Precision.INT8, Precision.INT8_STATIC)
    source = from_checkpoint(tiny_checkpoints[task])
    manifest = export(source, ExportOptions(store=tmp_path, precisions=precisions)).manifest
    chosen, variant = Runtime(device="cpu").choose_variant(manifest, None)
    assert chosen is Precision.INT8_STATIC
    assert variant.quality is not None
    assert variant.quality.metric == manifest.variants[Precision.INT8].quality.metric
    for graph in variant.graphs.values():
        operators = {node.op_type for node in ir.load(tmp_path / source.name / "1" / graph.file).graph}
        assert "MatMulIntegerToFloat" in operators


def test_no_variant_is_written_where_the_proof_allows_no_fixed_scales(tiny_checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(TextClassification, "metrics", (Metric(name="accuracy", allowed_loss=-101.0),))
    options = ExportOptions(store=tmp_path, precisions=(Precision.INT8_STATIC,))
    with pytest.raises(ParityError, match="int8-static: accuracy"):
        export(from_checkpoint(tiny_checkpoints["text_classification"]), options)
    assert not list(tmp_path.glob("*/*/bundle.json"))
