"""Folders of quantized weights, as libraries of quantization publish them: packed here by the layouts' definitions.

Every layout takes a matrix (N, K) and returns what a folder has in its place, and the numbers that these stand for.
"""

import json
from pathlib import Path

import numpy as np
import tiny_huggingface as tiny
import torch
from safetensors.torch import load_file, save_file

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
RNG = np.random.default_rng(11)


def bytes_of(codes, bits):
    """Codes with the first in the lowest bits, bytes in the order of a processor's words."""
    codes = codes.astype(np.uint8)
    return codes if bits == 8 else codes[..., ::2] + 16 * codes[..., 1::2]


def words(codes, bits):
    """(A, B) -> int32 (A, B bits / 32)."""
    return torch.from_numpy(np.ascontiguousarray(bytes_of(codes, bits)).view("<i4").copy())


def halves(array):
    return torch.from_numpy(np.ascontiguousarray(array)).half()


def whole_numbers(matrix, bits, size, *, symmetric, groups=None):
    """Codes (N, K), scales and zeros (N, G), and the numbers (N, K) that they stand for."""
    height, width = matrix.shape
    groups = np.arange(width) // size if groups is None else groups
    top, count = 2**bits - 1, int(groups.max()) + 1
    codes, numbers = np.zeros((height, width), int), np.zeros((height, width), np.float32)
    scales, zeros = np.zeros((height, count), np.float32), np.zeros((height, count), int)
    for row in range(height):
        for group in range(count):
            places = np.flatnonzero(groups == group)
            some = matrix[row, places]
            low, high = min(some.min(), 0), max(some.max(), 0)
            step = max(abs(low), high) / (top // 2) if symmetric else (high - low) / top
            scale = np.float32(np.float16(step))
            zero = (top + 1) // 2 if symmetric else int(np.clip(round(-low / scale), 1, top))
            code = np.clip(np.round(some / scale) + zero, 0, top).astype(int)
            codes[row, places], scales[row, group], zeros[row, group] = code, scale, zero
            numbers[row, places] = [(int(one) - zero) * scale for one in code]
    return codes, scales, zeros, numbers


def gptq(matrix, *, bits=4, size=128, symmetric=True, act_order=False, less=1):
    width = matrix.shape[1]
    groups = RNG.permutation(np.arange(width) // size) if act_order else None
    codes, scales, zeros, numbers = whole_numbers(matrix, bits, size, symmetric=symmetric, groups=groups)
    index = np.arange(width) // size if groups is None else groups
    stored = {
        ".qweight": words(codes, bits).T,
        ".qzeros": words((zeros - less).T, bits),
        ".scales": halves(scales.T),
        ".g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    return stored, numbers


def awq(matrix, size=64):
    codes, scales, zeros, numbers = whole_numbers(matrix, 4, size, symmetric=False)

    def interleaved(columns):  # (A, N), eight of them in a word: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on
        return words(columns.reshape(len(columns), -1, 4, 2).swapaxes(2, 3).reshape(columns.shape), 4)

    stored = {".qweight": interleaved(codes.T), ".qzeros": interleaved(zeros.T), ".scales": halves(scales.T)}
    return stored, numbers


def packed(matrix, bits=4, size=32, symmetric=True):
    codes, scales, zeros, numbers = whole_numbers(matrix, bits, size, symmetric=symmetric)
    stored = {
        ".weight_packed": words(codes, bits),
        ".weight_scale": halves(scales).bfloat16() if size == 64 else halves(scales),
        ".weight_shape": torch.tensor(matrix.shape),
    }
    if size == 64:
        scales = stored[".weight_scale"].float().numpy()
        numbers = (codes - zeros.repeat(size, axis=1)) * scales.repeat(size, axis=1)
    if not symmetric:
        stored[".weight_zero_point"] = words(zeros.T, bits).T
    return stored, numbers


def int8(matrix):
    codes, scales, zeros, numbers = whole_numbers(matrix, 8, matrix.shape[1], symmetric=True)
    stored = {".weight": torch.from_numpy((codes - zeros).astype(np.int8)), ".weight_scale": halves(scales)}
    return stored, numbers


def scb(matrix):
    """bitsandbytes' int8: 127 is the largest magnitude of a row."""
    largest = np.abs(matrix).max(axis=1)
    codes = np.round(matrix / largest[:, None] * 127).astype(np.int8)
    stored = {".weight": torch.from_numpy(codes), ".SCB": torch.from_numpy(largest)}
    return stored, codes * (largest / np.float32(127))[:, None]


def fp8(matrix, rows, columns, name=".weight_scale", dtype=torch.float8_e4m3fn):
    """One scale for blocks of so many rows and columns."""
    height, width = matrix.shape
    scales = np.zeros((-(-height // rows), -(-width // columns)), np.float32)
    stored, numbers = torch.zeros(matrix.shape, dtype=dtype), np.zeros_like(matrix)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = np.abs(matrix[block]).max() / 448
            stored[block] = torch.from_numpy(matrix[block] / scales[i, j]).to(dtype)
            numbers[block] = stored[block].float().numpy() * scales[i, j]
    scale = torch.from_numpy(scales[0] if scales.size == 1 else scales)
    return {".weight": stored, name: scale}, numbers


NF4 = np.array(
    [-1, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1]
)


def nf4(matrix, nested):
    flat, values = matrix.reshape(-1, 64), NF4.astype(np.float32)
    largest = np.abs(flat).max(axis=1)
    codes = np.abs(flat[..., None] / largest[:, None, None] - values).argmin(axis=-1)
    state = {"blocksize": 64, "shape": list(matrix.shape), "quant_type": "nf4", "dtype": "float16"}
    stored = {".weight.absmax": torch.from_numpy(largest)}
    if nested:
        steps = np.linspace(-1, 1, 256, dtype=np.float32)
        offset = largest.mean()
        parts = np.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
        outer = np.abs(parts).max(axis=1)
        inner = np.abs(parts[..., None] / outer[:, None, None] - steps).argmin(axis=-1)
        largest = (steps[inner] * outer[:, None]).reshape(-1)[: len(largest)] + offset
        state |= {"nested_blocksize": 256, "nested_offset": float(offset)}
        stored = {
            ".weight.absmax": torch.from_numpy(inner.reshape(-1)[: len(largest)].astype(np.uint8)),
            ".weight.nested_absmax": torch.from_numpy(outer),
            ".weight.nested_quant_map": torch.from_numpy(steps),
        }
    pairs = codes.reshape(-1, 2)
    stored |= {
        ".weight": torch.from_numpy((16 * pairs[:, 0] + pairs[:, 1]).astype(np.uint8))[:, None],
        ".weight.quant_map": torch.from_numpy(values),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (values[codes] * largest.astype(np.float32)[:, None]).reshape(matrix.shape)


def compressed(form, bits=4, **weights):
    groups = {"group_0": {"weights": {"num_bits": bits, **weights}, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_FLOATS = compressed("float-quantized", 8, type="float")
_BITS_AND_BYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
LAYOUTS = {
    "gptq": (gptq, {}, _GPTQ),
    "gptq, not symmetric": (gptq, {"symmetric": False, "size": 32}, {**_GPTQ, "group_size": 32, "sym": False}),
    "gptq, version 2": (gptq, {"symmetric": False, "less": 0}, {**_GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq, act-order": (gptq, {"act_order": True, "size": 32}, {**_GPTQ, "desc_act": True, "group_size": 32}),
    "gptq, 8 bits": (gptq, {"bits": 8}, {**_GPTQ, "bits": 8}),
    "awq": (awq, {}, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}),
    "pack-quantized": (packed, {}, compressed("pack-quantized", group_size=32)),
    "pack-quantized, zeros": (packed, {"symmetric": False, "size": 64}, compressed("pack-quantized", group_size=64)),
    "pack-quantized, 8 bits": (packed, {"bits": 8, "size": 256}, compressed("pack-quantized", 8)),
    "int-quantized": (int8, {}, compressed("int-quantized", 8)),
    "naive-quantized": (fp8, {"rows": 1, "columns": 256}, {**_FLOATS, "format": "naive-quantized"}),
    "float-quantized": (fp8, {"rows": 256, "columns": 256}, _FLOATS),
    "float-quantized, blocks": (
        fp8,
        {"rows": 96, "columns": 96},
        compressed("float-quantized", 8, type="float", strategy="block", block_structure=[96, 96]),
    ),
    "fp8": (
        fp8,
        {"rows": 96, "columns": 96, "name": ".weight_scale_inv"},
        {"quant_method": "fp8", "weight_block_size": [96, 96]},
    ),
    "fp8, e5m2": (
        fp8,
        {"rows": 256, "columns": 256, "name": ".weight_scale", "dtype": torch.float8_e5m2},
        {"quant_method": "fp8", "fmt": "e5m2"},
    ),
    "nf4": (nf4, {"nested": False}, _BITS_AND_BYTES),
    "nf4, nested": (nf4, {"nested": True}, _BITS_AND_BYTES),
    "bitsandbytes, 8 bits": (scb, {}, {**_BITS_AND_BYTES, "load_in_4bit": False, "load_in_8bit": True}),
}
"""What packs a matrix, its arguments, and `quantization_config`, by layout."""


def quantize(folder: Path, layout: str) -> dict[str, np.ndarray]:
    """Quantizes the layers of a folder, in place; returns the numbers of all its weights then."""
    pack, arguments, quantization = LAYOUTS[layout]
    stored, numbers = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name], numbers[name] = tensor.bfloat16(), tensor.bfloat16().float().numpy()
            continue
        parts, numbers[name] = pack(tensor.numpy(), **arguments)
        stored |= {f"{module}{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, quantization_config=quantization)
    return numbers


def change(folder: Path, **values) -> None:
    """Changes entries of `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def write_llama(folder: Path, **changes) -> Path:
    """Writes a Llama whose layers are wide enough for groups of 128."""
    tiny.write_model(folder, "llama", **{**SIZES, **changes})
    tiny.write_tokenizer(folder, frame="<s> $A")
    return folder
