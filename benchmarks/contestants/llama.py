"""llama.cpp by llama-cpp-python on an imported decoder: python -m benchmarks.contestants.llama THREADS Q8_0|Q4_K_M.

The GGUF file is written here in fp32, and quantized by the library. As many prompts as there are callers are read in
one call, each as a sequence of its own, and every call after that decodes a token of each.
"""

import ctypes
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, decoding_run
from benchmarks.worker import serve

_FAMILIES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "gpt2": gguf.MODEL_ARCH.GPT2}
_KINDS = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def _write(weights: Path, file: Path) -> None:
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
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
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
        writer.add_tensor(called, np.ascontiguousarray(tensor.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Model:
    """A quantized model, and a context for as many sequences as were asked for last."""

    def __init__(self, threads: int, kind: str, case: Case) -> None:
        weights = Path(case["weights"])
        file, whole = (weights / "converted" / f"llama-{name}.gguf" for name in (kind, "f32"))
        llama_cpp.llama_backend_init()
        if not file.is_file():
            file.parent.mkdir(exist_ok=True)
            _write(weights, whole)
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype, options.nthread = _KINDS[kind], threads
            unfinished = file.with_suffix(".part")
            if llama_cpp.llama_model_quantize(bytes(whole), bytes(unfinished), ctypes.byref(options)):
                raise RuntimeError(f"{kind} cannot be made")
            unfinished.rename(file)
            whole.unlink()
        self._threads, self._key = threads, (0, 0)
        self._context: Any = None
        self._model = llama_cpp.llama_model_load_from_file(bytes(file), llama_cpp.llama_model_default_params())
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(0, 0, 1)

    def _open(self, count: int, length: int) -> None:
        """Makes a context for so many sequences of so many tokens."""
        if self._key == (count, length):
            return
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        options = llama_cpp.llama_context_default_params()
        options.n_seq_max, options.n_ctx, options.n_batch = count, count * length, count * length
        options.n_threads = options.n_threads_batch = self._threads
        options.flash_attn_type, options.kv_unified = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, False
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        llama_cpp.llama_batch_free(self._batch)
        self._batch = llama_cpp.llama_batch_init(count * length, 0, 1)
        self._key = count, length

    def _run(self, rows: list[list[int]], position: int) -> list[int]:
        """Reads tokens of each sequence from a position on; returns the likeliest token after the last of each."""
        batch, last = self._batch, []
        batch.n_tokens = sum(map(len, rows))
        index = 0
        for row, ids in enumerate(rows):
            for offset, token in enumerate(ids):
                batch.token[index], batch.pos[index] = token, position + offset
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = offset == len(ids) - 1
                index += 1
            last.append(index - 1)
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("a batch cannot be decoded")
        shape = (self._num_tokens,)
        logits = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, at), shape) for at in last]
        return [int(one.argmax()) for one in logits]

    def generate(self, prompts: Batch, new_tokens: int) -> Batch:
        """Continues prompts of one length greedily."""
        length = len(prompts[0])
        self._open(len(prompts), -(-(length + new_tokens) // 256) * 256)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        answers: Batch = [[token] for token in self._run(prompts, 0)]
        for position in range(length, length + new_tokens - 1):
            tokens = self._run([answer[-1:] for answer in answers], position)
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
        return answers


def _ways(model: _Model, case: Case, callers: int) -> Mapping[str, Run]:
    return {"flash attention": decoding_run(case, callers, model.generate)}


if __name__ == "__main__":
    serve(Fastest(partial(_Model, int(sys.argv[1]), sys.argv[2]), _ways).answer, ["llama-cpp-python"])
