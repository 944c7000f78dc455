"""Modules and graphs that read their weights from the file these were saved to."""

import mmap
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx_ir.tape import Tape
from safetensors.torch import save_file
from torch import nn

from headway_export import weights
from headway_export.weights import CheckpointFiles, WrittenWeights, save
from headway_server.bundles import Bundle, Graph, TensorSpec
from headway_server.runtime import Runtime


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 3))


@pytest.fixture
def model(module: nn.Module) -> ir.Model:
    """Its weights, one of them transposed as a product takes it, and a constant of the graph's own."""
    first, bias, second, small = (parameter.detach().numpy() for parameter in module.parameters())
    held = {"first": first.T, "bias": bias, "second": second, "small": small, "table": first, "own": np.arange(99)}
    values = [
        ir.Value(name=name, const_value=ir.tensor(array, name=name), shape=ir.Shape(array.shape))
        for name, array in held.items()
    ]
    return ir.Model(ir.Graph([], [], nodes=[], initializers=values, name="g"), ir_version=10)


def _arrays(model: ir.Model) -> dict[str, NDArray]:
    return {str(name): value.const_value.numpy() for name, value in model.graph.initializers.items()}


def _lies_in_file(address: int) -> bool:
    ranges = (line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if ".onnx.data" in line)
    return any(int(start, 16) <= address < int(end, 16) for start, _, end in (part.partition("-") for part in ranges))


def test_weights_are_the_same_and_lie_in_the_file(module, model, tmp_path):
    parameters = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    arrays = {name: array.copy() for name, array in _arrays(model).items()}
    save(model, tmp_path / "model.onnx", threshold_bytes=1)
    written = WrittenWeights()
    written.read_from({tmp_path / "model.onnx": model}, module, [model])
    written.give_back()
    assert all(torch.equal(tensor, parameters[name]) for name, tensor in module.state_dict().items())
    assert all(np.array_equal(array, arrays[name]) for name, array in _arrays(model).items())
    in_file = {name: _lies_in_file(tensor.data_ptr()) for name, tensor in module.state_dict().items()}
    assert in_file == {"0.weight": True, "0.bias": True, "1.weight": True, "1.bias": False}, (
        "3 numbers are in the graph"
    )
    in_file = {name: _lies_in_file(array.ctypes.data) for name, array in _arrays(model).items()}
    assert in_file == {"first": True, "bias": True, "second": True, "table": True, "own": True, "small": False}


def test_weights_that_were_written_wrongly_are_not_read(module, model, tmp_path, monkeypatch):
    """Or a module would be held against its own mistake."""
    real = weights.ir.save

    def save_wrongly(model: ir.Model, path: Path, **options: object) -> None:
        real(model, path, **options)
        beside = path.with_name("model.onnx.data")
        beside.write_bytes(bytes(beside.stat().st_size))

    monkeypatch.setattr(weights.ir, "save", save_wrongly)
    before = [parameter.clone() for parameter in module.parameters()]
    save(model, tmp_path / "model.onnx", threshold_bytes=1)
    WrittenWeights().read_from({tmp_path / "model.onnx": model}, module, [model])
    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))


def test_small_weights_stay_in_the_graph_and_in_memory(module, model, tmp_path):
    before = [parameter.data_ptr() for parameter in module.parameters()]
    save(model, tmp_path / "model.onnx", threshold_bytes=1 << 20)
    WrittenWeights().read_from({tmp_path / "model.onnx": model}, module, [model])
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert [parameter.data_ptr() for parameter in module.parameters()] == before


