"""Files of ONNX as people bring them, and modules with named tensors: what is read, tried, proved and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny_tensors
import torch
from onnx import TensorProto, helper
from tiny_tensors import FLOAT, INT64, make, node, weight
from torch import nn
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.tensors import BOUND, tensor_error
from headway_server.bundles import Manifest, Precision, Task, open_bundle


def run(*arguments: object) -> tuple[int, str]:
    """Runs the command; returns its exit code and what it says, in one line."""
    ended = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, " ".join(ended.output.split())


def exported(folder: Path, model: onnx.ModelProto, *options: object) -> tuple[Manifest, str]:
    """Writes and exports a graph; returns its manifest and what the command says."""
    onnx.save(model, folder / "My Graph.onnx")
    code, said = run("onnx", folder / "My Graph.onnx", "--store", folder / "store", *options)
    assert code == 0, said
    return open_bundle(folder / "store" / "my-graph" / "1").manifest, said


def shapes(manifest: Manifest) -> dict[str, tuple[int | str, ...]]:
    graph = manifest.variants[Precision.FP32].graphs["model"]
    return {spec.name: spec.shape for spec in (*graph.inputs, *graph.outputs)}


def test_the_page_of_any_graph_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "any-graph.md").read_text(encoding="utf-8")
    [made] = [block for block in page.split("```") if block.startswith("python\n# make.py")]
    monkeypatch.chdir(tmp_path)
    exec(compile(made.removeprefix("python\n"), "make.py", "exec"), {})
    ended = CliRunner().invoke(app, ["onnx", "iris.onnx", "--store", "store"])
    assert ended.exit_code == 0, ended.output
    printed = [line for line in ended.output.splitlines() if line.startswith(("reads ", "writes "))]
    assert "\n".join(printed) in page
    assert (tmp_path / "store" / "iris" / "1" / "examples.npz").is_file()


AXES: dict[str, tuple[dict[str, tuple[int | str, ...]], str]] = {
    "tabular": (
        {"numbers": ("batch", 3), "category": ("batch",), "scores": ("batch", 3), "label": ("batch",)},
        "",
    ),
    "detector": ({"image": ("batch", 3, 8, 8), "boxes": ("batch", 4, 4), "anchors": (4, 4)}, ""),
    "series": ({"values": ("batch", "time"), "forecast": ("batch", "time")}, ""),
    "picky": ({"x": ("batch", "width"), "y": ("batch", "y_1")}, ""),
    "mixing": (
        {"x": ("rows", 3), "y": ("rows", 3)},
        "calls run one by one: a row in a batch differs from the row alone",
    ),
    "single": ({"x": (1, 4), "scale": (), "y": (1, 4)}, ""),
    "recurrent": (
        {"x": ("batch", 3), "state": (2, "batch", 3), "rate": (), "y": ("batch", 3), "next": (2, "batch", 3)},
        "",
    ),
    "recurrent_with_names": (
        {"x": ("batch", 3), "state": (2, "batch", 3), "rate": (), "y": ("batch", 3), "next": (2, "batch", 3)},
        "",
    ),
    "unnamed": ({"image": ("batch", 3, "image_2", "image_3"), "y": ("batch", 3)}, ""),
    "unsteady": ({"words": ("batch", 64), "y": ("batch", 64)}, ""),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_are_read_and_the_batch_is_found_by_its_rows(tmp_path: Path, name: str) -> None:
    expected, note = AXES[name]
    manifest, said = exported(tmp_path, tiny_tensors.GRAPHS[name]())
    variant = manifest.variants[Precision.FP32]
    assert manifest.task is Task.TENSORS
    assert shapes(manifest) == expected
    assert note in said
    assert ("note:" in said) == bool(note)
    assert variant.parity.max_relative_logit_error <= variant.parity.bound == 1e-4
    card = (tmp_path / "store" / "my-graph" / "1" / "README.md").read_text()
    if any("batch" in axes for axes in expected.values()):
        assert variant.batching.max_row_error <= variant.batching.bound
        assert variant.batching.row_counts == (2, 3, 8)
        assert "a row differed from the row alone by at most" in card
    else:
        assert variant.batching is None
        assert "Calls run one by one" in card


def test_numbers_near_zero_may_differ_by_the_roundings_of_one_and_no_more() -> None:
    exact = np.full((2, 8), 1e-7, np.float32)
    assert tensor_error(exact + np.float32(9e-7), exact) <= BOUND < tensor_error(exact + np.float32(1.1e-6), exact)
    assert tensor_error(1.0002 * exact.astype(np.float64), exact.astype(np.float64)) > BOUND
    large = np.full((2, 8), 0.5, np.float32)
    assert tensor_error(large * np.float32(1.0002), large) > BOUND


def test_a_batch_axis_that_inputs_name_differently_is_told_by_its_names(tmp_path: Path) -> None:
    nodes = [node("Transpose", "state", "rows", perm=[1, 0]), node("Add", "rows x", "y")]
    inputs = [("x", FLOAT, ["N", 3]), ("state", FLOAT, [3, "M"])]
    graph = make(nodes, inputs, [("y", FLOAT, ["N", 3])])
    manifest, _ = exported(tmp_path, graph, "--batch-axis", "N,M")
    assert shapes(manifest) == {"x": ("batch", 3), "state": (3, "batch"), "y": ("batch", 3)}
    code, said = run("onnx", tmp_path / "My Graph.onnx", "--store", tmp_path / "store", "--batch-axis", "N,K")
    assert (code, "--batch-axis K: no input of" in said) == (2, True)


def test_a_batch_axis_that_is_told_is_taken_anywhere_or_refused(tmp_path: Path) -> None:
    late = make([node("Tanh", "x", "y")], [("x", FLOAT, ["time", "N"])], [("y", FLOAT, ["time", "N"])])
    for told in ("N", "1"):
        manifest, _ = exported(tmp_path, late, "--batch-axis", told, "--replace")
        assert shapes(manifest) == {"x": ("time", "batch"), "y": ("time", "batch")}
    manifest, _ = exported(tmp_path, late, "--batch-axis", "none", "--replace", "--max-size", "N=40")
    assert shapes(manifest) == {"x": ("time", "N"), "y": ("time", "N")}
    assert manifest.limits.max_axis_sizes == {"N": 40}
    file = tiny_tensors.write(tmp_path, "mixing")
    code, said = run("onnx", file, "--store", tmp_path / "store", "--batch-axis", "N")
    assert code == 2
    assert "a row in a batch differs from the row alone" in said
    code, said = run("onnx", file, "--store", tmp_path / "store", "--batch-axis", "time")
    assert (code, "has such a dynamic axis; they have N" in said) == (2, True)


def test_what_is_served_is_what_the_file_computes_with_weights_beside_it_or_not(tmp_path: Path) -> None:
    tall = np.tile(weight(3, 2**10), 2**13 - 2**11)  # 72 MiB, which are kept beside the graph
    model = make(
        [node("MatMul", "x tall", "wide"), node("ReduceMax", "wide last", "y", keepdims=0)],
        [("x", FLOAT, ["N", 3])],
        [("y", FLOAT, ["N"])],
        {"tall": tall, "last": np.array([1])},
    )
    folder = tmp_path / "files"
    folder.mkdir()
    onnx.save(model, folder / "tall.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert {file.name for file in folder.iterdir()} == {"tall.onnx", "weights.bin"}
    code, said = run("onnx", folder / "tall.onnx", "--store", tmp_path / "store")
    assert code == 0, said
    (folder / "weights.bin").unlink()
    bundle = tmp_path / "store" / "tall" / "1"
    assert {file.name for file in (bundle / "fp32").iterdir()} == {"model.onnx", "model.onnx.data"}
    x = weight(2, 3, seed=5)
    [found] = onnxruntime.InferenceSession(bundle / "fp32" / "model.onnx").run(None, {"x": x})
    np.testing.assert_allclose(found, (x @ tall).max(axis=1), rtol=1e-5)


def test_examples_are_run_and_their_outputs_compared(tmp_path: Path) -> None:
    lookup = make(
        [node("Gather", "table place", "y")],
        [("place", INT64, ["N"])],
        [("y", FLOAT, ["N", 2])],
        {"table": weight(9, 2)},
    )
    place, table = np.array([7, 8, 3]), weight(9, 2)
    np.savez(tmp_path / "right.npz", place=place, y=table[place])
    np.savez(tmp_path / "wrong.npz", place=place, y=table[place] + 0.1)
    np.savez(tmp_path / "outside.npz", place=np.array([99]))
    np.savez(tmp_path / "other.npz", place=place, z=place)
    np.savez(tmp_path / "fraction.npz", place=np.array([0.5]))
    np.savez(tmp_path / "less.npz", y=place)
    manifest, _ = exported(tmp_path, lookup, "--examples", tmp_path / "right.npz")
    with np.load(tmp_path / "store" / "my-graph" / "1" / "examples.npz") as arrays:
        assert arrays["place"].tolist() == [7]
    assert shapes(manifest) == {"place": ("batch",), "y": ("batch", 2)}
    (tmp_path / "text.npz").write_text("x")
    for name, words in {
        "wrong": "output y [3, 2] at the examples' outputs: relative difference",
        "outside": "the graph does not run on it",
        "other": "has z; the graph reads place and writes y",
        "fraction": "place is float64; the graph reads int64",
        "less": "lacks place; the graph reads place",
        "text": "cannot be read as an .npz of arrays",
        "none": "cannot be read as an .npz of arrays",
    }.items():
        file = tmp_path / f"{name}.npz"
        code, said = run("onnx", tmp_path / "My Graph.onnx", "--store", tmp_path / "other", "--examples", file)
        assert code == 2, name
        assert words in said, name
    assert not list((tmp_path / "other").glob("*"))


TYPES = ("DOUBLE", "FLOAT", "FLOAT16", "INT64", "INT32", "INT16", "INT8", "UINT64", "UINT32", "UINT16", "UINT8", "BOOL")


@pytest.mark.parametrize("kind", [*TYPES, "STRING", "BFLOAT16"])
def test_every_type_of_tensors_is_declared_as_the_file_has_it(tmp_path: Path, kind: str) -> None:
    manifest, _ = exported(tmp_path, tiny_tensors.of_type(getattr(TensorProto, kind)))
    declared = {spec.dtype for spec in manifest.variants[Precision.FP32].graphs["model"].inputs}
    names = {"DOUBLE": "float64", "FLOAT": "float32", "BFLOAT16": "float32"}  # which holds all numbers of bfloat16
    assert declared == {names.get(kind, kind.lower())}


def zipped() -> onnx.ModelProto:
    model = make(
        [node("ZipMap", "x", "probabilities", domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        [("x", FLOAT, ["N", 2])],
        [],
        opsets={"ai.onnx.ml": 1},
    )
    pair = onnx.TypeProto()
    pair.sequence_type.elem_type.map_type.key_type = INT64
    model.graph.output.append(helper.make_value_info("probabilities", pair))
    return model


def optional() -> onnx.ModelProto:
    model = make([node("OptionalGetElement", "x", "y")], [], [("y", FLOAT, ["N"])])
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, ["N"]))
    model.graph.input.append(helper.make_value_info("x", kind))
    return model


def outside() -> onnx.ModelProto:
    model = make([node("Add", "x w", "y")], [("x", FLOAT, [2])], [("y", FLOAT, [2])], {"w": weight(2)})
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    return model


def beside(size: int | None) -> Callable[[], onnx.ModelProto]:
    def write() -> onnx.ModelProto:
        model = outside()
        entries = model.graph.initializer[0].external_data
        entries[0].value = "short.bin" if size is None else "cut.bin"
        entries.add(key="length", value="8")
        return model

    return write


REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "custom operator": (
        lambda: make(
            [node("Shiny", "x", "y", domain="my.own")], [("x", FLOAT, [1])], [("y", FLOAT, [1])], opsets={"my.own": 1}
        ),
        "needs the operator my.own:Shiny, which this ONNX Runtime does not have",
    ),
    "opset": (
        lambda: make([node("Relu", "x", "y")], [("x", FLOAT, [1])], [("y", FLOAT, [1])], opsets={"": 99}),
        "is of opset 99 of ai.onnx, and this ONNX Runtime knows those up to",
    ),
    "sequence of maps": (zipped, "its output probabilities is a sequence, not a tensor; convert it with options="),
    "optional": (optional, "its input x is an optional, not a tensor; tensors alone are served"),
    "float8": (
        lambda: tiny_tensors.of_type(TensorProto.FLOAT8E4M3FN),
        "its input x is of type tensor(float8e4m3fn), which cannot be served",
    ),
    "no inputs": (
        lambda: make([node("Identity", "w", "y")], [], [("y", FLOAT, [2])], {"w": weight(2)}),
        "has no inputs",
    ),
    "wrong graph": (
        lambda: make([node("MatMul", "x w", "y")], [("x", FLOAT, [1, 3])], [("y", FLOAT, [1, 2])], {"w": weight(2, 2)}),
        "ONNX Runtime cannot load it",
    ),
    "no input fits": (
        lambda: make(
            [node("Reshape", "x shape", "y")],
            [("x", FLOAT, [None, None])],
            [("y", FLOAT, [7, 11])],
            {"shape": np.array([7, 11])},
        ),
        "does not run on drawn inputs",
    ),
    "weights outside": (outside, "the weight w is in ../secret.bin, outside of its folder"),
    "weights missing": (beside(None), "the weight w is in short.bin, which is not beside it"),
    "weights cut off": (beside(4), "cut.bin beside it has 4 bytes, and w needs 8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path: Path, what: str) -> None:
    write, words = REFUSED[what]
    (tmp_path / "cut.bin").write_bytes(b"four")
    file = tmp_path / "graph.onnx"
    file.write_bytes(write().SerializeToString())
    code, said = run("onnx", file, "--store", tmp_path / "store")
    assert code == 2
    assert words in said
    assert "Traceback" not in said
    assert "onnxruntime_src" not in said
    assert len(said) < 600


def test_files_that_are_none_are_refused_in_a_sentence(tmp_path: Path) -> None:
    whole = tiny_tensors.tabular().SerializeToString()
    with (tmp_path / "huge.onnx").open("wb") as huge:
        huge.truncate(2**31)  # without blocks
    for name, data in {"text": b"hello, this is no graph", "cut": whole[: len(whole) // 2], "empty": b""}.items():
        (tmp_path / f"{name}.onnx").write_bytes(data)
    for name, words in {
        "text": "is not an ONNX file, or is cut off",
        "cut": "is not an ONNX file, or is cut off",
        "empty": "is not an ONNX file, or is cut off: it has no graph",
        "huge": "has 2147483648 bytes, the limit of an ONNX file is 2147483647",
        "missing": "is no file",
    }.items():
        code, said = run("onnx", tmp_path / f"{name}.onnx", "--store", tmp_path / "store")
        assert (code, words in said) == (2, True), said
    for option, words in {
        "--max-size=time": "give it as AXIS=SIZE",
        "--max-size=other=5": "the inputs have no such dynamic axis; they have time",
        "--max-size=time=3": "the example has size",
        "--name=A b": "name",
    }.items():
        file = tiny_tensors.write(tmp_path, "series")
        code, said = run("onnx", file, "--store", tmp_path / "store", option)
        assert code == (0 if option == "--max-size=time=3" else 2), said
        assert code == 0 or words in said


class Wrong(nn.Module):
    """Returns what has no names."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]


