"""A tiny segmentation model, built node by node: what it cuts out is known by hand.

An image is embedded as the colours of 8 x 8 cells. A point cuts out the cells that have nearly its colour, and a box
those of its upper left corner. Of the masks of one part, the first is surest; the second holds everything, the third
nothing. The mask of several parts is the earlier mask, and what has the first part's colour besides.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from headway_server.bundles import (
    Architecture,
    Bundle,
    Graph,
    ImagePreprocessing,
    Manifest,
    ParityFigures,
    Precision,
    Task,
    TensorSpec,
    Variant,
    describe_files,
    publish,
    staging_folder,
    write_manifest,
)

SIDE = 8
_OPSET = 20
PREPROCESSING = ImagePreprocessing(
    height=SIDE, width=SIDE, resize="stretch", interpolation="bilinear", mean=(0.0,) * 3, std=(1.0,) * 3
)
_TYPES = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}


def write_segmenter_bundle(store: Path, *, name: str = "cells", version: str = "1") -> Bundle:
    """Publishes the model."""
    with staging_folder(store) as folder:
        graphs = {"encoder": _save(folder, "encoder", *_encoder()), "decoder": _save(folder, "decoder", *_decoder())}
        parity = ParityFigures(
            max_relative_logit_error=0.0, bound=1e-4, checked_shape_count=1, provider="CPUExecutionProvider"
        )
        variant = Variant(device="cpu", graphs=graphs, parity=parity, quality=None)
        manifest = Manifest(
            schema_version=1,
            name=name,
            version=version,
            task=Task.SEGMENTATION,
            description="A tiny model for tests.",
            license="Apache-2.0",
            architecture=Architecture(kind="tiny", parameter_count=9, configuration={}),
            variants={Precision.FP32: variant},
            image_preprocessing=PREPROCESSING,
            opset=_OPSET,
            libraries={"onnx": onnx.__version__},
            files=describe_files(folder),
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


def _encoder():
    nodes = [
        _constant("flat", np.array([0, 3, SIDE * SIDE])),
        helper.make_node("Reshape", ["pixel_values", "flat"], ["colours"]),
        helper.make_node("Transpose", ["colours"], ["embedding"], perm=[0, 2, 1]),
    ]
    inputs = [TensorSpec(name="pixel_values", dtype="float32", shape=("batch", 3, SIDE, SIDE))]
    return nodes, inputs, [TensorSpec(name="embedding", dtype="float32", shape=("batch", SIDE * SIDE, 3))]


def _decoder():
    nodes = [
        _constant("first", np.array(0)),
        helper.make_node("Gather", ["points", "first"], ["point"], axis=1),  # (N, 2)
        _constant("side", np.float32(SIDE)),
        _constant("zero", np.float32(0)),
        _constant("last", np.float32(SIDE - 1)),
        helper.make_node("Mul", ["point", "side"], ["places"]),
        helper.make_node("Floor", ["places"], ["floors"]),
        helper.make_node("Clip", ["floors", "zero", "last"], ["cells"]),
        _constant("strides", np.array([1, SIDE], np.float32)),
        helper.make_node("Mul", ["cells", "strides"], ["steps"]),
        _constant("axis", np.array([1])),
        helper.make_node("ReduceSum", ["steps", "axis"], ["place"], keepdims=1),  # (N, 1)
        helper.make_node("Cast", ["place"], ["index"], to=TensorProto.INT64),
        helper.make_node("GatherND", ["embedding", "index"], ["colour"], batch_dims=1),  # (N, 3)
        helper.make_node("Unsqueeze", ["colour", "axis"], ["own"]),  # (N, 1, 3)
        helper.make_node("Sub", ["embedding", "own"], ["differences"]),
        helper.make_node("Abs", ["differences"], ["distances"]),
        _constant("channels", np.array([2])),
        helper.make_node("ReduceSum", ["distances", "channels"], ["distance"], keepdims=0),  # (N, L)
        _constant("near", np.float32(0.5)),
        _constant("sharpness", np.float32(4)),
        helper.make_node("Sub", ["near", "distance"], ["nearness"]),
        helper.make_node("Sign", ["nearness"], ["signs"]),
        helper.make_node("Mul", ["signs", "sharpness"], ["logits"]),  # so that edges lie between cells
        _constant("cells_shape", np.array([-1, 1, SIDE, SIDE])),
        helper.make_node("Reshape", ["logits", "cells_shape"], ["mask"]),  # (N, 1, S, S)
        helper.make_node("Cast", ["has_earlier_mask"], ["has"], to=TensorProto.FLOAT),
        _constant("ones_shape", np.array([-1, 1, 1, 1])),
        helper.make_node("Reshape", ["has", "ones_shape"], ["has4"]),
        helper.make_node("Unsqueeze", ["earlier_mask", "axis"], ["earlier4"]),
        helper.make_node("Mul", ["earlier4", "has4"], ["earlier"]),
        helper.make_node("Max", ["mask", "earlier"], ["joined"]),
        _constant("ten", np.float32(10)),
        helper.make_node("Abs", ["mask"], ["positive"]),
        helper.make_node("Add", ["positive", "ten"], ["everything"]),
        helper.make_node("Neg", ["everything"], ["nothing"]),
        helper.make_node("Concat", ["joined", "mask", "everything", "nothing"], ["masks"], axis=1),
        _constant("promises", np.array([[0.8, 0.9, 0.6, 0.1]], np.float32)),
        _constant("row", np.array([-1, 1])),
        helper.make_node("Reshape", ["has", "row"], ["has2"]),
        helper.make_node("Mul", ["has2", "zero"], ["zeros"]),
        helper.make_node("Add", ["promises", "zeros"], ["predicted_iou"]),
        helper.make_node("Identity", ["point_labels"], ["unused"]),
    ]
    inputs = [
        TensorSpec(name="embedding", dtype="float32", shape=("prompts", SIDE * SIDE, 3)),
        TensorSpec(name="points", dtype="float32", shape=("prompts", "points", 2)),
        TensorSpec(name="point_labels", dtype="int64", shape=("prompts", "points")),
        TensorSpec(name="earlier_mask", dtype="float32", shape=("prompts", SIDE, SIDE)),
        TensorSpec(name="has_earlier_mask", dtype="int64", shape=("prompts",)),
    ]
    outputs = [
        TensorSpec(name="masks", dtype="float32", shape=("prompts", 4, SIDE, SIDE)),
        TensorSpec(name="predicted_iou", dtype="float32", shape=("prompts", 4)),
    ]
    return nodes, inputs, outputs


def _constant(name: str, value: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))


def _save(folder: Path, role: str, nodes, inputs, outputs) -> Graph:
    ins, outs = (
        [helper.make_tensor_value_info(spec.name, _TYPES[spec.dtype], spec.shape) for spec in specs]
        for specs in (inputs, outputs)
    )
    graph = helper.make_graph(nodes, role, ins, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / f"{role}.onnx")
    return Graph(file=f"{role}.onnx", inputs=tuple(inputs), outputs=tuple(outputs))
