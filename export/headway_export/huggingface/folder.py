"""A model folder: configuration, weights, tokenizer, and what it says of itself, whatever kind of model it holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from headway_export.errors import SourceError
from headway_export.given import GivenInputs
from headway_export.graphs import parameter_count
from headway_export.source import EvaluationData, ExportSource, limits_of, read_evaluation
from headway_server.bundles import TOKENIZER_FILE, Architecture, Languages, Origin, Task
from headway_server.runtime import available_bytes

DEFAULT_MAX_LENGTH: Final = 2048
"""Most tokens of a bundle if nothing else is asked for; the proof runs over all of them."""

CONFIG_FILE: Final = "config.json"
_ADAPTER_FILE: Final = "adapter_config.json"
IGNORED_GENERATION: Final = (
    "no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "sequence_bias",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
"""Entries of `generation_config.json` that change what is generated and that a bundle has no place for."""
NEUTRAL: Final[tuple[Any, ...]] = (None, 0, 0.0, 1.0, [], {})
_SAFETENSORS: Final = "model.safetensors"
_PICKLE: Final = "pytorch_model.bin"
_COPIES: Final = 2.5
"""Of the weights in fp32 that an export holds at least: the module, which the graph shares, and the session that proves
it. The libraries left out, a GPT-2 small took 2.9 times its weights (docs/huggingface.md)."""
_FLOAT_BYTES: Final = 4
_LICENSE: Final = re.compile(r"^(license|license_name):\s*(?:-\s*)?(\S+)", re.MULTILINE)
DOCUMENTS: Final = re.compile(r"README\.md|(?:LICEN[SC]E|NOTICE)[A-Za-z0-9_.-]*")
"""Files of a folder that go into a bundle as they are."""
_DOCUMENTS_FOLDER: Final = "upstream"
_MOST_DOCUMENT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """What is asked for beside the folder."""

    name: str | None = None
    """Name in the store; None: the folder's, in small letters."""
    task: str | None = None
    """Task; None: the one that `architectures` in the configuration stands for."""
    max_length: int | None = None
    """Most tokens; None: the model's, `DEFAULT_MAX_LENGTH` at most."""
    allow_pickle: bool = False
    """True to read weights that are pickled, which can run any code."""
    evaluation_file: Path | None = None
    """Evaluation data in the format of docs/checkpoint.md."""
    evaluation_name: str | None = None
    """What it is called; None: by the file's name."""
    languages: Languages | None = None
    """Of a translation model; None: those that the folder states."""
    license_name: str | None = None
    """Licence of the weights; None: the one that the folder's README states."""
    given: GivenInputs = field(default_factory=GivenInputs)
    """Inputs that int8 is held against fp32 on without evaluation data; none: drawn ones."""
    pooling: str | None = None
    """How an encoder's token vectors become one, for embeddings; None: as the folder says."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Names and texts of further prompts, for embeddings of texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder whose configuration has been read and whose weights are there."""

    path: Path
    task: Task
    config: Any
    """The configuration as `transformers` parses it."""
    options: FolderOptions
    origin: Origin | None = None
    """What the folder was fetched as; None: it was given."""

    def title(self) -> str:
        """Returns what the model is called where it comes from."""
        return self.path.resolve().name if self.origin is None else self.origin.id.rpartition("/")[2]

    def name(self) -> str:
        """Returns the model's name in the store.

        Raises:
            SourceError: None is asked for, and the folder's is no name of a model.
        """
        if self.options.name:
            return self.options.name
        name = re.sub(r"[^a-z0-9._-]+", "-", self.title().lower()).strip("._-")[:64].strip("._-")
        if not name:
            raise SourceError(f"{self.path}: its name is no name of a model; give one with --name")
        return name

    def license(self) -> str:
        """Returns the licence that is asked for, or the one in the front matter of the folder's README."""
        if self.options.license_name:
            return self.options.license_name
        try:
            text = (self.path / "README.md").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "not stated"
        matter = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        entries = _LICENSE.findall(matter[1]) if matter else []
        stated = {key: str(value).strip("\"'") for key, value in entries}
        license_name = stated.get("license", "not stated")
        return stated.get("license_name", license_name) if license_name == "other" else license_name

    def documents(self) -> dict[str, bytes]:
        """Returns the model card and the licence that came with the weights, by their paths in a bundle."""
        found = {}
        for file in sorted(self.path.iterdir()):
            if DOCUMENTS.fullmatch(file.name) and file.is_file() and file.stat().st_size <= _MOST_DOCUMENT_BYTES:
                found[f"{_DOCUMENTS_FOLDER}/{file.name}"] = file.read_bytes()
        return found

    def architecture(self, model: nn.Module) -> Architecture:
        """Returns what the manifest says of a model."""
        return Architecture(
            kind=type(model).__name__,
            parameter_count=parameter_count(model),
            configuration={"model_type": self.config.model_type, "transformers": transformers.__version__},
        )

    def source(self, model: nn.Module, module: nn.Module, *, part: str = "", **values: Any) -> ExportSource:
        """Describes what is exported, by what every folder states and by `values` of its kind.

        Args:
            model: The library's, for its name and geometry.
            module: What is traced.
            part: What it is of the model, for the description.
            values: Further fields of `ExportSource`.
        """
        return ExportSource(
            name=self.name(),
            task=self.task,
            module=module,
            description=(
                f"{type(model).__name__}, exported from "
                + ("a folder of transformers" if self.origin is None else f"{self.origin.id} of the hub")
                + f"{part}."
            ),
            license=self.license(),
            origin=self.origin,
            documents=self.documents(),
            architecture=self.architecture(model),
            limits=limits_of(module, self.task),
            **values,
        )

    def evaluation(self, num_labels: int = 0) -> EvaluationData | None:
        """Reads the evaluation data that is given."""
        file = self.options.evaluation_file
        name = self.options.evaluation_name
        return read_evaluation(file, self.task, name or file.name, num_labels) if file else None

    def tokenizer(self) -> tuple[Tokenizer, bool]:
        """Returns the tokenizer as transformers reads it, and whether it gives its model the types of a pair's tokens.

        Raises:
            SourceError: There is none that can be read, or it is not the model's.
        """
        try:
            read = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False, local_files_only=True)
            tokenizer = Tokenizer.from_str(read.backend_tokenizer.to_str())
        except Exception as error:  # the library raises many kinds
            raise SourceError(
                f"{self.path}: has no tokenizer that can be read ({first_line(error)}); it needs {TOKENIZER_FILE}"
            ) from error
        self.check_vocabulary(tokenizer)
        return tokenizer, "token_type_ids" in read.model_input_names

    def check_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Checks that a tokenizer gives no id that the model does not know.

        Raises:
            SourceError: It does.
        """
        vocabulary = int(self.config.get_text_config().vocab_size)
        if (largest := max(tokenizer.get_vocab().values(), default=0)) >= vocabulary:
            raise SourceError(
                f"{self.path}: the tokenizer has a token of id {largest}, and the model's vocabulary ends at "
                f"{vocabulary - 1}; they do not belong together"
            )

    def token_names(self) -> dict[str, str]:
        """Returns the special tokens that `tokenizer_config.json` names, by what they are for."""
        try:
            content = json.loads((self.path / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        tokens = {name: content.get(name) for name in ("bos_token", "eos_token")}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def generation_config(self) -> Any:
        """Returns `generation_config.json` as `transformers` parses it, or what the configuration says in its place."""
        if (self.path / "generation_config.json").exists():
            return GenerationConfig.from_pretrained(self.path, local_files_only=True)
        return GenerationConfig.from_model_config(self.config)

    def load(self, auto_class: Any, *, attention: str = "eager", unused: tuple[str, ...] = ()) -> nn.Module:
        """Loads the weights, in fp32.

        Args:
            auto_class: The `Auto` class of `transformers` that makes models of this kind.
            attention: Name of the attention that the model is made with.
            unused: What the names of weights begin with that may be missing, because nothing reads them.

        Raises:
            SourceError: They cannot be read, or are not those of the model.
        """
        try:
            with quiet():
                model, report = auto_class.from_pretrained(
                    self.path,
                    config=self.config,
                    dtype=torch.float32,
                    attn_implementation=attention,
                    trust_remote_code=False,
                    local_files_only=True,
                    use_safetensors=not self.options.allow_pickle or None,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                )
        except Exception as error:  # the library raises many kinds
            if isinstance(error, KeyError) and error.args == (attention,):  # it chose a class by the attention's name
                raise SourceError(
                    f"{self.path}: {self.config.model_type} does not attend through the interface that transformers "
                    "has for it; a key/value cache needs that, so this family is not supported"
                ) from error
            raise SourceError(f"{self.path}: cannot be loaded for {self.task} ({first_line(error)})") from error
        for what in ("missing_keys", "mismatched_keys"):
            keys = (key if isinstance(key, str) else str(key[0]) for key in report[what])  # some with their shapes
            if names := [name for name in keys if not name.startswith(unused)]:
                first = min(names)
                raise SourceError(
                    f"{self.path}: {len(names)} weights of {type(model).__name__} are "
                    f"{'not there' if what == 'missing_keys' else 'of another shape'} ({first} is the first); "
                    f"these are not the weights of a model for {self.task}; fetch the folder again, or give another "
                    "--task"
                )
        return cast("nn.Module", model.eval())

    def length(self, model: nn.Module, window: int | None = None) -> tuple[int, tuple[str, ...]]:
        """Returns the most tokens of the bundle, and a note if the model could take more.

        Args:
            model: The model.
            window: Tokens that its attention sees; None: all.

        Raises:
            SourceError: More are asked for than the model takes.
        """
        asked = self.options.max_length
        known = getattr(self.config, "max_position_embeddings", None)  # none of relative positions, which have no end
        whole = int(known or asked or getattr(self.config, "n_positions", None) or DEFAULT_MAX_LENGTH)
        length = whole
        table = getattr(getattr(cast("Any", model).base_model, "embeddings", None), "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:  # positions begin after the padding's
            length -= table.padding_idx + 1
        limit = f"the model takes {length} tokens"
        if window is not None and window < length:
            length, limit = window, f"its attention sees a window of {window} tokens, and the bundle has no windows"
        if asked is not None:
            if asked > length:
                raise SourceError(f"{self.path}: --max-length {asked}: {limit}")
            return asked, ()
        chosen = min(length, DEFAULT_MAX_LENGTH)
        if length > chosen:
            return chosen, (f"texts of at most {chosen} tokens: {limit}; --max-length N changes it",)
        if window == length and whole > length:
            return chosen, (f"texts of at most {chosen} tokens: {limit}",)
        return chosen, ()


def read_configuration(path: Path) -> dict[str, Any]:
    """Reads `config.json` of a folder.

    Raises:
        SourceError: There is none, or it cannot be read.
    """
    if not path.is_dir():
        raise SourceError(f"{path}: is no folder, and no id of the hub, which is ORG/NAME or ORG/NAME@REVISION")
    file = path / CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (path / _ADAPTER_FILE).exists():
            raise SourceError(
                f"{path}: holds an adapter ({_ADAPTER_FILE}) and no model; merge it into its model first, which "
                "`merge_and_unload` of peft does"
            ) from None
        raise SourceError(f"{path}: has no {CONFIG_FILE}, so it is no model folder of transformers") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise SourceError(f"{file}: is not a JSON object")
    return content


def weight_files(path: Path, there: Collection[str], *, allow_pickle: bool) -> list[str]:
    """Returns the names of the files that hold a model's weights: safetensors, or else pickled ones.

    Args:
        path: The model's folder, which has the indices of shards.
        there: Names of all files in it, or of those that can be fetched.
        allow_pickle: True if they may be pickled.

    Raises:
        SourceError: There are none, one is missing, or they are pickled and that is not allowed.
    """
    for name in (_SAFETENSORS, _PICKLE):
        index = f"{name}.index.json"
        files = [name] if name in there else _shards(path / index) if index in there else []
        if files and name == _PICKLE and not allow_pickle:
            raise SourceError(
                f"{path}: its weights are pickled ({files[0]}), and a pickle may run any code when it is read; "
                "give --allow-pickle if you trust where it comes from, or convert it to safetensors"
            )
        if missing := [file for file in files if file not in there]:
            raise SourceError(f"{path}: {index} names {missing[0]}, which is not there; fetch the folder again")
        if files:
            return files
    raise SourceError(f"{path}: has no weights ({_SAFETENSORS}, or its shards with an index)")


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SourceError(f"{index}: cannot be read as an index of shards ({error})") from error
    return [str(name) for name in names]


def check_weights(path: Path, *, allow_pickle: bool) -> None:
    """Checks, by their headers, that a model's weights are there, whole, and fit into memory.

    Raises:
        SourceError: They are not, or they are pickled and that is not allowed.
    """
    num_weights = 0
    for name in weight_files(path, {file.name for file in path.iterdir()}, allow_pickle=allow_pickle):
        file = path / name
        if not name.endswith(
            ".safetensors"
        ):  # in 16 bits at least, and nothing of it is read before it is known to fit
            num_weights += file.stat().st_size // _FLOAT_BYTES
            continue
        try:
            num_weights += _num_weights(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
            raise SourceError(f"{file}: cannot be read as safetensors ({first_line(error)}); fetch it again") from error
    check_memory(str(path), num_weights)


def _num_weights(file: Path) -> int:
    """Returns how many numbers a file of safetensors holds, by its header.

    Raises:
        ValueError: The file ends before its weights do.
    """
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_bytes))
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    whole = 8 + header_bytes + max((entry["data_offsets"][1] for entry in entries), default=0)
    if (found := file.stat().st_size) != whole:
        raise ValueError(f"it has {found:,} bytes, and its header tells of {whole:,}")
    return sum(math.prod(entry["shape"]) for entry in entries)


def check_memory(owner: str, num_weights: int) -> None:
    """Checks that a model fits into memory.

    Raises:
        SourceError: It does not.
    """
    available, needed = available_bytes("cpu"), _COPIES * _FLOAT_BYTES * num_weights
    if available is not None and needed > available:
        raise SourceError(
            f"{owner}: is too large for this machine: its {num_weights:,} weights take "
            f"{bytes_text(_FLOAT_BYTES * num_weights)} in fp32, an export needs at least {_COPIES} times that, "
            f"{bytes_text(needed)}, and {bytes_text(available)} of memory are free; export it on a larger machine"
        )


def bytes_text(num_bytes: float) -> str:
    """Returns a number of bytes for people."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"


