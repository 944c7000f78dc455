"""onnxruntime-genai on the bundle's fp32 graph, as it is or with 8-bit weights.

    python -m benchmarks.contestants.genai THREADS fp32|int8

Its own model builder knows no GPT-2, so the graph is headway's, given the inputs that the builder's graphs have: their
lengths come from an attention mask. 8 bits are what the builder makes of them: `MatMulNBits` in blocks of 32, accuracy
level 4. The key/value cache is shared between past and present, as in the builder's models.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime_genai
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, decoding_batches, run_decoding
from benchmarks.worker import serve

_models: dict[str, Any] = {}


def _ways(threads: int, precision: str, case: Case, callers: int) -> Mapping[str, Run]:
    if case["weights"] not in _models:
        _models[case["weights"]] = _load(Path(case["weights"]), Path(case["bundle"]), precision, threads)
    batches, limits = decoding_batches(case, callers)
    is_mixed = any(len({len(prompt) for prompt in batch}) > 1 for batch in batches)
    # A mixed batch would be padded on the left, which GroupQueryAttention does not know: its answers would be wrong.
    name, generate = ("one prompt after another", _singly) if is_mixed else ("one batch", _together)
    return {name: run_decoding(partial(generate, _models[case["weights"]]), batches, limits)}


def _together(model: Any, prompts: Batch, new_tokens: int) -> Batch:
    length = len(prompts[0])
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=length + new_tokens, batch_size=len(prompts), do_sample=False)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(np.array(prompts, np.int32))  # (B, T)
    for _ in range(new_tokens):
        generator.generate_next_token()
    return [generator.get_sequence(row)[length:].tolist() for row in range(len(prompts))]


def _singly(model: Any, prompts: Batch, new_tokens: int) -> Batch:
    return [answer for prompt in prompts for answer in _together(model, [prompt], new_tokens)]


def _load(weights: Path, bundle: Path, precision: str, threads: int) -> Any:
    key = hashlib.sha256(str(bundle).encode()).hexdigest()[:12]  # another exporter makes another graph
    folder = weights / "converted" / f"genai-{precision}-{key}"
    if not (folder / "genai_config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _convert(bundle / "fp32" / "decoder.onnx", folder / "model.onnx", precision)
    sizes = json.loads((weights / "sizes.json").read_text(encoding="utf-8"))
    (folder / "genai_config.json").write_text(json.dumps(_config(sizes, threads)), encoding="utf-8")
    return onnxruntime_genai.Model(str(folder))


def _config(sizes: Mapping[str, int], threads: int) -> dict[str, Any]:
    """Returns what the model builder would write beside the graph."""
    no_token = sizes["vocabulary_size"] - 1  # one must be named; greedy decoding never chooses it here
    tensors = {"past_key_names": "past_key_%d", "past_value_names": "past_value_%d"}
    decoder = {
        "session_options": {"intra_op_num_threads": threads, "log_severity_level": 3, "provider_options": []},
        "filename": "model.onnx",
        "head_size": sizes["d_model"] // sizes["num_heads"],
        "hidden_size": sizes["d_model"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_heads"],
        "num_hidden_layers": sizes["num_layers"],
        "inputs": {name: name for name in ("input_ids", "attention_mask", "position_ids")} | tensors,
        "outputs": {"logits": "logits"}
        | {name.replace("past", "present"): value.replace("past", "present") for name, value in tensors.items()},
    }
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), no_token)
    model = {"type": "llama", "context_length": sizes["max_length"], "vocab_size": sizes["vocabulary_size"]}
    search = {"max_length": sizes["max_length"], "do_sample": False, "past_present_share_buffer": True}
    return {"model": model | special | {"decoder": decoder}, "search": search}  # llama: no peculiarities


def _convert(source: Path, target: Path, precision: str) -> None:
    model = onnx.load(str(source))
    _take_attention_mask(model.graph)
    _fold_transpositions(model.graph)
    if precision == "int8":
        quantizer = MatMulNBitsQuantizer(model, bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
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
        *graph.node,
    ]
    del graph.node[:]
    graph.node.extend(nodes)


def _fold_transpositions(graph: onnx.GraphProto) -> None:
    """Transposes weights now that the graph would transpose when it is loaded: the quantizer sees weights alone."""
    weights = {weight.name: weight for weight in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        folded = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[0]]).T)
        graph.initializer.append(numpy_helper.from_array(folded, node.output[0]))
        graph.node.remove(node)


if __name__ == "__main__":
    ways = partial(_ways, int(sys.argv[1]), sys.argv[2])
    serve(Fastest(ways).answer, ["onnxruntime-genai", "onnxruntime"])
