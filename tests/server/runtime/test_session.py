"""The device, the variant that runs on it, what a graph must be, and how often its weights are held."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from headway_server.bundles import Bundle, Graph, Precision, Task, TensorSpec, Variant, open_bundle
from headway_server.errors import BundleError, RuntimeUnavailableError
from headway_server.runtime import Runtime


@pytest.fixture
def bundle(classifier_store: Path) -> Bundle:
    return open_bundle(min(classifier_store.glob("*/*")))


def _decoder(bundle: Bundle, *precisions: Precision) -> Bundle:
    """The bundle as if it were a decoder with these variants; nothing runs it."""
    variant = next(iter(bundle.manifest.variants.values()))
    decoder = Variant.model_construct(**{**dict(variant), "graphs": {"decoder": variant.graphs["model"]}})
    manifest = bundle.manifest.model_copy(
        update={"task": Task.GENERATION, "variants": dict.fromkeys(precisions, decoder)}
    )
    return Bundle(path=bundle.path, manifest=manifest)


def _on_cuda(*, found: bool) -> Runtime:
    """A runtime that believes in CUDA: what it decides can be tested where there is none."""
    runtime = Runtime(device="cpu")
    runtime.device = "cuda"
    runtime._was_found = found
    return runtime


def test_cuda_that_is_not_there_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeUnavailableError, match=r"--device cuda: .*start with --device cpu"):
        Runtime(device="cuda")


def test_the_fastest_variant_of_the_device_is_chosen(bundle):
    every = _decoder(bundle, *Precision).manifest
    assert Runtime(device="cpu").choose_variant(every, None)[0] in (Precision.INT8_STATIC, Precision.FP32)
    assert _on_cuda(found=False).choose_variant(every, None)[0] is Precision.FP16


@pytest.mark.parametrize("lays_out", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_products_of_int8_are_exact_on_any_processor(bundle, tmp_path, transposed, lays_out):
    """Of large values, whose pairs overflow 16 bits on processors without VNNI."""
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (2, 64, 48)).astype(np.int8)
    rows = rng.integers(0, 256, (5, 64)).astype(np.uint8)
    nodes, stored = [], []
    for index, matrix in enumerate(weights):
        name = f"stored{index}" if transposed else f"weights{index}"
        matrix = np.ascontiguousarray(matrix.T) if transposed else matrix  # noqa: PLW2901
        stored.append(helper.make_tensor(name, TensorProto.INT8, matrix.shape, matrix.tobytes(), raw=True))
        if transposed:
            nodes.append(helper.make_node("Transpose", [name], [f"weights{index}"], perm=[1, 0]))
    nodes.append(helper.make_node("MatMulInteger", ["x", "weights0", "zero"], ["y"]))
    inputs = ["x", "weights1", "one", "one", "zero"]
    nodes.append(helper.make_node("MatMulIntegerToFloat", inputs, ["z"], domain="com.microsoft"))
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["rows", 64])],
        [
            helper.make_tensor_value_info("y", TensorProto.INT32, ["rows", 48]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, ["rows", 48]),
        ],
        [
            *stored,
            helper.make_tensor("zero", TensorProto.UINT8, [], [128]),
            helper.make_tensor("one", TensorProto.FLOAT, [], [1.0]),
        ],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    file = tmp_path / "int8" / "model.onnx"
    file.parent.mkdir()
    file.write_bytes(model.SerializeToString())
    declared = Graph(
        file="int8/model.onnx",
        inputs=(TensorSpec(name="x", dtype="uint8", shape=("rows", 64)),),
        outputs=(
            TensorSpec(name="y", dtype="int32", shape=("rows", 48)),
            TensorSpec(name="z", dtype="float32", shape=("rows", 48)),
        ),
    )
    runtime = Runtime(device="cpu", num_threads=1, lay_out_weights=lays_out)
    found = runtime.open(Bundle(path=tmp_path, manifest=bundle.manifest), declared).run({"x": rows})
    expected = (rows.astype(np.int64) - 128) @ weights.astype(np.int64)
    np.testing.assert_array_equal(found["y"], expected[0])
    np.testing.assert_array_equal(found["z"], expected[1])


def test_a_precision_that_the_bundle_lacks_is_an_error_that_names_what_it_has(bundle):
    manifest = _decoder(bundle, Precision.FP32, Precision.INT8).manifest
    with pytest.raises(RuntimeUnavailableError, match=r"has no fp16 variant \(it has fp32, int8\)"):
        Runtime(device="cpu").choose_variant(manifest, Precision.FP16)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_decoder_on_cuda_that_was_asked_for_must_be_fp16(bundle, precision):
    manifest = _decoder(bundle, precision).manifest
    with pytest.raises(RuntimeUnavailableError, match=r"export it .*with --precision fp16, or start .*--device cpu"):
        _on_cuda(found=False).choose_variant(manifest, precision)
    assert _on_cuda(found=False).suiting(manifest, None).device == "cuda"


def test_where_cuda_was_only_found_a_decoder_without_fp16_runs_on_the_cpu(bundle):
    runtime, manifest = _on_cuda(found=True), _decoder(bundle, Precision.INT8).manifest
    assert runtime.suiting(manifest, None).device == "cpu"
    assert runtime.suiting(manifest, None) is runtime.suiting(manifest, None), "bundles share its cores"
    assert _on_cuda(found=True).suiting(_decoder(bundle, Precision.FP16).manifest, None).device == "cuda"


def test_a_graph_with_other_tensors_than_declared_is_refused(bundle):
    variant = next(iter(bundle.manifest.variants.values()))
    graph = variant.graphs["model"]
    first, *others = graph.outputs
    renamed = graph.model_copy(update={"outputs": (first.model_copy(update={"name": "other"}), *others)})
    with pytest.raises(BundleError, match=r"has tensors .* the manifest declares \[.*'other'.*\]"):
        Runtime(device="cpu").open(bundle, renamed)
    retyped = graph.model_copy(update={"outputs": (first.model_copy(update={"dtype": "int32"}), *others)})
    with pytest.raises(BundleError, match="the manifest declares int32"):
        Runtime(device="cpu").open(bundle, retyped)


WIDTH = 4096


def with_weights_beside(bundle: Bundle, folder: Path, location: str) -> tuple[Bundle, Graph]:
    """A bundle in another folder, with a graph that adds weights of a file that it names."""
    weights = TensorProto(name="weights", data_type=TensorProto.FLOAT, dims=[WIDTH])
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value=location)
    inputs, outputs = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [WIDTH]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Add", ["x", "weights"], ["y"])], "g", [inputs], [outputs], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    specs = [TensorSpec(name=name, dtype="float32", shape=(WIDTH,)) for name in ("x", "y")]
    return Bundle(path=folder, manifest=bundle.manifest), Graph(
        file="model.onnx", inputs=tuple(specs[:1]), outputs=tuple(specs[1:])
    )


def is_mapped(file: Path) -> bool:
    """Whether this process has the file in its memory; other tests may still hold files of that name."""
    return str(file) in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_weights_beside_a_graph_may_be_overwritten_while_it_is_served(bundle, tmp_path):
    """A file that were mapped would end the process here."""
    (tmp_path / "model.onnx.data").write_bytes(np.arange(WIDTH, dtype=np.float32).tobytes())
    opened = Runtime(device="cpu").open(*with_weights_beside(bundle, tmp_path, "model.onnx.data"))
    assert not is_mapped(tmp_path / "model.onnx.data")
    (tmp_path / "model.onnx.data").write_bytes(b"")
    assert opened.run({"x": np.zeros(WIDTH, np.float32)})["y"][-1] == WIDTH - 1


def test_weights_beside_a_graph_are_read_from_their_file_where_it_does_not_change(bundle, tmp_path):
    (tmp_path / "model.onnx.data").write_bytes(np.arange(WIDTH, dtype=np.float32).tobytes())
    opened = Runtime(device="cpu", map_weights=True).open(*with_weights_beside(bundle, tmp_path, "model.onnx.data"))
    assert is_mapped(tmp_path / "model.onnx.data")
    assert opened.run({"x": np.ones(WIDTH, np.float32)})["y"].tolist() == list(range(1, WIDTH + 1))
    del opened
    assert not is_mapped(tmp_path / "model.onnx.data")


def test_an_empty_file_of_weights_is_refused(bundle, tmp_path):
    (tmp_path / "model.onnx.data").write_bytes(b"")
    with pytest.raises(BundleError, match=r"model\.onnx\.data: cannot be mapped"):
        Runtime(device="cpu").open(*with_weights_beside(bundle, tmp_path, "model.onnx.data"))


TABLE = 32768, 768
"""Of 96 MiB."""
_HOLDING_A_TABLE = """
import re, sys
from pathlib import Path
import numpy as np
from headway_server.bundles import Bundle, Graph, TensorSpec
from headway_server.runtime import Runtime

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def spec(name, dtype, *shape):
    return TensorSpec(name=name, dtype=dtype, shape=shape)

