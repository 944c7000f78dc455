"""The int8 variant: close, small, and independent of neighbours."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headway_export.rewriting import QuantizeProducts, StoreFilters, quantize_matrix, rewrite
from headway_export.tracing import trace
from headway_server.bundles import Task
from headway_server.runtime import sum_exactly


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40), st.floats(1e-6, 1e6))
def test_a_quantized_matrix_is_within_half_a_step(seed, rows, columns, magnitude):
    matrix = (np.random.default_rng(seed).normal(size=(rows, columns)) * magnitude).astype(np.float32)
    values, scale = quantize_matrix(matrix, axis=0)
    assert values.dtype == np.int8
    assert (np.abs(values * scale - matrix) <= scale * 0.5001).all()


def test_a_matrix_of_zeros_stays_zero():
    values, scale = quantize_matrix(np.zeros((4, 3), np.float32), axis=1)
    assert not values.any()
    assert np.isfinite(scale).all()


class Tied(nn.Module):
    """A classifier whose projection is its embedding table, with every kind of product that is quantized."""

    max_length = 16

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(300, 64)
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 64, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.table(input_ids) * attention_mask.unsqueeze(-1)
        hidden = self.second(torch.relu(self.first(hidden)))
        pooled = self.first(hidden[:, 0])  # two dimensions: a Gemm
        return self.second(pooled) @ self.table.weight.T


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    torch.manual_seed(0)
    model = trace(Tied().eval(), Task.TEXT_CLASSIFICATION).graphs[0].model
    ir.save(model, folder / "fp32.onnx")
    rewrite(model, QuantizeProducts())
    ir.save(model, folder / "int8.onnx")
    return folder, {name: _open(folder / f"{name}.onnx") for name in ("fp32", "int8")}


def _open(file):
    options = onnxruntime.SessionOptions()
    sum_exactly(options)
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options)


def _feeds(rows, length=9):
    ids = np.random.default_rng(4).integers(0, 300, (rows, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_every_product_and_look_up_is_rewritten(sessions):
    folder, _ = sessions
    graph = ir.load(folder / "int8.onnx").graph
    operators = Counter(node.op_type for node in graph)
    look_ups = [node for node in graph if node.op_type == "Gather" and node.inputs[0].dtype == ir.DataType.INT8]
    assert (operators["MatMulInteger"], len(look_ups)) == (5, 1)
    assert not {"MatMul", "Gemm"} & set(operators)


def test_an_activation_that_several_products_read_is_quantized_once(sessions):
    folder, _ = sessions
    operators = Counter(node.op_type for node in ir.load(folder / "int8.onnx").graph)
    assert operators["QuantizeLinear"] == operators["Div"] == operators["ReduceMax"] == 5


def test_answers_are_close_to_fp32(sessions):
    _, opened = sessions
    expected, found = (opened[name].run(None, _feeds(8))[0] for name in ("fp32", "int8"))
    assert np.abs(found - expected).mean() / np.abs(expected).mean() < 0.05


def test_an_answer_does_not_depend_on_its_neighbours(sessions):
    _, opened = sessions
    feeds = _feeds(8)
    together = opened["int8"].run(None, feeds)[0]
    for row in range(8):
        alone = opened["int8"].run(None, {name: array[row : row + 1] for name, array in feeds.items()})[0]
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_graph_of_many_rows_has_fewer_passes_and_the_same_bits(sessions):
    folder, opened = sessions
    model = ir.load(folder / "fp32.onnx")
    rewrite(model, QuantizeProducts(many_rows=True))
    ir.save(model, folder / "many.onnx")
    operators = Counter(node.op_type for node in model.graph)
    assert (operators["MatMulIntegerToFloat"], operators["MatMulInteger"]) == (5, 0)
    found, expected = (session.run(None, _feeds(8))[0] for session in (_open(folder / "many.onnx"), opened["int8"]))
    np.testing.assert_array_equal(found, expected)


def test_a_tied_table_is_stored_once_and_the_file_is_a_quarter(sessions):
    folder, _ = sessions
    weights = ir.load(folder / "int8.onnx").graph.initializers.values()
    shapes = [tuple(weight.shape) for weight in weights if weight.dtype == ir.DataType.INT8]
    assert shapes.count((300, 64)) == 1
    assert (64, 300) not in shapes
    assert (folder / "int8.onnx").stat().st_size < 0.4 * (folder / "fp32.onnx").stat().st_size


class Activated(nn.Module):
    """One product, of what an activation function makes of the pixels; its weights are whole steps of int8."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.output = nn.Linear(3 * 8 * 8, 64)
        with torch.no_grad():
            self.output.weight.copy_(torch.randint(-127, 128, (64, 192), generator=torch.Generator().manual_seed(1)))
            self.output.weight[:, 0] = 127

    def forward(self, pixel_values):
        return self.output(self.activation(pixel_values.flatten(1)))


