"""Weights as they are published: in 4 or 8 bits, with scales, in the layouts that libraries of quantization write.

Each layout is read by its tensors' names and shapes, and gives the weights that `transformers` has for the model
without its quantizer. None needs the library that has written it, or a GPU:

    gptq                  `qweight` (K / 8, N) int32, `qzeros`, `scales` (G, N), `g_idx` (K)
    awq                   `qweight` (K, N / 8) int32, columns in an order of its own, `qzeros`, `scales`
    compressed-tensors    `weight_packed` (N, K / 8) int32, or `weight` in 8 bits; `weight_scale`, `weight_zero_point`
    fp8                   `weight` in 8-bit floats, `weight_scale_inv` of blocks, or `weight_scale`
    mxfp4                 `_blocks` (.., K / 32, 16) uint8, `_scales` (.., K / 32): Open Compute Project, MX 1.0
    bitsandbytes          `weight` uint8 with `absmax` and `quant_map` (NF4, FP4), or int8 with `SCB`

K inputs and N outputs of a layer, G groups of inputs that share a scale, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from headway_export.errors import SourceError
from headway_export.rewriting import Blocks

_WORD_BITS: Final = 32
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of a word of AWQ, from its lowest bits on."""
_MXFP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MX_BIAS: Final = 127
FLOAT8: Final = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
_OF_ACTIVATIONS: Final = ("input_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale", "output_scale")
"""Ends of names of what only matters where activations or caches are quantized as they were when the weights were."""

Stored: TypeAlias = Mapping[str, Callable[[], Tensor]]
"""Reads a tensor of a folder, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A weight (N, K) in whole numbers: (codes - zeros) scales, by groups of columns."""

    codes: NDArray[np.uint8]
    """(N, K)."""
    scales: NDArray[np.float32]
    """(N, G)."""
    zeros: NDArray[np.uint8]
    """(N, G)."""
    groups: NDArray[np.int64]
    """(K,): the group of each column."""
    bits: int

    def widened(self) -> NDArray[np.float32]:
        """Returns the weight, (N, K)."""
        numbers = self.codes.astype(np.float32)
        numbers -= self.zeros[:, self.groups]
        numbers *= self.scales[:, self.groups]
        return numbers

    def blocks(self) -> Blocks | None:
        """Returns the weight as ONNX Runtime multiplies by it, or None if it has 8 bits or its groups no whole blocks.

        Columns of a group that lie apart (act-order) are brought together.
        """
        size = Blocks.SIZE
        if self.bits != Blocks.BITS or len(self.groups) % size:
            return None
        order = np.argsort(self.groups, kind="stable")
        by_block = self.groups[order].reshape(-1, size)
        if (by_block != by_block[:, :1]).any():
            return None
        is_ordered = bool((order == np.arange(len(order))).all())
        of_block = by_block[:, 0]
        return Blocks.pack(
            self.codes if is_ordered else self.codes[:, order],
            self.scales[:, of_block],
            self.zeros[:, of_block],
            order=None if is_ordered else order,
        )


Weight: TypeAlias = "Tensor | Codes"
Plain: TypeAlias = Mapping[str, Callable[[], Weight]]
"""Reads a weight of the model, by the name that it has without a quantizer."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way in which weights are quantized."""

    read: Callable[[Stored, Mapping[str, Any]], Plain]
    """Takes the tensors of a folder, and `quantization_config`."""
    check: Callable[[Mapping[str, Any]], str | None] = lambda _: None
    """Returns what of `quantization_config` is not read, or None."""


QUANTIZATIONS: Final = ("quantization_config", "compression_config")
"""Entries of `config.json` that say how weights are quantized."""