class Mean(nn.Module):
    """Its rows depend on each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=0, keepdim=True)


def wrong() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Wrong(), {"x": torch.ones(2)}


def mean() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Mean(), {"x": torch.arange(6.0).reshape(2, 3)}


def bare() -> nn.Module:
    return Mean()


def test_a_module_is_traced_and_proved_by_its_names(tmp_path: Path) -> None:
    store = tmp_path / "store"
    code, said = run("tensors", "--model", "tiny_tensors:build", "--store", store, "--name", "mixer")
    assert code == 0, said
    bundle = open_bundle(store / "mixer" / "1")
    assert shapes(bundle.manifest) == {
        "words": ("batch", "length"),
        "weights": ("batch", "length"),
        "bias": (4,),
        "scores": ("batch", 2),
        "vectors": ("batch", "length", 4),
    }
    module, example = tiny_tensors.build()
    inputs = {name: tensor.numpy() for name, tensor in example.items()} | {"bias": weight(4)}
    found = onnxruntime.InferenceSession(bundle.path / "fp32" / "model.onnx").run(["scores"], inputs)
    expected = module(**{name: torch.from_numpy(array) for name, array in inputs.items()})["scores"]
    np.testing.assert_allclose(found[0], expected.detach().numpy(), rtol=1e-5)
    figures = json.loads((bundle.path / "bundle.json").read_text())["variants"]["fp32"]
    assert figures["batching"]["max_row_error"] <= 1e-4
    assert "## Parity with PyTorch" in (bundle.path / "README.md").read_text()
    for factory, words in {
        "wrong": "Wrong returned list; it must return a tensor, or a mapping of names to tensors",
        "bare": "returned Mean; it must return a torch.nn.Module and its example inputs",
        "none": "has no function 'none'",
    }.items():
        code, said = run("tensors", "--model", f"{__name__}:{factory}", "--store", store, "--name", "other")
        assert (code, words in said) == (2, True), said
    code, said = run("tensors", "--model", f"{__name__}:mean", "--store", store, "--name", "mean")
    assert (code, "calls run one by one" in said) == (0, True), said