width, folder, kind = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
graph = Graph(file="model.onnx", inputs=(spec("ids", "int64", 2),), outputs=(spec("y", "float32", 2, width),))
runtime = Runtime(device="cpu", num_threads=1, map_weights=kind != "copied", lay_out_weights=kind != "as it lies")
before = anonymous()
session = runtime.open(Bundle(path=folder, manifest=None), graph)
found = session.run({"ids": np.array([5, width - 1])})["y"]
print(round(anonymous() - before), *found[:, [5, width - 1]].ravel())
"""


def test_a_table_that_embeds_and_projects_is_held_once_where_it_is_mapped(tmp_path):
    """Rows are gathered from the file; the product has it laid out anew, or reads it as it lies there."""
    table = np.random.default_rng(0).standard_normal(TABLE, np.float32)
    (tmp_path / "model.onnx.data").write_bytes(table.tobytes())
    weights = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=TABLE)
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="model.onnx.data")
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Transpose", ["table"], ["columns"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "columns"], ["y"]),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, TABLE[0]])
    graph = helper.make_graph(nodes, "g", [ids], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    rows, mib = table[[5, TABLE[0] - 1]], table.nbytes / 2**20
    for kind, least, most in ("mapped", 0.9, 1.25), ("copied", 0.9, 2.25), ("as it lies", 0, 0.25):
        command = [sys.executable, "-c", _HOLDING_A_TABLE, str(TABLE[0]), str(tmp_path), kind]
        held, *found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert np.allclose([float(value) for value in found], (rows @ rows.T).ravel(), rtol=1e-4)
        assert least * mib <= int(held) < most * mib, f"{kind}: {held} MiB for weights of {mib:.0f}"


@pytest.mark.parametrize("location", ["../outside", "{folder}/outside", "below/../../outside", "link", "/dev/zero"])
def test_a_graph_that_names_a_file_outside_of_its_bundle_is_refused(bundle, tmp_path, location):
    (tmp_path / "outside").write_bytes(np.arange(WIDTH, dtype=np.float32).tobytes())
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "link").symlink_to(tmp_path / "outside")
    named = with_weights_beside(bundle, tmp_path / "bundle", location.format(folder=tmp_path))
    with pytest.raises(BundleError, match="External data path"):
        Runtime(device="cpu").open(*named)
