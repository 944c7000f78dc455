"""What a model folder of Hugging Face `transformers` says of itself: read once, for training and for export.

No code that lies in a folder is run. Errors are `CheckpointError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_training.errors import CheckpointError
from headway_training.padding import keep_padding_out
from headway_training.positions import longest_text

CONFIG_FILE: Final = "config.json"
MAX_LENGTH: Final = 2048
"""Most tokens of a text where nobody asks for more and the model takes more."""
_TOKENIZER_FILE: Final = "tokenizer.json"
_ADAPTER_FILE: Final = "adapter_config.json"
_SAFETENSORS: Final = "model.safetensors"
_PICKLE: Final = "pytorch_model.bin"
TIMM: Final = "timm_wrapper"
"""What `transformers` calls a model of timm, whose folders state no model type."""
_OTHER_FOLDERS: Final = {
    "model_index.json": ", but a pipeline of diffusers, which `headway-export hf FOLDER` reads from a folder",
    "open_clip_config.json": ", but a model of open_clip, which is not exported, if there is no folder of transformers",
    "consolidated.safetensors": ", but weights as their makers keep them; fetch the folder of transformers",
    "params.json": ", but weights as their makers keep them; fetch the folder of transformers",
    "hyperparams.yaml": ", but a model of SpeechBrain, which is not exported",
    "saved_model.pb": ", but a model of TensorFlow, which is not exported",
    "model.onnx": ", but a graph of ONNX, which has no module to export",
}
"""What a folder without a configuration is, by a file that tells it."""
_OTHER_WEIGHTS: Final = {"tf_model.h5": "TensorFlow", "model.ckpt.index": "TensorFlow", "flax_model.msgpack": "Flax"}
"""Weights that are not read, and whose they are."""
_INDEX: Final = ".index.json"
_FLOAT_BYTES: Final = 4
_MOST_LAYERS_A_WEIGHT: Final = 100
"""A configuration that names more layers for each weight than that is wrong."""


# Configuration


def read_configuration(path: Path) -> dict[str, Any]:
    """Reads `config.json` of a folder.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    file = path / CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (path / _ADAPTER_FILE).exists():
            raise CheckpointError(
                f"{path}: holds an adapter ({_ADAPTER_FILE}) and no model; merge it into its model first, which "
                "`merge_and_unload` of peft does"
            ) from None
        names = {found.name for found in path.iterdir()}
        what = next((said for name, said in _OTHER_FOLDERS.items() if name in names), "")
        raise CheckpointError(f"{path}: has no {CONFIG_FILE}, so it is no model folder of transformers{what}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: is not a JSON object")
    if content.get("model_type") is None and {"architecture", "pretrained_cfg"} <= content.keys():
        head = "TimmWrapperForImageClassification" if content.get("num_classes") else "TimmWrapperModel"
        return content | {"model_type": TIMM, "architectures": [head]}
    if content.get("model_type") is None:
        raise CheckpointError(
            f"{file}: states no model_type, so it is of another library than transformers (NeMo and others have "
            "such a file), whose models are not read"
        )
    return content


def parse_configuration(path: Path, content: Mapping[str, Any]) -> Any:
    """Returns a configuration as `transformers` parses it.

    Raises:
        CheckpointError: It knows no such model, or does not compute what the model is.
    """
    model_type = content.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        if content.get("auto_map"):
            raise CheckpointError(
                f"{path}: model type {model_type} needs code that lies in the folder (auto_map), and no code of a "
                "folder is ever run"
            )
        raise CheckpointError(
            f"{path}: model type {model_type} is not one that transformers {transformers.__version__} knows; "
            "a newer version may"
        )
    if model_type == TIMM and find_spec("timm") is None:
        raise CheckpointError(
            f"{path}: is a model of timm, which is not installed; install 'headway-export[timm]', and the "
            "torchvision that fits torch"
        )
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises many kinds
        raise CheckpointError(f"{path / CONFIG_FILE}: cannot be read ({first_line(error)})") from error
    if model_type == TIMM and config.model_args:  # which newer folders say twice
        config.model_args = {name: value for name, value in config.model_args.items() if name != "num_classes"}
    if (reason := _unread(config)) is not None:
        raise CheckpointError(f"{path}: {reason}")
    return config


