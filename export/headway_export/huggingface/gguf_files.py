"""Files of GGUF, the form of llama.cpp: configuration, tokenizer, chat template and weights in one file.

`transformers` reads them with the library `gguf`, and writes what it has read as a folder of its own. What it does not
read of a file, and what would change the answers, is refused here, or put in its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils as library

from headway_export.errors import SourceError
from headway_export.huggingface.plain import widened_bytes, write_weights
from headway_export.huggingface.published import Codes
from headway_export.rewriting import Blocks, digest_of
from headway_export.space import check_disk, check_memory
from headway_server.bundles import Precision
from headway_training.folders import first_line, quiet

SUFFIX: Final = ".gguf"
_LLAMA_3: Final = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA_3_LENGTH: Final = 8192
_UNNAMED: Final = ("rope_freqs.weight", "output.weight", "_exps.weight")
"""Ends of names of tensors that are read otherwise than by the library's table of names."""
_SET: Final = {
    ".attention.sliding_window": "sliding_window",
    ".attn_logit_softcapping": "attn_logit_softcapping",
    ".final_logit_softcapping": "final_logit_softcapping",
}
"""Entries of a file, and those of the configuration that the library does not set by them for each family."""
_SCALED_BY_WIDTH: Final = (("gemma2", 46), ("gemma3_text", 62))
"""Families and layers of those models whose scale of attention is that of hidden size / heads, as llama.cpp knows."""
_BLOCK: Final = 32
_Q4_0: Final = "Q4_0"


def find_gguf(path: Path) -> Path | None:
    """Returns the file of GGUF that a path is, or that a folder has in place of a model of `transformers`.

    Raises:
        SourceError: The folder has several.
    """
    if path.is_file() and path.suffix == SUFFIX:
        return path
    files = [] if not path.is_dir() or (path / "config.json").exists() else sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise SourceError(f"{path}: has {len(files)} files of GGUF ({files[0].name} is the first); give one of them")
    return files[0] if files else None


def describe_gguf(file: Path) -> str:
    """Returns what a person calls the precision of a file's weights."""
    kinds = [tensor.tensor_type.name for tensor in _opened(file).tensors if len(tensor.shape) > 1]
    return f"gguf, {max(kinds, key=kinds.count)}" if kinds else "gguf"


def write_descriptions(file: Path, folder: Path) -> None:
    """Writes configuration and tokenizer of a file into a folder.

    Raises:
        SourceError: The file cannot be read, or its architecture or its rotary positions are not known.
    """
    reader = _opened(file)
    if (scaling := _value(reader, ".rope.scaling.type")) not in (None, "none"):
        raise SourceError(f"{file}: its rotary positions are scaled ({scaling}), which is not read from GGUF")
    if unread := [tensor.name for tensor in reader.tensors if "rope_factors" in tensor.name]:
        raise SourceError(f"{file}: its rotary positions are scaled ({unread[0]}), which is not read from GGUF")
    config = _read(file, transformers.AutoConfig)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise SourceError(f"{file}: {config.model_type} is no causal language model, and no other is read from GGUF")
    config.architectures = [model_class.__name__]
    _set_unread(file, reader, config)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            config.rope_parameters = {**config.rope_parameters, **_scaling_of(file, tensor.data, config)}
    config.save_pretrained(folder)
    _read(file, transformers.AutoTokenizer).save_pretrained(folder)
    if (tokens := reader.fields.get("tokenizer.ggml.tokens")) is not None:
        _drop_tokens_past(len(tokens.data), folder / "tokenizer.json")


def unpack_weights(file: Path, folder: Path, precisions: Collection[Precision]) -> Mapping[bytes, Callable[[], Blocks]]:
    """Writes the weights of a file, in fp32, into the folder that has its configuration.

    Args:
        file: The file.
        folder: The folder.
        precisions: What is made of them.

    Returns:
        What reads the blocks of weights that are in 4 bits, by `digest_of`.

    Raises:
        SourceError: They are not those of the model, or do not fit on disk, or into memory, where they are held once.
    """
    count = sum(int(tensor.n_elements) for tensor in _opened(file).tensors)
    check_memory(str(file), count, is_mapped=True, least=1)
    check_disk(str(file), folder, widened_bytes(count, precisions))
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    model, report = _read(
        file, transformers.AutoModelForCausalLM, config=config, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise SourceError(f"{file}: {len(missing)} weights of {type(model).__name__} are not there ({missing[0]})")
    _check_all_read(file, model, config)
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        tensors.setdefault(tensor.data_ptr(), (name, tensor))  # tied ones once
    write_weights(folder, {name: partial(Tensor.detach, tensor) for name, tensor in tensors.values()})
    return _kept(file, config)


def _opened(file: Path) -> Any:
    try:
        import gguf  # noqa: PLC0415 (of an extra, and needed by nothing else)
    except ModuleNotFoundError as error:
        raise SourceError(f'{file}: {error}; install what reads it: pip install "headway-export[gguf,hf]"') from error
    try:
        return gguf.GGUFReader(file)
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{file}: cannot be read as GGUF ({first_line(error)}); fetch it again") from error


def _value(reader: Any, end: str) -> Any:
    return next((field.contents() for name, field in reader.fields.items() if name.endswith(end)), None)


def _read(file: Path, auto_class: Any, **options: Any) -> Any:
    try:
        with quiet():
            return auto_class.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True, **options)
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{file}: is not read ({first_line(error)})") from error