def test_weights_are_read_from_a_checkpoint_and_not_written(tmp_path):
    """As they lie there or transposed; what is not there in fp32 is written."""
    torch.manual_seed(0)
    module = nn.ModuleDict({name: nn.Linear(64, 80) for name in ("same", "turned", "narrow", "changed")})
    stored = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    stored["narrow.weight"] = stored["narrow.weight"].half()
    stored["changed.weight"] += 1
    save_file(stored, tmp_path / "model.safetensors")
    written, checkpoint = WrittenWeights(), CheckpointFiles([tmp_path / "model.safetensors"])
    written.begin_with(checkpoint, module)
    assert _names_in(tmp_path / "model.safetensors", module) == {
        f"{name}.bias" for name in ("same", "turned", "narrow", "changed")
    } | {"same.weight", "turned.weight"}

    given = ir.val("given", ir.DataType.FLOAT, (2, 64))
    tape, weight_of = Tape(), {name: module[name].weight.detach().numpy() for name in module}
    held = [ir.tensor(weight.T, name=name) for name, weight in weight_of.items()]
    held[0] = ir.tensor(weight_of["same"], name="same")
    float32 = ir.TensorType(ir.DataType.FLOAT)
    values = [ir.Value(name=one.name, const_value=one, shape=one.shape, type=float32) for one in held]
    turned = tape.op("Transpose", [values[0]], {"perm": [1, 0]})
    outputs = [tape.op("MatMul", [given, value]) for value in (turned, *values[1:])]
    output = tape.op("Sum", outputs)
    output.name, output.type = "output", float32
    graph = ir.Graph([given], [output], nodes=tape.nodes, initializers=values, name="g", opset_imports={"": 21})
    model, path = ir.Model(graph, ir_version=10), tmp_path / "fp32" / "model.onnx"
    path.parent.mkdir()
    save(model, path, threshold_bytes=1, checkpoint=checkpoint)
    assert path.with_name("model.onnx.data").stat().st_size == 2 * 64 * 80 * 4 + _rest_of_page(64 * 80 * 4)
    written.read_from({path: model}, module, [model])
    assert set(model.graph.initializers) == set(module), "the graph in memory stays as it was traced"
    assert _names_in(tmp_path / "fp32" / "model.onnx.data", module) == {"narrow.weight", "changed.weight"}

    shape = TensorSpec.model_validate({"name": "given", "dtype": "float32", "shape": (2, 64)})
    result = shape.model_copy(update={"name": "output", "shape": ("rows", 80)})
    opened = Runtime(device="cpu", map_weights=True, lay_out_weights=False).open(
        Bundle(path=tmp_path, manifest=None), Graph(file="fp32/model.onnx", inputs=(shape,), outputs=(result,))
    )
    rows = np.random.default_rng(0).standard_normal((2, 64), np.float32)
    expected = sum(rows @ module[name].weight.detach().numpy().T for name in module)
    np.testing.assert_allclose(opened.run({"given": rows})["output"], expected, rtol=1e-4, atol=1e-4)


def _rest_of_page(num_bytes: int) -> int:
    return -num_bytes % mmap.PAGESIZE


def _names_in(file: Path, module: nn.Module) -> set[str]:
    """Returns the parameters that are read from a file."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file)))
    ranges = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in lines]
    return {
        name
        for name, tensor in module.state_dict().items()
        if any(start <= tensor.data_ptr() < end for start, end in ranges)
    }


def _files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_a_graph_reads_weights_of_another_where_these_were_written(model, tmp_path):
    """Whatever their names and shapes are there."""
    arrays = {name: array.copy() for name, array in _arrays(model).items()}
    save(model, tmp_path / "model.onnx", threshold_bytes=0)
    renamed = {"flat": arrays["first"].ravel(), "same": arrays["second"], "more": np.arange(999.0)}
    values = [
        ir.Value(name=name, const_value=ir.tensor(array, name=name), shape=ir.Shape(array.shape))
        for name, array in renamed.items()
    ]
    other = ir.Model(ir.Graph([], [], nodes=[], initializers=values, name="g"), ir_version=10)
    save(other, tmp_path / "attention.onnx", threshold_bytes=1 << 20, written=[tmp_path / "model.onnx"])
    files = _files(tmp_path)
    assert set(files) == {"model.onnx", "model.onnx.data", "attention.onnx"}
    assert files["attention.onnx"] - renamed["more"].nbytes < 500
    loaded = ir.load(tmp_path / "attention.onnx")
    assert {name: array.tolist() for name, array in _arrays(loaded).items()} == {
        name: array.tolist() for name, array in renamed.items()
    }


def test_large_weights_that_other_graphs_do_not_have_get_a_file_of_their_own(module, model, tmp_path):
    save(model, tmp_path / "model.onnx", threshold_bytes=0)
    other = model.clone()
    other.graph.initializers["own"].const_value = ir.tensor(np.arange(500), name="own")
    save(other, tmp_path / "attention.onnx", threshold_bytes=0, written=[tmp_path / "model.onnx"])
    assert _files(tmp_path)["attention.onnx.data"] == 500 * 8
    held = {name: array.copy() for name, array in _arrays(other).items()}
    both = {tmp_path / "model.onnx": model, tmp_path / "attention.onnx": other}
    WrittenWeights().read_from(both, module, [model, other])
    assert all(np.array_equal(array, held[name]) for name, array in _arrays(other).items())
