"""Tiny models that find answers and fill masks, built node by node: answers known by hand.

Which token begins or ends an answer is told by the token alone: "Ada Lovelace" is the best answer there is, "Oslo" the
next. The token for a mask is told by the token before it.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from headway_server.bundles import (
    Architecture,
    Bundle,
    Graph,
    Limits,
    Manifest,
    ParityFigures,
    Precision,
    SpecialTokens,
    Task,
    TensorSpec,
    Variant,
    describe_files,
    publish,
    staging_folder,
    write_manifest,
)

MAX_INPUT_TOKENS = 16
_SPECIAL = ("[PAD]", "[CLS]", "[UNK]", "[MASK]")
ENDS = {"[CLS]": (1.0, 1.0), "Ada": (4.0, 0.0), "Lovelace": (0.0, 4.0), "Oslo": (3.0, 3.0)}
"""Logits of a token being the first and the last of an answer; 0 of all others."""
NEXT = {"the": ("sea", "star"), "a": ("star", "goal")}
"""The likeliest tokens after a token, the likeliest first."""
WORDS = ("who", "saw", "Ada", "Lovelace", "in", "Oslo", "the", "a", "sea", "star", "goal", ".")
VOCABULARY = (*_SPECIAL, *WORDS)


def write_answer_bundle(store: Path, *, name: str = "answers", max_input_tokens: int = MAX_INPUT_TOKENS) -> Bundle:
    """Publishes the model that finds answers."""
    table = np.zeros((len(VOCABULARY), 2), np.float32)
    for word, logits in ENDS.items():
        table[VOCABULARY.index(word)] = logits
    nodes = [
        _constant("table", table),
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),  # (B, T, 2)
        helper.make_node("Transpose", ["rows"], ["logits"], perm=[0, 2, 1]),
    ]
    return _publish(
        store,
        name=name,
        task=Task.QUESTION_ANSWERING,
        nodes=nodes,
        more_inputs=[],
        shape=(2, "length"),
        max_input_tokens=max_input_tokens,
    )


def write_mask_bundle(
    store: Path, *, name: str = "masks", max_input_tokens: int = MAX_INPUT_TOKENS, has_apart: bool = False
) -> Bundle:
    """Publishes the model that fills masks; with `has_apart` its tokenizer reads masks that are words alone."""
    table = np.zeros((len(VOCABULARY), len(VOCABULARY)), np.float32)
    for word, following in NEXT.items():
        for rank, one in enumerate(following):
            table[VOCABULARY.index(word), VOCABULARY.index(one)] = 4 - rank
    nodes = [
        _constant("table", table),
        _constant("one", np.array(1)),
        helper.make_node("Sub", ["mask_positions", "one"], ["before"]),
        helper.make_node("GatherElements", ["input_ids", "before"], ["words"], axis=1),  # (B, M)
        helper.make_node("Gather", ["table", "words"], ["logits"]),  # (B, M, V)
    ]
    positions = TensorSpec(name="mask_positions", dtype="int64", shape=("batch", "masks"))
    return _publish(
        store,
        name=name,
        task=Task.FILL_MASK,
        nodes=nodes,
        more_inputs=[positions],
        shape=("masks", len(VOCABULARY)),
        max_input_tokens=max_input_tokens,
        has_apart=has_apart,
    )


def _publish(store, *, name, task, nodes, more_inputs, shape, max_input_tokens, has_apart=False) -> Bundle:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(word, special=True, single_word=has_apart) for word in _SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A [CLS]:1 $B:1", special_tokens=[("[CLS]", 1)]
    )
    ids, mask = (
        TensorSpec(name=key, dtype="int64", shape=("batch", "length")) for key in ("input_ids", "attention_mask")
    )
    inputs, output = [ids, mask, *more_inputs], TensorSpec(name="logits", dtype="float32", shape=("batch", *shape))
    ins = [helper.make_tensor_value_info(spec.name, TensorProto.INT64, spec.shape) for spec in inputs]
    outs = [helper.make_tensor_value_info(output.name, TensorProto.FLOAT, output.shape)]
    graph = helper.make_graph(nodes, "model", ins, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    parity = ParityFigures(
        max_relative_logit_error=0.0, bound=1e-4, checked_shape_count=1, provider="CPUExecutionProvider"
    )
    served = Graph(file="model.onnx", inputs=tuple(inputs), outputs=(output,))
    with staging_folder(store) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        onnx.save(model, folder / "model.onnx")
        manifest = Manifest(
            schema_version=1,
            name=name,
            version="1",
            task=task,
            description="A tiny model for tests.",
            license="Apache-2.0",
            architecture=Architecture(kind="table", parameter_count=9, configuration={}),
            variants={Precision.FP32: Variant(device="cpu", graphs={"model": served}, parity=parity, quality=None)},
            special_tokens=SpecialTokens(pad=0, unk=2, mask=3),
            limits=Limits(max_input_tokens=max_input_tokens),
            text_pairs="required" if task is Task.QUESTION_ANSWERING else "never",
            opset=20,
            libraries={},
            files=describe_files(folder),
        )
        write_manifest(folder, manifest)
        return publish(folder, store)


def _constant(name: str, value: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))