@pytest.fixture(scope="module", params=[nn.Identity(), nn.ReLU(), nn.GELU()], ids=["none", "relu", "gelu"])
def activated(request, tmp_path_factory):
    """A module, and a session of its int8 variant."""
    module = Activated(request.param).eval()
    model = trace(module, Task.IMAGE_CLASSIFICATION, image_size=(8, 8)).graphs[0].model
    rewrite(model, QuantizeProducts())
    assert "MatMulInteger" in {node.op_type for node in model.graph}
    file = tmp_path_factory.mktemp("activated") / "int8.onnx"
    ir.save(model, file)
    options = onnxruntime.SessionOptions()
    sum_exactly(options)
    options.intra_op_num_threads = 1
    return module, onnxruntime.InferenceSession(file, options)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 50.0])
def test_an_activation_is_within_half_a_step_of_its_row(activated, magnitude):
    module, session = activated
    pixels = np.random.default_rng(0).normal(size=(16, 3, 8, 8)).astype(np.float32) * np.float32(magnitude)
    with torch.inference_mode():
        values = module.activation(torch.from_numpy(pixels).flatten(1)).numpy()  # (16, 192)
        expected = module(torch.from_numpy(pixels)).numpy()
    step = {
        nn.Identity: np.abs(values).max(axis=1) / 127,
        nn.ReLU: values.max(axis=1) / 255,
        nn.GELU: np.maximum(values.max(axis=1), 0.9375) / 215,
    }[type(module.activation)]
    bound = 0.501 * step[:, np.newaxis] * np.abs(module.output.weight.detach().numpy()).sum(axis=1)
    assert (np.abs(session.run(None, {"pixel_values": pixels})[0] - expected) <= bound).all()


def test_a_row_of_zeros_gives_the_bias(activated):
    module, session = activated
    found = session.run(None, {"pixel_values": np.zeros((3, 3, 8, 8), np.float32)})[0]
    np.testing.assert_array_equal(found, np.tile(module.output.bias.detach().numpy(), (3, 1)))


class Filters(nn.Module):
    """Convolutions of every kind whose filters are large enough to be stored in int8, and one whose are not."""

    def __init__(self):
        super().__init__()
        self.small = nn.Conv2d(3, 4, 1)
        self.whole = nn.Conv2d(4, 64, 5, padding=2)
        self.grouped = nn.Conv2d(64, 64, 3, padding=1, groups=2)
        self.upward = nn.ConvTranspose2d(64, 32, 4, stride=2)

    def forward(self, pixel_values):
        hidden = self.whole(self.small(pixel_values)).relu()
        return self.upward(self.grouped(hidden) + self.grouped(hidden.flip(-1)))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_filters_are_stored_in_a_quarter_and_multiplied_out_at_load(tmp_path):
    torch.manual_seed(0)
    module = Filters().eval()
    pixels = torch.randn(2, 3, 12, 12)
    program = torch.onnx.export(module, (pixels,), dynamo=True, verbose=False)
    model = program.model
    ir.save(model, tmp_path / "fp32.onnx")
    rewrite(model, StoreFilters())
    ir.save(model, tmp_path / "int8.onnx")
    weights = model.graph.initializers.values()
    assert sum(value.dtype == ir.DataType.INT8 for value in weights) == 3
    assert (tmp_path / "int8.onnx").stat().st_size < 0.3 * (tmp_path / "fp32.onnx").stat().st_size

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "int8.onnx", options)
    assert not {"Cast", "Mul"} & {node.op_type for node in ir.load(tmp_path / "loaded.onnx").graph}
    (answer,) = session.run(None, {session.get_inputs()[0].name: pixels.numpy()})
    with torch.inference_mode():
        expected = module(pixels).numpy()
    assert np.sqrt(((answer - expected) ** 2).mean()) < 0.01 * expected.std()


def test_a_weight_that_products_share_transposed_loads_on_any_processor(tmp_path):
    text = """<ir_version: 10, opset_import: ["": 21]> shared (float[rows, 64] x) => (float[rows, 64] y) {
        columns = Transpose <perm = [1, 0]> (weight)
        first = MatMul (x, columns)
        second = Tanh (first)
        y = MatMul (second, columns)
    }"""
    model = ir.from_onnx_text(text)
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.register_initializer(ir.Value(name="weight", const_value=ir.tensor(weight, name="weight")))
    for node in model.graph:
        for place, value in enumerate(node.inputs):
            if value is not None and value.name == "weight":
                node.replace_input_with(place, model.graph.initializers["weight"])
    rewrite(model, QuantizeProducts())
    ir.save(model, tmp_path / "int8.onnx")
    x, answers = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32), []
    for setting in ("0", "1"):  # "1" takes weights in uint8, which ONNX Runtime cannot do of one that is shared
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.x64quantprecision", setting)
        answers.append(onnxruntime.InferenceSession(tmp_path / "int8.onnx", options).run(None, {"x": x})[0])
    np.testing.assert_array_equal(*answers)