def parse_configuration(path: Path, content: Mapping[str, Any]) -> Any:
    """Returns a configuration as `transformers` parses it.

    Raises:
        SourceError: It knows no such model.
    """
    model_type = content.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        if content.get("auto_map"):
            raise SourceError(
                f"{path}: model type {model_type} needs code that lies in the folder (auto_map), and no code of a "
                "folder is ever run"
            )
        raise SourceError(
            f"{path}: model type {model_type} is not one that transformers {transformers.__version__} knows; "
            "a newer version may"
        )
    try:
        with quiet():
            return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{path / CONFIG_FILE}: cannot be read ({first_line(error)})") from error


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


def check_is_dense(path: Path, config: Any) -> None:
    """Checks that a model is no mixture of experts.

    Raises:
        SourceError: It is one.
    """
    for part in (config, config.get_text_config(), getattr(config, "ffn_config", None)):
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
            if isinstance(count := getattr(part, name, None), int) and count > 1:
                raise SourceError(
                    f"{path}: is a mixture of {count} experts ({config.model_type}), which is not supported: the graph "
                    "would hold the experts that a traced text takes, or run them all"
                )


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, with the next if that is only its heading, or the error's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def as_ids(value: int | Sequence[int] | None) -> list[int]:
    """Returns the ids that an entry of a configuration gives: none, one, or several."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(dict.fromkeys(value))
