"""llama.cpp, built into xllamacpp, on an imported decoder: python -m benchmarks.contestants.llama THREADS.

The GGUF file is written here: Q8_0 for every matrix. As many calls as there are callers run at a time in its server's
slots, in this process, with token ids for prompts.
"""

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from safetensors.numpy import load_file

from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, decoding_run
from benchmarks.worker import serve

_FAMILIES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "gpt2": gguf.MODEL_ARCH.GPT2}
_ROOM = 32
"""Tokens of a slot beside prompt and answer."""


def _write(weights: Path, file: Path) -> None:  # noqa: PLR0915 (one line a field of the format)
    config: dict[str, Any] = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((weights / "tokenizer.json").read_text(encoding="utf-8"))
    family = _FAMILIES[config["model_type"]]
    is_gpt2 = family == gguf.MODEL_ARCH.GPT2
    num_layers, num_heads = (config["n_layer"], config["n_head"]) if is_gpt2 else (
        config["num_hidden_layers"], config["num_attention_heads"])  # fmt: skip
    width = config["n_embd"] if is_gpt2 else config["hidden_size"]
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[family])
    writer.add_context_length(config["n_positions"] if is_gpt2 else config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(4 * width if is_gpt2 else config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    if is_gpt2:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_head_count_kv(num_kv_heads)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(width // num_heads)
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    names = gguf.get_tensor_name_map(family, num_layers)
    for name, found in load_file(weights / "model.safetensors").items():
        tensor = found
        if is_gpt2 and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = np.ascontiguousarray(tensor.T)
        if family == gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
            heads = num_heads if "q_proj" in name else num_kv_heads  # rotary pairs lie side by side there
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if called is None:
            raise ValueError(f"{name}: GGUF has no name for it")
        if tensor.ndim == 1 or "position" in called:
            writer.add_tensor(called, tensor.astype(np.float32))
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(called, gguf.quants.quantize(tensor.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _load(threads: int, case: Case) -> tuple[int, Path]:
    weights = Path(case["weights"])
    file = weights / "converted" / "q8_0.gguf"
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        unfinished = file.with_suffix(".part")
        _write(weights, unfinished)
        unfinished.rename(file)
    return threads, file


def _ways(model: tuple[int, Path], case: Case, callers: int) -> Mapping[str, Run]:
    threads, file = model
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_parallel = callers
    parameters.n_ctx = callers * (max(map(len, case["token_ids"])) + case["max_new_tokens"] + _ROOM)
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.warmup = False
    parameters.cache_ram_mib = 0
    server, pool = xllamacpp.Server(parameters), ThreadPoolExecutor(callers)
    return {f"{callers} slots": decoding_run(case, callers, partial(_generate, server, pool))}


def _generate(server: Any, pool: ThreadPoolExecutor, prompts: Batch, new_tokens: int) -> Batch:
    def complete(prompt: list[int]) -> list[int]:
        asked = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
        answer = server.handle_completions(asked | {"cache_prompt": False})
        if "usage" not in answer:
            raise RuntimeError(str(answer)[:300])
        return [0] * answer["usage"]["completion_tokens"]  # it gives text, and how many tokens that is

    return list(pool.map(complete, prompts))


if __name__ == "__main__":
    serve(Fastest(partial(_load, int(sys.argv[1])), _ways).answer, ["xllamacpp"])