def _unread(config: Any) -> str | None:
    """Says why no text is read by a configuration; None: texts are."""
    kind = config.model_type
    if kind == "mra" or (kind == "yoso" and not config.use_expectation):
        without = "computes zeros" if kind == "mra" else "does not run"
        return (
            f"{kind} attends by a kernel for CUDA that transformers fetches as code, and {without} without it; train a "
            "model of another family on the same data"
        )
    if kind == "xmod" and config.default_language is None:
        return (
            f"does not say which adapter reads a text; write default_language into {CONFIG_FILE}, one of "
            f"{', '.join(config.languages)}"
        )
    if kind == "nystromformer" and config.num_landmarks != config.segment_means_seq_len:
        return (
            f"reads texts of exactly {config.segment_means_seq_len} tokens (segment_means_seq_len), as it has "
            f"{config.num_landmarks} landmarks (num_landmarks); train a model of another family on the same data"
        )
    return None


def labels_of(config: Any) -> tuple[str, ...]:
    """The names of a classifier's outputs, in their order; numbered ones where a family states their count alone."""
    names = config.id2label or {index: f"LABEL_{index}" for index in range(config.num_labels)}
    return tuple(str(names[index]) for index in range(config.num_labels))


def padding_of(config: Any, tokenizer: Any) -> int | None:
    """The token that fills up a batch: the model's, where it has one, or else that of its tokenizer.

    A model may count positions from its own (RoBERTa), or find the end of a text by it (a decoder that classifies).
    """
    own = config.get_text_config().pad_token_id
    return tokenizer.pad_token_id if own is None else int(own)


# Tokenizer


def read_tokenizer(path: Path, config: Any) -> Any:
    """Returns the tokenizer as `transformers` reads it, which has one of the library `tokenizers` inside.

    Raises:
        CheckpointError: There is none that can be read, or it is not the model's.
    """
    read = open_tokenizer(path)
    try:
        tokenizer = Tokenizer.from_str(read.backend_tokenizer.to_str())
    except Exception as error:  # the library raises many kinds
        raise CheckpointError(
            f"{path}: has no tokenizer that can be read ({first_line(error)}); it needs {_TOKENIZER_FILE}"
        ) from error
    check_vocabulary(path, config, tokenizer)
    return read