def quantization_of(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns `quantization_config` of a configuration; None: its weights are floats."""
    return next((found for name in QUANTIZATIONS if isinstance(found := content.get(name), dict)), None)


def check_quantization(owner: str, content: Mapping[str, Any]) -> None:
    """Checks that weights are stored in a layout that is read.

    Raises:
        SourceError: They are not.
    """
    if (quantization := quantization_of(content)) is None:
        return
    name = _method_name(quantization)
    known = ", ".join(METHODS)
    if (method := METHODS.get(name)) is None:
        raise SourceError(
            f"{owner}: its weights are quantized by {name or 'a method without a name'}, and those of {known} are "
            "read; export the model that it was made of"
        )
    if (unread := method.check(quantization)) is not None:
        raise SourceError(f"{owner}: its weights are quantized by {name} with {unread}; export what it was made of")


def describe_quantization(quantization: Mapping[str, Any]) -> str:
    """Returns what a person calls the quantization of weights."""
    weights = _weights_of(quantization)
    bits, group = (weights.get(name, quantization.get(name)) for name in ("num_bits", "group_size"))
    bits = bits or quantization.get("bits") or quantization.get("w_bit")
    group = group or quantization.get("q_group_size")
    parts = [_method_name(quantization)]
    parts += [f"{bits} bits"] if bits else []
    parts += [f"groups of {group}"] if isinstance(group, int) and group > 0 else []
    return ", ".join(parts)


def plain_weights(stored: Stored, quantization: Mapping[str, Any] | None) -> Plain:
    """Returns the weights of a model, each of which is read when it is asked for."""
    if quantization is None:
        return stored
    return METHODS[_method_name(quantization)].read(stored, quantization)


def stored_tensors(files: Iterable[Path]) -> dict[str, Callable[[], Tensor]]:
    """Opens files of safetensors, whose tensors are mapped when they are asked for."""
    found = _Stored()
    for file in files:
        opened: Any = safe_open(file, framework="pt")
        found |= {name: _reading(opened, name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    return found


class _Stored(dict[str, Callable[[], Tensor]]):
    """Tensors by name, which says what lacks where a weight is stored in parts."""

    def __missing__(self, name: str) -> NoReturn:
        raise SourceError(f"its weights lack {name}, a part of a quantized weight; fetch the folder again")


def _reading(opened: Any, name: str) -> Callable[[], Tensor]:
    return lambda: opened.get_tensor(name)


def _method_name(quantization: Mapping[str, Any]) -> str:
    name = str(quantization.get("quant_method") or "")
    return "compressed-tensors" if not name and "config_groups" in quantization else name


def _weights_of(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what `config_groups` of compressed-tensors says of the first weights."""
    groups = quantization.get("config_groups") or {}
    return next((group.get("weights") or {} for group in groups.values() if isinstance(group, dict)), {})


def _unpack(words: Tensor, bits: int, *, axis: int) -> NDArray[np.uint8]:
    """Takes words of 32 bits apart along an axis, from their lowest bits on: int32 (A, B) -> uint8."""
    array = np.moveaxis(words.numpy().view(np.uint32), axis, -1)
    shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)
    parts = np.empty((*array.shape, len(shifts)), np.uint8)
    for place, shift in enumerate(shifts):
        parts[..., place] = (array >> shift) & ((1 << bits) - 1)
    return np.moveaxis(parts.reshape(*array.shape[:-1], -1), -1, axis)


def _even_groups(width: int, count: int) -> NDArray[np.int64]:
    return np.arange(width) // -(-width // count)


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().numpy()


# GPTQ and AWQ


def _modules_with(stored: Stored, end: str) -> Iterator[str]:
    return (name.removesuffix(end) for name in stored if name.endswith(end))


def _with_rest(stored: Stored, weights: Plain, parts: Iterable[str]) -> Plain:
    """Returns quantized weights, and the tensors that are no part of one."""
    left_out = set(parts)
    rest = {name: read for name, read in stored.items() if name not in left_out and not name.endswith(_OF_ACTIVATIONS)}
    return {**rest, **weights}


def _named(modules: Iterable[str], *parts: str) -> Iterator[str]:
    return (f"{module}{part}" for module in modules for part in parts)


def _read_gptq(stored: Stored, quantization: Mapping[str, Any]) -> Plain:
    bits = int(quantization["bits"])
    shift = 0 if str(quantization.get("checkpoint_format", "")) == "gptq_v2" else 1  # zeros were stored less one

    def read(module: str) -> Codes:
        words, scales = stored[f"{module}.qweight"](), _floats(stored[f"{module}.scales"]())  # (K / 8, N), (G, N)
        codes = _unpack(words, bits, axis=0)  # (K, N)
        zeros = _unpack(stored[f"{module}.qzeros"](), bits, axis=1)[:, : codes.shape[1]]  # (G, N)
        zeros = (zeros + np.uint8(shift)) & np.uint8((1 << bits) - 1)
        index = stored.get(f"{module}.g_idx")
        groups = _even_groups(len(codes), len(scales)) if index is None else index().numpy().astype(np.int64)
        return Codes(codes=codes.T, scales=scales.T, zeros=zeros.T, groups=groups, bits=bits)

    modules = list(_modules_with(stored, ".qweight"))
    weights = {f"{module}.weight": _call(read, module) for module in modules}
    return _with_rest(stored, weights, _named(modules, ".qweight", ".qzeros", ".scales", ".g_idx"))


