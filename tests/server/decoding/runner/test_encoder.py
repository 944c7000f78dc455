"""Encoders of other inputs than tokens, on ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tiny_engine import make_bundle

from headway_server.bundles import Bundle, Graph, Task, TensorSpec, Variant
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.runtime import Runtime

WEIGHTS = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)


def write(folder: Path, nodes, inputs, outputs, initializers) -> tuple[Bundle, Graph]:
    """Writes a graph and describes the bundle that it is the encoder of."""
    types = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}

    def info(spec: TensorSpec):
        return helper.make_tensor_value_info(spec.name, types[spec.dtype], list(spec.shape))

    graph = helper.make_graph(nodes, "encoder", [*map(info, inputs)], [*map(info, outputs)], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "encoder.onnx")
    bundle = make_bundle(Task.TRANSLATION)
    return Bundle(path=folder, manifest=bundle.manifest), Graph(file="encoder.onnx", inputs=inputs, outputs=outputs)


def variant_of(bundle: Bundle, graph: Graph, cross: str) -> Variant:
    """The bundle's variant with this encoder; its decoder is not looked at."""
    variant = next(iter(bundle.manifest.variants.values()))
    return variant.model_construct(**{**dict(variant), "graphs": {"encoder": graph}, "cross": (cross,)})


@pytest.fixture
def runtime():
    return Runtime(device="cpu", num_threads=1)


def test_frames_of_any_number_are_padded_masked_and_cut_again(runtime, tmp_path):
    nodes = [
        helper.make_node("MatMul", ["frames", "weights"], ["hidden"]),  # (batch, length, 4)
        helper.make_node("Cast", ["attention_mask"], ["kept"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["kept", "last"], ["count"], keepdims=1),  # (batch, 1)
        helper.make_node("Unsqueeze", ["count", "last"], ["counts"]),
        helper.make_node("Add", ["hidden", "counts"], ["shifted"]),  # so that a wrong mask shows
        helper.make_node("Unsqueeze", ["shifted", "first"], ["memory"]),  # (batch, 1, length, 4)
    ]
    inputs = (
        TensorSpec(name="frames", dtype="float32", shape=("batch", "length", 3)),
        TensorSpec(name="attention_mask", dtype="int64", shape=("batch", "length")),
    )
    outputs = (TensorSpec(name="memory", dtype="float32", shape=("batch", 1, "length", 4)),)
    constants = [
        numpy_helper.from_array(WEIGHTS, "weights"),
        numpy_helper.from_array(np.array([-1]), "last"),
        numpy_helper.from_array(np.array([1]), "first"),
    ]
    bundle, graph = write(tmp_path, nodes, inputs, outputs, constants)
    encoder = EncoderRunner(runtime, bundle, variant_of(bundle, graph, "memory"))
    rng = np.random.default_rng(2)
    sounds = [rng.normal(size=(length, 3)).astype(np.float32) for length in (4, 9, 1)]
    encoded = encoder.encode([EncoderInput({"frames": frames}, len(frames)) for frames in sounds])
    for frames, source in zip(sounds, encoded, strict=True):
        assert source.num_positions == len(frames)
        np.testing.assert_allclose(source.tensors["memory"][0], frames @ WEIGHTS + len(frames), rtol=1e-5)


def test_an_image_of_fixed_size_has_the_positions_that_the_graph_makes_of_it(runtime, tmp_path):
    nodes = [
        helper.make_node("Reshape", ["pixels", "flat"], ["patches"]),  # (batch, 1, 3, 16)
        helper.make_node("Transpose", ["patches"], ["memory"], perm=[0, 1, 3, 2]),  # (batch, 1, 16, 3)
    ]
    inputs = (TensorSpec(name="pixels", dtype="float32", shape=("batch", 3, 4, 4)),)
    outputs = (TensorSpec(name="memory", dtype="float32", shape=("batch", 1, 16, 3)),)
    constants = [numpy_helper.from_array(np.array([0, 1, 3, 16]), "flat")]
    bundle, graph = write(tmp_path, nodes, inputs, outputs, constants)
    encoder = EncoderRunner(runtime, bundle, variant_of(bundle, graph, "memory"))
    images = np.random.default_rng(3).normal(size=(2, 3, 4, 4)).astype(np.float32)
    for image, source in zip(
        images, encoder.encode([EncoderInput({"pixels": each}, 16) for each in images]), strict=True
    ):
        assert source.num_positions == 16
        np.testing.assert_array_equal(source.tensors["memory"][0], image.reshape(3, 16).T)
