"""A tiny token classifier, built node by node and published as a real bundle: answers known by hand.

The logits of a token are its row of a table, times a matrix: who is a person and what is a place shows in the word. The
second name of a person continues the first; a place is one word. The embedding is the mean of the rows.

With boxes, a word in the right half of its page is a place, and there is no embedding.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headway_server.bundles import (
    Architecture,
    Bundle,
    Embedding,
    Graph,
    Limits,
    Manifest,
    ParityFigures,
    Precision,
    SpecialTokens,
    Tagging,
    Task,
    TensorSpec,
    Variant,
    WordBoxes,
    describe_files,
    publish,
    staging_folder,
    write_manifest,
)

TAGS = ("O", "B-person", "I-person", "B-place")
WORDS = {"the": 0, "in": 0, "saw": 0, "Ada": 1, "Grace": 1, "Lovelace": 2, "Hopper": 2, "Köln": 3, "Oslo": 3}
"""Words by the column of their largest logit."""
MAX_INPUT_TOKENS = 16
_SPECIAL = ("[PAD]", "[CLS]", "[UNK]")
STRENGTH = 3.0
BOXES = WordBoxes(unit="thousandths", before=(0, 0, 0, 0), after=(1000, 1000, 1000, 1000))


def write_tagger_bundle(
    store: Path,
    *,
    name: str = "tagger",
    tags: tuple[str, ...] = TAGS,
    word_boxes: WordBoxes | None = None,
    tagging: Tagging | None = None,
) -> Bundle:
    """Publishes the model; `tags` are what the manifest calls its outputs."""
    words = [*_SPECIAL, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    table = np.zeros((len(words), len(TAGS)), np.float32)
    for word, column in WORDS.items():
        table[words.index(word), column] = STRENGTH
    table[2, 0] = STRENGTH
    constants = {"table": table, "mixing": np.eye(len(TAGS), dtype=np.float32)}
    nodes = [
        *(helper.make_node("Constant", [], [key], value=numpy_helper.from_array(v)) for key, v in constants.items()),
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),  # (B, T, C)
        helper.make_node("Unsqueeze", ["attention_mask", "last"], ["mask"]),
        helper.make_node("Cast", ["mask"], ["weights"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["rows", "weights"], ["seen"]),
        helper.make_node("MatMul", ["seen", "mixing"], ["logits" if word_boxes is None else "alone"]),
        helper.make_node("ReduceSum", ["seen", "middle"], ["sums"], keepdims=0),
        helper.make_node("ReduceSum", ["weights", "middle"], ["counts"], keepdims=0),
        helper.make_node("Div", ["sums", "counts"], ["embedding"]),  # (B, C)
    ]
    for key, axis in (("last", -1), ("middle", 1)):
        nodes.insert(0, helper.make_node("Constant", [], [key], value=numpy_helper.from_array(np.array([axis]))))
    if word_boxes is not None:
        half = np.array(500 if word_boxes.unit == "thousandths" else 0.5, word_boxes.dtype)
        for key, value in (("half", half), ("left", np.array([0])), ("place", np.float32([0, 0, 0, 3 * STRENGTH]))):
            nodes.insert(0, helper.make_node("Constant", [], [key], value=numpy_helper.from_array(value)))
        nodes += [
            helper.make_node("Gather", ["bbox", "left"], ["x_min"], axis=2),  # (B, T, 1)
            helper.make_node("GreaterOrEqual", ["x_min", "half"], ["is_right"]),
            helper.make_node("Cast", ["is_right"], ["right"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["right", "place"], ["moved"]),
            helper.make_node("Add", ["alone", "moved"], ["logits"]),
        ]
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        graph = _save(folder, nodes, word_boxes)
        parity = ParityFigures(
            max_relative_logit_error=0.0, bound=1e-4, checked_shape_count=1, provider="CPUExecutionProvider"
        )
        variant = Variant(device="cpu", graphs={"model": graph}, parity=parity, quality=None)
        manifest = Manifest(
            schema_version=1,
            name=name,
            version="1",
            task=Task.TOKEN_CLASSIFICATION,
            description="Finds persons and places.",
            license="Apache-2.0",
            architecture=Architecture(kind="table", parameter_count=table.size, configuration={}),
            variants={Precision.FP32: variant},
            special_tokens=SpecialTokens(pad=0, unk=2),
            limits=Limits(max_input_tokens=MAX_INPUT_TOKENS),
            labels=tags,
            embedding=Embedding(pooling="mean", dimension=len(TAGS)) if word_boxes is None else None,
            word_boxes=word_boxes,
            tagging=tagging,
            opset=20,
            libraries={},
            files=describe_files(folder),
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


def _save(folder: Path, nodes: list[onnx.NodeProto], word_boxes: WordBoxes | None) -> Graph:
    ids, mask = (
        TensorSpec(name=name, dtype="int64", shape=("batch", "length")) for name in ("input_ids", "attention_mask")
    )
    inputs = [ids, mask]
    if word_boxes is not None:
        inputs.append(TensorSpec(name="bbox", dtype=word_boxes.dtype, shape=("batch", "length", 4)))
    logits = TensorSpec(name="logits", dtype="float32", shape=("batch", "length", len(TAGS)))
    embedding = TensorSpec(name="embedding", dtype="float32", shape=("batch", len(TAGS)))
    types = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
    specs = (logits, embedding) if word_boxes is None else (logits,)
    values, outputs = (
        [helper.make_tensor_value_info(spec.name, types[spec.dtype], spec.shape) for spec in side]
        for side in (inputs, specs)
    )
    graph = helper.make_graph(nodes, "model", values, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    return Graph(file="model.onnx", inputs=tuple(inputs), outputs=specs)