def _read_awq(stored: Stored, quantization: Mapping[str, Any]) -> Plain:
    bits = int(quantization.get("bits") or quantization.get("w_bit") or 4)
    places = np.argsort(_AWQ_ORDER)

    def columns(words: Tensor) -> NDArray[np.uint8]:
        found = _unpack(words, bits, axis=1)
        return found.reshape(len(found), -1, len(places))[..., places].reshape(len(found), -1)

    def read(module: str) -> Codes:
        codes, zeros = (columns(stored[f"{module}.{name}"]()) for name in ("qweight", "qzeros"))  # (K, N), (G, N)
        scales = _floats(stored[f"{module}.scales"]())
        groups = _even_groups(len(codes), len(scales))
        return Codes(codes=codes.T, scales=scales.T, zeros=zeros.T, groups=groups, bits=bits)

    modules = list(_modules_with(stored, ".qweight"))
    weights = {f"{module}.weight": _call(read, module) for module in modules}
    return _with_rest(stored, weights, _named(modules, ".qweight", ".qzeros", ".scales"))


def _check_gptq(quantization: Mapping[str, Any]) -> str | None:
    bits = quantization.get("bits")
    return None if bits in (4, 8) else f"{bits} bits; 4 and 8 are read"


def _check_awq(quantization: Mapping[str, Any]) -> str | None:
    version, bits = str(quantization.get("version", "gemm")).lower(), quantization.get("bits", 4)
    if version != "gemm":
        return f"the layout {version}; gemm is read"
    return None if bits == 4 else f"{bits} bits; 4 are read"


# compressed-tensors


_COMPRESSED: Final = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")


def _check_compressed(quantization: Mapping[str, Any]) -> str | None:
    groups = [group for group in (quantization.get("config_groups") or {}).values() if isinstance(group, dict)]
    formats = [quantization.get("format"), *(group.get("format") for group in groups)]
    if unread := [found for found in formats if found and found not in (*_COMPRESSED, "mixed-precision")]:
        return f"the format {unread[0]}; {', '.join(_COMPRESSED)} are read"
    if quantization.get("transform_config"):
        return "rotations of activations (transform_config)"
    for weights in (group.get("weights") or {} for group in groups):
        if (bits := weights.get("num_bits", 8)) not in (4, 8):
            return f"{bits} bits; 4 and 8 are read"
        if weights.get("type") == "float" and bits != 8:
            return f"floats of {bits} bits; 8 are read"
    return None


def _read_compressed(stored: Stored, quantization: Mapping[str, Any]) -> Plain:
    block = _weights_of(quantization).get("block_structure")

    def read_packed(module: str) -> Codes:
        words, scales = stored[f"{module}.weight_packed"](), _floats(stored[f"{module}.weight_scale"]())
        height, width = (int(size) for size in stored[f"{module}.weight_shape"]())
        bits = _WORD_BITS // -(-width // words.shape[1])
        codes = _unpack(words, bits, axis=1)[:, :width]
        scales = scales.reshape(height, -1)
        zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)  # what is stored has no sign
        if (packed := stored.get(f"{module}.weight_zero_point")) is not None:
            zeros = _unpack(packed(), bits, axis=0)[:height]
        index = stored.get(f"{module}.weight_g_idx")
        groups = _even_groups(width, scales.shape[1]) if index is None else index().numpy().astype(np.int64)
        return Codes(codes=codes, scales=scales, zeros=zeros, groups=groups, bits=bits)

    def read_stored(module: str) -> Weight:
        weight, scales = stored[f"{module}.weight"](), stored[f"{module}.weight_scale"]().float()
        if weight.dtype in FLOAT8:
            return _scaled(weight, scales, block)
        codes = (weight.numpy() ^ np.int8(-128)).view(np.uint8)  # + 128
        scales = scales.reshape(-1, 1 if scales.ndim < 2 else scales.shape[-1]).expand(len(codes), -1)
        zeros = np.full(scales.shape, 128, np.uint8)
        if (given := stored.get(f"{module}.weight_zero_point")) is not None:
            zeros = (zeros + given().numpy().reshape(-1, 1 if given().ndim < 2 else given().shape[-1])).astype(np.uint8)
        groups = _even_groups(codes.shape[1], scales.shape[1])
        return Codes(codes=codes, scales=_floats(scales), zeros=zeros, groups=groups, bits=8)

    weights: dict[str, Callable[[], Weight]] = {}
    modules = list(_modules_with(stored, ".weight_scale"))
    for module in modules:
        read = read_packed if f"{module}.weight_packed" in stored else read_stored
        weights[f"{module}.weight"] = _call(read, module)
    parts = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
    return _with_rest(stored, weights, _named(modules, *parts))


# Floats of 8 and 4 bits