def open_tokenizer(path: Path) -> Any:
    """Returns the tokenizer as `transformers` reads it.

    Raises:
        CheckpointError: There is none that can be read.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises many kinds
        raise CheckpointError(
            f"{path}: has no tokenizer that can be read ({first_line(error)}); it needs {_TOKENIZER_FILE}"
        ) from error


def plain_tokenizer(read: Any) -> Tokenizer:
    """Returns what is inside a tokenizer of `transformers`, without padding and cutting; each call a new one."""
    tokenizer = Tokenizer.from_str(read.backend_tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def check_vocabulary(path: Path, config: Any, tokenizer: Tokenizer) -> None:
    """Checks that a tokenizer gives no id that the model does not know.

    Raises:
        CheckpointError: It does, or the model has no vocabulary.
    """
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise CheckpointError(f"{path}: {config.model_type} states no vocab_size, so it reads no tokens of a tokenizer")
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= vocabulary:
        raise CheckpointError(
            f"{path}: the tokenizer has a token of id {largest}, and the model's vocabulary ends at "
            f"{vocabulary - 1}; they do not belong together"
        )


# Weights


def check_pickle(path: Path, there: Collection[str], *, allow_pickle: bool = False) -> None:
    """Checks, by the names of a folder's files, that weights can be read without running code.

    Args:
        path: The folder, for the message.
        there: Names of all files in it, or of those that can be fetched.
        allow_pickle: True if weights may be pickled.

    Raises:
        CheckpointError: They are pickled, and that is not allowed.
    """
    stored = [name for kind in (_SAFETENSORS, _PICKLE) for name in (kind, f"{kind}{_INDEX}") if name in there]
    if stored and stored[0].startswith(_PICKLE) and not allow_pickle:
        raise CheckpointError(
            f"{path}: give --allow-pickle to export it if you trust where it comes from, or convert it to safetensors: "
            f"its weights are pickled ({stored[0]}), and a pickle may run any code when it is read"
        )


def weight_files(path: Path, there: Collection[str], *, allow_pickle: bool = False) -> list[str]:
    """Returns the names of the files that hold a model's weights: safetensors, or else pickled ones.

    Args:
        path: The model's folder, which has the indices of shards.
        there: Names of all files in it, or of those that can be fetched.
        allow_pickle: True if they may be pickled.

    Raises:
        CheckpointError: There are none, one is missing, or they are pickled and that is not allowed.
    """
    check_pickle(path, there, allow_pickle=allow_pickle)
    for name in (_SAFETENSORS, _PICKLE):
        index = f"{name}{_INDEX}"
        files = [name] if name in there else _shards(path / index) if index in there else []
        if missing := [file for file in files if file not in there]:
            raise CheckpointError(f"{path}: {index} names {missing[0]}, which is not there; fetch the folder again")
        if files:
            return files
    found = next((name for name in _OTHER_WEIGHTS if name in there), "")
    other = f"; those of {_OTHER_WEIGHTS[found]} ({found}) are not read, convert them to safetensors" if found else ""
    raise CheckpointError(f"{path}: has no weights ({_SAFETENSORS}, or its shards with an index){other}")


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: cannot be read as an index of shards ({error})") from error
    return [str(name) for name in names]


def count_weights(path: Path, *, allow_pickle: bool = False) -> int:
    """Checks, by their headers, that a model's weights are there and whole, and returns how many numbers they are.

    Raises:
        CheckpointError: They are not, or they are pickled and that is not allowed.
    """
    count = 0
    for name in weight_files(path, {file.name for file in path.iterdir()}, allow_pickle=allow_pickle):
        file = path / name
        if not name.endswith(".safetensors"):  # in 16 bits at least, and nothing of it is read
            count += file.stat().st_size // _FLOAT_BYTES
            continue
        try:
            count += _num_weights(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
            raise CheckpointError(
                f"{file}: cannot be read as safetensors ({first_line(error)}); fetch it again"
            ) from error
    return count


def check_layers(path: Path, config: Any) -> None:
    """Checks that a configuration has no more layers than weights could be of, since to make each takes its time.

    Weights that are pickled are not counted. ALBERT's layers share their weights, 24 of them at most.

    Raises:
        CheckpointError: It has.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= _MOST_LAYERS_A_WEIGHT:
        return
    files = list(path.glob("*.safetensors"))
    try:
        num_tensors = sum(len(_header(file)[0]) for file in files)
    except (OSError, ValueError, AttributeError, OverflowError, MemoryError):
        return  # which is told where weights are read
    if files and layers > _MOST_LAYERS_A_WEIGHT * num_tensors:
        raise CheckpointError(
            f"{path}: config.json names {layers:,} layers, and the folder has {num_tensors:,} weights; correct it, or "
            "fetch the folder again"
        )


