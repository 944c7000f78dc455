"""Files of GGUF, written with the library of that name from a tiny Llama; queries and keys as llama.cpp has them."""

import json
from pathlib import Path

import gguf
import numpy as np
import tiny_huggingface as tiny
import torch
import transformers
from safetensors.torch import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(matrix, num_heads):
    """Rows of a head in the order of llama.cpp's rotary positions."""
    height, width = matrix.shape
    return matrix.reshape(num_heads, 2, height // num_heads // 2, width).swapaxes(1, 2).reshape(height, width)


def write_gguf(folder: Path, file: Path, kind: str, **metadata) -> dict[str, np.ndarray]:
    """Writes a folder of a Llama as a file; returns the numbers that its weights stand for.

    Args:
        folder: The folder.
        file: The file.
        kind: The type of its matrices.
        metadata: Further entries, or tensors where they are arrays.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, config)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    for key, value in metadata.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(f"{key}.weight", value)
        else:
            writer.add_string(f"llama.{key}", value)
    numbers = {}
    asked = gguf.GGMLQuantizationType[kind]
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, array = name.removesuffix(".weight"), tensor.float().numpy()
        part = module.split(".", 3)[-1] if module.startswith("model.layers") else module
        place = f"blk.{module.split('.')[2]}." if module.startswith("model.layers") else ""
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
        data = array if heads is None else interleaved(array, config[heads])
        if array.ndim == 1:
            writer.add_tensor(f"{place}{NAMES[part]}.weight", data)
            numbers[name] = array
            continue
        packed = pack(data, asked)
        writer.add_tensor(f"{place}{NAMES[part]}.weight", packed, raw_dtype=asked)
        numbers[name] = array if heads is None else np.empty_like(array)
        found = gguf.dequantize(packed, asked)
        if heads is None:
            numbers[name] = found
        else:
            order = interleaved(np.arange(len(array))[:, None], config[heads])[:, 0]
            numbers[name][order] = found
    finish(writer)
    return numbers


def write_family(file: Path, prefix: str, architecture: str, **changes):
    """Writes a random model of another family as a file of fp32, as llama.cpp converts it; returns the model."""
    sizes = {**tiny.SIZES, "hidden_size": 64, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 2e-5, **changes}
    config = getattr(transformers, f"{prefix}{'Text' if prefix == 'Gemma3' else ''}Config")(**sizes)
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, architecture)
    rope = config.rope_parameters
    theta = (rope if "rope_theta" in rope else rope["full_attention"])["rope_theta"]
    describe(writer, {**config.to_dict(), "rope_parameters": {"rope_theta": theta}}, head=sizes["head_dim"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    tiny.write_tokenizer(file.parent, frame="<s> $A")
    tokenizer = json.loads((file.parent / "tokenizer.json").read_text())
    if architecture.startswith("gemma"):
        names = {"<s>": "<bos>", "</s>": "<eos>", f"<{tiny.WORDS - 1}>": "<mask>"}
        vocabulary = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
    add_tokenizer(writer, tokenizer)
    writer.add_unk_token_id(3)
    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, part = name.rpartition(".")
        array = tensor.numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(f"{names.get_name(module)}.{part}", array)
    finish(writer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (file.parent / name).unlink()
    return model


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer, config, head=None):
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head or config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer, tokenizer):
    model = tokenizer["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [gguf.TokenType.CONTROL if index < 4 else gguf.TokenType.NORMAL for index in range(len(pieces))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def pack(matrix, kind):
    """Quantizes a matrix, or draws blocks of a kind that the library does not quantize to."""
    try:
        return gguf.quantize(matrix, kind)
    except NotImplementedError:
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (len(matrix), matrix.shape[1] // size, num_bytes)
        blocks = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
        for first in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}[kind.name]:
            blocks[..., first : first + 2] = np.array([0.004], np.float16).view(np.uint8)
        return blocks.reshape(len(matrix), -1)