def _scaled(weight: Tensor, scales: Tensor, block: object = None) -> Tensor:
    """Widens floats (.., N, K) by their scales: one, one a row, one a group of a row, or one a block of both axes."""
    found, scales = weight.float(), scales.float()
    if scales.ndim < found.ndim:  # one for all, or one for each matrix or row
        scales = scales.reshape(*scales.shape, *[1] * (found.ndim - scales.ndim))
    for axis in (-2, -1):
        size, count = found.shape[axis], scales.shape[axis]
        if count in (1, size):
            continue
        width = int(block[axis]) if isinstance(block, (list, tuple)) else -(-size // count)
        scales = scales.repeat_interleave(width, dim=axis).narrow(axis, 0, size)
    return found * scales


def _read_fp8(stored: Stored, quantization: Mapping[str, Any]) -> Plain:
    block = quantization.get("weight_block_size")

    def read(name: str, scales: str) -> Tensor:
        return _scaled(stored[name](), stored[scales](), block)

    ends = ("_scale_inv", "_scale")  # which multiply both
    scales = {name: f"{name}{end}" for end in ends for name in _modules_with(stored, end) if name in stored}
    return _with_rest(stored, {name: _call(read, name, scale) for name, scale in scales.items()}, scales.values())


def _check_fp8(quantization: Mapping[str, Any]) -> str | None:
    kind = quantization.get("fmt", "e4m3")
    return None if kind in ("e4m3", "e5m2") else f"floats of the kind {kind}; e4m3 and e5m2 are read"


def _read_mxfp4(stored: Stored, _: Mapping[str, Any]) -> Plain:
    values = torch.tensor(_MXFP4)

    def read(name: str) -> Tensor:
        pairs, exponents = stored[f"{name}_blocks"](), stored[f"{name}_scales"]()  # (E, N, K / 32, 16), (E, N, K / 32)
        found = torch.empty(*pairs.shape, 2)
        for expert, (some, powers) in enumerate(zip(pairs, exponents, strict=True)):
            scale = torch.ldexp(torch.ones(powers.shape), powers.int() - _MX_BIAS)[..., None]
            for place, codes in enumerate((some & 15, some >> 4)):
                found[expert, ..., place] = values[codes.int()] * scale
        return found.flatten(2).transpose(1, 2)  # (E, K, N)

    names = list(_modules_with(stored, "_blocks"))
    return _with_rest(stored, {name: _call(read, name) for name in names}, _named(names, "_blocks", "_scales"))


# bitsandbytes


def _read_bitsandbytes(stored: Stored, _: Mapping[str, Any]) -> Plain:
    mark = ".quant_state.bitsandbytes__"
    states = {name.partition(mark)[0]: name for name in stored if mark in name}

    def read_4_bits(name: str) -> Tensor:
        state = json.loads(bytes(stored[states[name]]().tolist()))
        largest = stored[f"{name}.absmax"]()
        if f"{name}.nested_absmax" in stored:  # the scales are quantized too
            steps = stored[f"{name}.nested_quant_map"]()[largest.int()].reshape(-1)
            scales = stored[f"{name}.nested_absmax"]().repeat_interleave(int(state["nested_blocksize"]))
            largest = steps * scales[: len(steps)] + float(state["nested_offset"])
        pairs = stored[name]().reshape(-1).view(torch.uint8)  # `bnb_4bit_quant_storage` may call the bytes otherwise
        codes = torch.stack((pairs >> 4, pairs & 15), dim=1).reshape(-1)
        numbers = stored[f"{name}.quant_map"]().float()[codes.int()]
        scales = largest.float().reshape(-1).repeat_interleave(int(state["blocksize"]))
        return (numbers * scales[: len(numbers)])[: int(np.prod(state["shape"]))].reshape(state["shape"])

    def read_8_bits(module: str) -> Codes:
        codes = (stored[f"{module}.weight"]().numpy() ^ np.int8(-128)).view(np.uint8)
        scales = _floats(stored[f"{module}.SCB"]() / 127)[:, np.newaxis]
        zeros, groups = np.full(scales.shape, 128, np.uint8), _even_groups(codes.shape[1], 1)
        return Codes(codes=codes, scales=scales, zeros=zeros, groups=groups, bits=8)

    modules = list(_modules_with(stored, ".SCB"))
    weights: dict[str, Callable[[], Weight]] = {name: _call(read_4_bits, name) for name in states}
    weights |= {f"{module}.weight": _call(read_8_bits, module) for module in modules}
    parts = [*states.values(), *_named(modules, ".SCB", ".weight_format")]
    parts += _named(states, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
    return _with_rest(stored, weights, parts)


def _call(read: Callable[..., Weight], *arguments: str) -> Callable[[], Weight]:
    return lambda: read(*arguments)


METHODS: Final[Mapping[str, Method]] = {
    "gptq": Method(_read_gptq, _check_gptq),
    "awq": Method(_read_awq, _check_awq),
    "compressed-tensors": Method(_read_compressed, _check_compressed),
    "fp8": Method(_read_fp8, _check_fp8),
    "mxfp4": Method(_read_mxfp4),
    "bitsandbytes": Method(_read_bitsandbytes),
}
"""By `quant_method`."""
