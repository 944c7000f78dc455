"""onnxruntime-genai on the bundle's fp32 graph, as it is or with 8-bit weights.

    python run_genai.py MODEL_FOLDER BUNDLE_FOLDER SCRATCH_FOLDER THREADS fp32|int8

Its own model builder knows no GPT-2, so the graph is headway's, given the inputs that the builder's graphs have: their
lengths come from an attention mask. 8 bit are what the builder makes of them: `MatMulNBits` in blocks of 32, accuracy
level 4. The key/value cache is shared between past and present, as in the builder's models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime_genai
from onnx import TensorProto, helper, numpy_helper
from worker import Batch, Contestant, Generate, serve

_BLOCK_SIZE = 32
_ACCURACY_LEVEL = 4


def main() -> None:
    """Converts the model where that was not done yet, and answers requests."""
    model, bundle, scratch = (Path(argument) for argument in sys.argv[1:4])
    threads, precision = int(sys.argv[4]), sys.argv[5]
    geometry = json.loads((model / "geometry.json").read_text(encoding="utf-8"))
    converted = scratch / f"genai-{precision}-{bundle.parents[1].name}"
    if not (converted / "genai_config.json").is_file():
        converted.mkdir(parents=True, exist_ok=True)
        _convert_graph(bundle / "fp32" / "decoder.onnx", converted / "model.onnx", precision)
    (converted / "genai_config.json").write_text(json.dumps(_config(geometry, threads)), encoding="utf-8")
    serve(["onnxruntime-genai", "onnxruntime"], lambda: _load(converted))


def _load(folder: Path) -> Contestant:
    model = onnxruntime_genai.Model(str(folder))

    def generate(prompts: Batch, new_tokens: int) -> Batch:
        length = len(prompts[0])
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=length + new_tokens, batch_size=len(prompts), do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(np.array(prompts, np.int32))  # (B, T)
        for _ in range(new_tokens):
            generator.generate_next_token()
        return [generator.get_sequence(row)[length:].tolist() for row in range(len(prompts))]

    def generate_singly(prompts: Batch, new_tokens: int) -> Batch:
        return [answer for prompt in prompts for answer in generate([prompt], new_tokens)]

    def ways(batch: Batch, _beam_size: int) -> Mapping[str, Generate]:
        if len({len(prompt) for prompt in batch}) > 1:
            # A batch would be padded on the left, which GroupQueryAttention does not know: its answers would be wrong.
            return {"one prompt after another": generate_singly}
        return {"one batch": generate}

    return Contestant(ways)


def _config(geometry: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Returns what the model builder would write beside the graph."""
    no_token = geometry["vocabulary_size"] - 1  # one must be named; greedy decoding never chooses it here
    decoder = {
        "session_options": {"intra_op_num_threads": threads, "log_severity_level": 3, "provider_options": []},
        "filename": "model.onnx",
        "head_size": geometry["d_model"] // geometry["num_heads"],
        "hidden_size": geometry["d_model"],
        "num_attention_heads": geometry["num_heads"],
        "num_key_value_heads": geometry["num_heads"],
        "num_hidden_layers": geometry["num_layers"],
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "position_ids": "position_ids",
            "past_key_names": "past_key_%d",
            "past_value_names": "past_value_%d",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present_key_%d",
            "present_value_names": "present_value_%d",
        },
    }
    return {
        "model": {
            "type": "llama",  # its name for a decoder without peculiarities
            "context_length": geometry["max_length"],
            "vocab_size": geometry["vocabulary_size"],
            "bos_token_id": no_token,
            "eos_token_id": no_token,
            "pad_token_id": no_token,
            "decoder": decoder,
        },
        "search": {"max_length": geometry["max_length"], "do_sample": False, "past_present_share_buffer": True},
    }


def _convert_graph(source: Path, target: Path, precision: str) -> None:
    model = onnx.load(str(source))
    _take_attention_mask(model.graph)
    _fold_transpositions(model.graph)
    if precision == "int8":
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer  # noqa: PLC0415

        quantizer = MatMulNBitsQuantizer(
            model, bits=8, block_size=_BLOCK_SIZE, is_symmetric=True, accuracy_level=_ACCURACY_LEVEL
        )
        quantizer.process()
        model = quantizer.model.model
    onnx.save(model, str(target))


def _take_attention_mask(graph: onnx.GraphProto) -> None:
    """Computes lengths and the last position from an attention mask, which takes the place of three inputs."""
    replaced = {"seqlens_k", "total_sequence_length", "logits_positions"}
    kept = [value for value in graph.input if value.name not in replaced]
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ("slots", "total_length"))
    del graph.input[:]
    graph.input.extend([*kept, mask])
    (logits,) = (value for value in graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_value = 1  # the library allocates what is declared
    constants = {"last_axis": [1], "one": [1], "first": 0, "second": 1}
    graph.initializer.extend(
        numpy_helper.from_array(np.array(value, np.int64), f"genai.{name}") for name, value in constants.items()
    )
    nodes = [
        helper.make_node("ReduceSum", ["attention_mask", "genai.last_axis"], ["genai.lengths"], keepdims=0),
        helper.make_node("Sub", ["genai.lengths", "genai.second"], ["genai.lengths_less_one"]),
        helper.make_node("Cast", ["genai.lengths_less_one"], ["seqlens_k"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["genai.mask_shape"]),
        helper.make_node("Gather", ["genai.mask_shape", "genai.second"], ["genai.total"]),
        helper.make_node("Cast", ["genai.total"], ["total_sequence_length"], to=TensorProto.INT32),
        helper.make_node("Shape", ["input_ids"], ["genai.ids_shape"]),
        helper.make_node("Gather", ["genai.ids_shape", "genai.first"], ["genai.batch"]),
        helper.make_node("Gather", ["genai.ids_shape", "genai.second"], ["genai.length"]),
        helper.make_node("Sub", ["genai.length", "genai.second"], ["genai.last_position"]),
        helper.make_node("Reshape", ["genai.batch", "genai.one"], ["genai.batch_1"]),
        helper.make_node("Concat", ["genai.batch_1", "genai.one"], ["genai.positions_shape"], axis=0),
        helper.make_node("Expand", ["genai.last_position", "genai.positions_shape"], ["logits_positions"]),
    ]
    graph_nodes = [*nodes, *graph.node]
    del graph.node[:]
    graph.node.extend(graph_nodes)


def _fold_transpositions(graph: onnx.GraphProto) -> None:
    """Transposes weights now that the graph would transpose when it is loaded: the quantizer sees weights alone."""
    weights = {weight.name: weight for weight in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        folded = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[0]]).T)
        graph.initializer.append(numpy_helper.from_array(folded, node.output[0]))
        graph.node.remove(node)


if __name__ == "__main__":
    main()
