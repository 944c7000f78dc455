"""onnxruntime-genai on the bundle's fp32 graph, as it is or with 8-bit weights.

    python -m benchmarks.contestants.genai THREADS fp32|int8

An imported decoder is made by the library's own builder. That knows no GPT-2, whose graph is headway's, given the
inputs that the builder's graphs have: their lengths come from an attention mask. 8 bits are what the builder makes of
them: `MatMulNBits` in blocks of 32, accuracy level 4. The key/value cache is shared between past and present, as in
the builder's models.
"""

import hashlib
import json
import subprocess
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

from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, decoding_run
from benchmarks.worker import serve


def _ways(model: Any, case: Case, callers: int) -> Mapping[str, Run]:
    # A mixed batch would be padded on the left, which GroupQueryAttention does not know: its answers would be wrong.
    is_mixed = callers > 1 and len(set(map(len, case["token_ids"]))) > 1
    name, generate = ("one prompt after another", _singly) if is_mixed else ("one batch", _together)
    return {name: decoding_run(case, callers, partial(generate, model))}


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


def _load(threads: int, precision: str, case: Case) -> Any:
    weights, bundle = Path(case["weights"]), Path(case["bundle"])
    if (weights / "config.json").is_file():
        folder = weights / "converted" / f"genai-{precision}"
        if not (folder / "genai_config.json").is_file():
            builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(weights), "-o", str(folder)]
            builder += ["-p", precision, "-e", "cpu", "-c", str(folder / "cache")]
            built = subprocess.run(builder, capture_output=True, text=True, check=False)
            if built.returncode:
                raise RuntimeError(f"its builder: {built.stderr.strip().splitlines()[-1]}")
        settings = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        (folder / "genai_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return onnxruntime_genai.Model(str(folder))
    key = hashlib.sha256(Path(__file__).read_bytes() + str(bundle).encode()).hexdigest()[:12]
    folder = weights / "converted" / f"genai-{precision}-{key}"
    if not (folder / "genai_config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        model = onnx.load(str(bundle / "fp32" / "decoder.onnx"))
        _take_attention_mask(model.graph)
        _fold_transpositions(model.graph)
        if precision == "int8":
            quantizer = MatMulNBitsQuantizer(model, bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
            quantizer.process()
            model = quantizer.model.model
        onnx.save(model, str(folder / "model.onnx"))
    sizes = json.loads((weights / "sizes.json").read_text(encoding="utf-8"))
    (folder / "genai_config.json").write_text(json.dumps(_config(sizes, threads)), encoding="utf-8")
    return onnxruntime_genai.Model(str(folder))


def _config(sizes: Mapping[str, int], threads: int) -> dict[str, Any]:
    """Returns what the model builder would write beside the graph."""
    past = {"past_key_names": "past_key_%d", "past_value_names": "past_value_%d"}
    present = {name.replace("past", "present"): value.replace("past", "present") for name, value in past.items()}
    decoder = {
        "session_options": {"intra_op_num_threads": threads, "log_severity_level": 3, "provider_options": []},
        "filename": "model.onnx",
        "head_size": sizes["d_model"] // sizes["num_heads"],
        "hidden_size": sizes["d_model"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_heads"],
        "num_hidden_layers": sizes["num_layers"],
        "inputs": {name: name for name in ("input_ids", "attention_mask", "position_ids")} | past,
        "outputs": {"logits": "logits"} | present,
    }
    model = {"type": "llama", "context_length": sizes["max_length"], "vocab_size": sizes["vocabulary_size"]}
    # A token that ends must be named; greedy decoding never chooses the last one here.
    model |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), sizes["vocabulary_size"] - 1)
    search = {"max_length": sizes["max_length"], "do_sample": False, "past_present_share_buffer": True}
    return {"model": model | {"decoder": decoder}, "search": search}


def _take_attention_mask(graph: onnx.GraphProto) -> None:
    """Computes lengths and the last position from an attention mask, which takes the place of three inputs.

    Nothing is drafted: `verifies`, the tokens to verify, becomes empty.
    """
    replaced = {"seqlens_k", "total_sequence_length", "logits_positions", "verifies"}
    kept = [value for value in graph.input if value.name not in replaced]
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ("slots", "total_length"))
    del graph.input[:]
    graph.input.extend([*kept, mask])
    (logits,) = (value for value in graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_value = 1  # the library allocates what is declared
    for name, value in {"zero": 0, "one": 1, "ones": [1]}.items():
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), f"mask.{name}"))
    graph.initializer.append(numpy_helper.from_array(np.zeros(0, np.int64), "verifies"))
    int32 = {"to": TensorProto.INT32}
    nodes: list[tuple[str, str, str, dict[str, Any]]] = [
        ("ReduceSum", "attention_mask mask.ones", "mask.lengths", {"keepdims": 0}),
        ("Sub", "mask.lengths mask.one", "mask.last", {}),
        ("Cast", "mask.last", "seqlens_k", int32),
        ("Shape", "attention_mask", "mask.shape", {}),
        ("Gather", "mask.shape mask.one", "mask.total", {}),
        ("Cast", "mask.total", "total_sequence_length", int32),
        ("Shape", "input_ids", "mask.ids_shape", {}),
        ("Gather", "mask.ids_shape mask.one", "mask.length", {}),
        ("Sub", "mask.length mask.one", "mask.last_position", {}),
        ("Gather", "mask.ids_shape mask.zero", "mask.batch", {}),
        ("Reshape", "mask.batch mask.ones", "mask.batch_1", {}),
        ("Concat", "mask.batch_1 mask.ones", "mask.positions_shape", {"axis": 0}),
        ("Expand", "mask.last_position mask.positions_shape", "logits_positions", {}),
    ]
    made = [helper.make_node(kind, inputs.split(), [output], **options) for kind, inputs, output, options in nodes]
    made += graph.node
    del graph.node[:]
    graph.node.extend(made)


def _fold_transpositions(graph: onnx.GraphProto) -> None:
    """Transposes weights now that the graph would transpose when it is loaded: the quantizer sees weights alone."""
    weights = {weight.name: weight for weight in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        folded = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[0]]).T)
        graph.initializer.append(numpy_helper.from_array(folded, node.output[0]))
        graph.node.remove(node)


if __name__ == "__main__":
    load = partial(_load, int(sys.argv[1]), sys.argv[2])
    serve(Fastest(load, _ways).answer, ["onnxruntime-genai", "onnxruntime"])