def _header(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns what a file of safetensors tells of its weights, and how many bytes it has until they begin."""
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_bytes))
    return [entry for name, entry in header.items() if name != "__metadata__"], 8 + header_bytes


def _num_weights(file: Path) -> int:
    """Returns how many numbers a file of safetensors holds, by its header.

    Raises:
        ValueError: The file ends before its weights do.
    """
    entries, start = _header(file)
    whole = start + max((entry["data_offsets"][1] for entry in entries), default=0)
    if (found := file.stat().st_size) != whole:
        raise ValueError(f"it has {found:,} bytes, and its header tells of {whole:,}")
    return sum(math.prod(entry["shape"]) for entry in entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with a folder's weights."""

    model: Any
    """In fp32 and evaluation mode."""
    missing: tuple[str, ...]
    """Names of its weights that the folder does not have."""
    mismatched: tuple[str, ...]
    """Of those that are of another shape there."""


def load_model(
    path: Path, config: Any, auto_class: Any, task: str, *, attention: str = "eager", allow_pickle: bool = False
) -> LoadedModel:
    """Loads a folder's weights; those that are missing or of another shape are drawn.

    Args:
        path: The folder.
        config: The configuration that the model is made by.
        auto_class: The `Auto` class of `transformers` that makes models of the task.
        task: Named in errors.
        attention: Name of the attention that the model is made with.
        allow_pickle: True if weights may be pickled.

    Raises:
        CheckpointError: They cannot be read; it comes from the library's own error.
    """
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise CheckpointError(
            f"{path}: its weights are quantized ({method}), and only headway-export reads such; take the model that it "
            "was made of"
        )
    check_layers(path, config)
    try:
        with quiet():
            model, report = auto_class.from_pretrained(
                path,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=not allow_pickle or None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # the library raises many kinds
        raise CheckpointError(f"{path}: cannot be loaded for {task} ({first_line(error)})") from error
    missing, mismatched = (
        tuple(key if isinstance(key, str) else str(key[0]) for key in report[kind])  # some with their shapes
        for kind in ("missing_keys", "mismatched_keys")
    )
    keep_padding_out(model)
    return LoadedModel(model=model.eval(), missing=missing, mismatched=mismatched)


# Length


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLength:
    """How long texts a model reads, in tokens, special ones included."""

    limit: int | None
    """Most; None: positions are relative, and have no end."""
    usual: int
    """Most where nobody asks for another length."""
    has_table: bool
    """True if positions are looked up in a table, past whose end there is nothing."""


def length_of(model: nn.Module, config: Any, read: Callable[[Tensor, Tensor], object] | None = None) -> TextLength:
    """Finds how long texts a model reads: by what its configuration states, and by the rows of its tables.

    Args:
        model: The model, in evaluation mode; its weights need no storage (`longest_text`).
        config: Its configuration.
        read: Runs it on ids and mask, where it is not called as models of texts are.
    """
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)  # the latter: MPT
    stated = int(stated) if isinstance(stated, int) and stated > 0 else None
    rows = longest_text(read or _reading(model, config), ordinary_tokens(config))
    limit = min((one for one in (stated, rows) if one is not None), default=None)
    usual = limit or getattr(text, "n_positions", None) or MAX_LENGTH
    return TextLength(limit=limit, usual=min(int(usual), MAX_LENGTH), has_table=rows is not None)


def check_reading(
    path: Path,
    read: Callable[[Tensor, Tensor], object],
    *,
    name: str,
    config: Any,
    tokenizer: Tokenizer,
    longest: int,
) -> None:
    """Runs a model on the shortest text that there may be, and on the longest one.

    Args:
        path: Its folder.
        read: Runs it on ids and mask, int64 (1, T).
        name: What it is called in errors.
        config: Its configuration.
        tokenizer: Its tokenizer.
        longest: Tokens of the longest text; 0: the shortest alone is tried.

    Raises:
        CheckpointError: It does not read one.
    """
    shortest = max(1, len(tokenizer.encode("a").ids))
    for length in (shortest, longest) if longest else (shortest,):
        ids = torch.full((1, length), ordinary_tokens(config)[0])
        try:
            with torch.inference_mode(), quiet():
                read(ids, torch.ones_like(ids))
        except Exception as error:  # whatever its code raises
            raise CheckpointError(
                f"{path}: {name} does not read a text of {length} tokens by itself ({first_line(error)}); not supported"
            ) from error


def _reading(model: nn.Module, config: Any) -> Callable[[Tensor, Tensor], object]:
    def read(ids: Tensor, mask: Tensor) -> object:
        target = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        return model(input_ids=ids, attention_mask=mask, **target)

    return read


def ordinary_tokens(config: Any) -> list[int]:
    """Some tokens from the middle of a vocabulary that neither begin, end nor fill up a text."""
    text = config.get_text_config()
    size = int(text.vocab_size)
    special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    return [token for token in range(size // 2, size) if token not in special][:64]


# The library


@contextmanager
def quiet() -> Iterator[None]:
    """Lets transformers report through what it returns, and not on the terminal."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        transformers.logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, with the next if that is only its heading, or the error's name.

    Of a package that is missing it is how to install it.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs a package that is not installed: pip install {error.name.partition('.')[0]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