def _set_unread(file: Path, reader: Any, config: Any) -> None:
    """Sets entries of a configuration that change the answers and that the library leaves at its own values.

    Raises:
        SourceError: There is one that is not set.
    """
    for end, name in _SET.items():
        if (value := _value(reader, end)) is not None and hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "query_pre_attn_scalar"):
        by_width = (config.model_type, config.num_hidden_layers) in _SCALED_BY_WIDTH
        width = config.hidden_size // config.num_attention_heads if by_width else config.head_dim
        config.query_pre_attn_scalar = width
    rope = getattr(config, "rope_parameters", None) or {}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        ".rope.freq_base": rope.get("rope_theta"),
        ".rope.dimension_count": head * rope.get("partial_rotary_factor", 1.0) if "rope_theta" in rope else None,
    }
    for end, expected in found.items():
        value = _value(reader, end)
        if value is not None and expected is not None and not math.isclose(value, expected, rel_tol=1e-5):
            raise SourceError(
                f"{file}: {end[1:]} is {value:g} there, and transformers reads a {config.model_type} of GGUF with "
                f"{expected:g}; export the model that it was made of"
            )


def _check_all_read(file: Path, model: Any, config: Any) -> None:
    """Checks that a model has a place for each tensor of a file.

    Raises:
        SourceError: One was left out.
    """
    reader = _opened(file)
    kind = library.TENSOR_PROCESSORS.get(_value(reader, "general.architecture"), library.TensorProcessor)
    names = library.get_gguf_hf_weights_map(model, kind(config.to_dict()))
    unread = [tensor.name for tensor in reader.tensors if tensor.name not in names]
    if unread := [name for name in unread if not name.endswith(_UNNAMED)]:
        raise SourceError(
            f"{file}: {type(model).__name__} of transformers has no place for {len(unread)} of its tensors "
            f"({unread[0]}); export the model that it was made of"
        )


def _drop_tokens_past(count: int, file: Path) -> None:
    """Drops the tokens that `transformers` has added to those of a file, such as an end of texts by another name."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
    file.write_text(json.dumps(content), encoding="utf-8")


def _scaling_of(file: Path, factors: NDArray[np.float32], config: Any) -> dict[str, Any]:
    """Returns the scaling of Llama 3 that divides the frequencies of rotary positions by these factors, (K / 2,).

    Raises:
        SourceError: They are other factors.
    """
    parameters = {
        **config.rope_parameters,
        **_LLAMA_3,
        "factor": float(factors.max()),
        "original_max_position_embeddings": _LLAMA_3_LENGTH,
    }
    width = 2 * len(factors)
    plain = parameters["rope_theta"] ** -(np.arange(0, width, 2) / width)
    turns = _LLAMA_3_LENGTH * plain / (2 * math.pi)  # within the original length
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / parameters["factor"] + share)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise SourceError(f"{file}: its rotary positions are scaled by factors that are not those of Llama 3")
    return parameters


def _kept(file: Path, config: Any) -> Mapping[bytes, Callable[[], Blocks]]:
    """Finds the weights of a file that are in blocks of 4 bits around zero (Q4_0)."""
    reader = _opened(file)
    processors = library.TENSOR_PROCESSORS
    processor = processors.get(_value(reader, "general.architecture"), library.TensorProcessor)(config.to_dict())
    kept: dict[bytes, Callable[[], Blocks]] = {}
    for tensor in reader.tensors:
        if tensor.tensor_type.name != _Q4_0 or len(tensor.shape) != 2:
            continue
        rows = np.arange(len(tensor.data))[:, None]
        order = processor.process(weights=rows, name=tensor.name).weights[:, 0]  # some architectures have them permuted
        codes = _codes_of(tensor.data[order])
        if codes.blocks() is not None:
            kept[digest_of(codes.widened())] = _reading(tensor.data, order)
    return kept


def _reading(data: NDArray[np.uint8], order: NDArray[np.int64]) -> Callable[[], Blocks]:
    def read() -> Blocks:
        blocks = _codes_of(data[order]).blocks()
        assert blocks is not None, "it was looked at before"
        return blocks

    return read


def _codes_of(data: NDArray[np.uint8]) -> Codes:
    """Reads Q4_0: of each 32 numbers a scale, fp16, and 16 bytes, whose upper halves are the last 16 numbers."""
    blocks = data.reshape(len(data), -1, 2 + _BLOCK // 2)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    halves = blocks[..., 2:]
    codes = np.concatenate((halves & 15, halves >> 4), axis=-1).reshape(len(data), -1)
    zeros = np.full(scales.shape, 8, np.uint8)
    return Codes(codes=codes, scales=scales, zeros=zeros, groups=np.arange(codes.shape[1]) // _BLOCK, bits=4)
