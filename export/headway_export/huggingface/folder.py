"""A model folder: configuration, weights, tokenizer, and what it says of itself, whatever kind of model it holds."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from pydantic import ValidationError
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoFeatureExtractor, GenerationConfig

from headway_export.errors import ExportError, SourceError, reason_of
from headway_export.given import GivenInputs
from headway_export.graphs import parameter_count
from headway_export.huggingface.adapters import Adapter
from headway_export.huggingface.experts import LAID_OUT_FILES
from headway_export.huggingface.plain import PlainFolder
from headway_export.source import EvaluationData, ExportSource, checkpoint_beside, limits_of, read_evaluation
from headway_export.space import check_memory, working_bytes
from headway_export.tasks.table import task_of
from headway_server.bundles import Architecture, Languages, Origin, Precision, Task
from headway_server.bundles.tags import Aggregation, TagScheme
from headway_server.errors import ServerError
from headway_training import folders
from headway_training.errors import CheckpointError
from headway_training.folders import first_line, plain_tokenizer

_TEXT_INPUTS: Final = frozenset((
    "attention_mask", "cache", "decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds",
    "decoder_position_ids", "deprecated_arguments", "encoder_attention_mask", "encoder_hidden_states",
    "encoder_outputs", "end_positions", "entity_attention_mask", "entity_ids", "entity_position_ids",
    "entity_token_type_ids", "global_attention_mask", "input_ids", "input_mask", "inputs", "inputs_embeds", "kwargs",
    "labels", "lang_ids", "langs", "lengths", "logits_to_keep", "mems", "num_hashes", "output_attentions",
    "output_hidden_states", "past_key_values", "perm_mask", "position_ids", "question_positions", "return_dict",
    "start_positions",
    "target_mapping", "task_type_ids", "token_type_ids", "use_cache", "use_mems",
))  # fmt: skip
"""What models of texts are called with: tokens and what follows from them, and what may always be left out."""
_BOX_INPUTS: Final = frozenset(("bbox", "bbox_first_token_mask"))
"""What models of documents are called with besides; the second is for a loss."""
_OF_OTHER_KINDS: Final = re.compile("pixel_|image|video|vision|audio|input_features|input_values|mm_|num_frames")
"""Begins what a model reads in place of a text."""
_CHANGING_ROTARY: Final = ("dynamic", "longrope")
"""Kinds of rotary positions that depend on the length of the text."""
_LICENSE: Final = re.compile(r"^(license|license_name):\s*(?:-\s*)?(\S+)", re.MULTILINE)
DOCUMENTS: Final = re.compile(r"README\.md|(?:LICEN[SC]E|NOTICE)[A-Za-z0-9_.-]*")
"""Files of a folder that go into a bundle as they are."""
_DOCUMENTS_FOLDER: Final = "upstream"
_WEIGHTS: Final = ("model*.safetensors", "*/model*.safetensors", LAID_OUT_FILES)
_MOST_DOCUMENT_BYTES: Final = 1 << 20
_PADDED_TOKENS: Final = 3
_TOKENS_WITH_PADDING: Final = 128
_PADDING_BOUND: Final = 1e-2
"""Largest relative difference between the answers to a text alone and padded; the proof of a graph has a closer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """What is asked for beside the folder."""

    name: str | None = None
    """Name in the store; None: the folder's, in small letters."""
    task: str | None = None
    """Task; None: the one that `architectures` in the configuration stands for."""
    max_length: int | None = None
    """Most tokens; None: the model's, `folders.MAX_LENGTH` at most, as the proof runs over all of them."""
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
    tag_scheme: TagScheme | None = None
    """Scheme of a token classifier's tags; None: the one that their names speak for."""
    aggregation: Aggregation | None = None
    """How spans are found by tags; None: by the first subword of each word."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Names and texts of further prompts, for embeddings of texts."""
    examples: Path | None = None
    """An .npz of inputs by name, for a model of tensors; None: drawn ones."""
    axes: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    """Axes of inputs of a model of tensors, by name; none: as they are known."""
    vocoder: str | None = None
    """Folder or id of what makes samples of a model's spectrograms; None: the folder's own."""
    voices: Path | None = None
    """Folder of voices of a model of spectrograms; None: the folder's own."""
    base: str | None = None
    """Folder or id of the model that an adapter is merged into; None: the one that the adapter names."""
    adapter: Adapter | None = None
    """Merged into the weights of the folder."""
    precisions: tuple[Precision, ...] | None = None
    """Of the bundle, which takes less memory without fp32; None: chosen once the folder is read."""
    scratch: Path | None = None
    """Where weights in fp32 are written for the time of an export; None: where the system has temporary files."""

    @property
    def flag_of_tensors(self) -> str | None:
        """The flag given that is for models of tensors alone; None: none is."""
        return "--examples" if self.examples is not None else "--axes" if self.axes else None

    @property
    def flag_of_spectrograms(self) -> str | None:
        """The flag given that is for models of spectrograms alone; None: none is."""
        return "--vocoder" if self.vocoder is not None else "--voices" if self.voices is not None else None

    @property
    def keeps_fp32(self) -> bool:
        """True if the bundle has it."""
        return self.precisions is None or Precision.FP32 in self.precisions


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
    plain: PlainFolder | None = None
    """The temporary folder that `path` is, where the weights that came are not those of `transformers`."""
    stated: Mapping[str, str] = field(default_factory=dict)
    """What the manifest says of the weights as they came, by a word each."""

    def title(self) -> str:
        """Returns what the model is called where it comes from."""
        return self.path.resolve().name if self.origin is None else self.origin.id.rpartition("/")[2]

    def is_of(self, *heads: str) -> bool:
        """Returns True if the name of its architecture ends with one of `heads`."""
        return any(str(name).endswith(heads) for name in self.config.architectures or ())

    def name(self) -> str:
        """Returns the model's name in the store.

        Raises:
            SourceError: None is asked for, and the folder's is no name of a model.
        """
        if self.options.name:
            return self.options.name
        name = model_name(self.title())
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
            configuration={
                "model_type": self.config.model_type,
                "transformers": transformers.__version__,
                **self.stated,
            },
        )

    def source(
        self,
        model: nn.Module,
        module: nn.Module,
        *,
        make_reference: Callable[[], nn.Module],
        part: str = "",
        **values: Any,
    ) -> ExportSource:
        """Describes what is exported, by what every folder states and by `values` of its kind.

        Args:
            model: The library's, for its name and geometry.
            module: What is traced.
            make_reference: Reads the folder again, for a model with the library's own attention.
            part: What it is of the model, for the description.
            values: Further fields of `ExportSource`.
        """
        return ExportSource(
            name=self.name(),
            task=self.task,
            module=module,
            make_reference=make_reference,
            description=(
                f"{type(model).__name__}, exported from "
                + ("a folder of transformers" if self.origin is None else f"{self.origin.id} of the hub")
                + "".join(f", {name} {value}" for name, value in self.stated.items())
                + f"{part}."
            ),
            license=self.license(),
            origin=self.origin,
            documents=self.documents(),
            architecture=self.architecture(model),
            limits=limits_of(module, self.task),
            kept={} if self.plain is None else self.plain.kept,
            checkpoint_files=tuple(file for pattern in _WEIGHTS for file in sorted(self.path.glob(pattern))),
            **values,
        )

    def evaluation(self, num_labels: int = 0) -> EvaluationData | None:
        """Reads the evaluation data that is given."""
        file = self.options.evaluation_file
        name = self.options.evaluation_name
        return read_evaluation(file, self.task, name or file.name, num_labels) if file else None

    def tokenizer(self) -> Tokenizer:
        """Returns what is inside the tokenizer as `transformers` reads it.

        Raises:
            SourceError: There is none that can be read, or it is not the model's.
        """
        return plain_tokenizer(self.own_tokenizer())

    def own_tokenizer(self) -> Any:
        """Returns the tokenizer as `transformers` reads it; errors as `tokenizer`."""
        with as_source_error():
            return folders.read_tokenizer(self.path, self.config)

    def check_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Checks that a tokenizer gives no id that the model does not know.

        Raises:
            SourceError: It does.
        """
        with as_source_error():
            folders.check_vocabulary(self.path, self.config, tokenizer)

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
            loaded = folders.load_model(
                self.path,
                self.config,
                auto_class,
                self.task,
                attention=attention,
                allow_pickle=self.options.allow_pickle,
            )
        except CheckpointError as error:
            cause = error.__cause__
            if isinstance(cause, KeyError) and cause.args == (attention,):  # it chose a class by the attention's name
                raise SourceError(
                    f"{self.path}: {self.config.model_type} does not attend through the interface that transformers "
                    "has for it; a key/value cache needs that, so this family is not supported"
                ) from error
            raise SourceError(str(error)) from error
        for what, keys in (("not there", loaded.missing), ("of another shape", loaded.mismatched)):
            if names := [name for name in keys if not name.startswith(unused)]:
                raise SourceError(
                    f"{self.path}: {len(names)} weights of {type(loaded.model).__name__} are {what} ({min(names)} is "
                    f"the first); these are not the weights of a model for {self.task}; fetch the folder again, or "
                    "give another --task"
                )
        _fix_rotary(loaded.model)
        return cast("nn.Module", loaded.model)

    def check_inputs(self, model: nn.Module, *, reads_boxes: bool = False) -> None:
        """Checks that a model reads no more of a text than its tokens, as far as it was trained elsewhere.

        Args:
            model: The model.
            reads_boxes: True if its graph reads the boxes of tokens, too.

        Raises:
            SourceError: It does, and no call gives that.
        """
        known = _TEXT_INPUTS | _BOX_INPUTS if reads_boxes else _TEXT_INPUTS
        names = inspect.signature(model.forward).parameters
        further = [name for name in names if name not in known and not _OF_OTHER_KINDS.match(name)]
        if getattr(self.config, "n_langs", 1) > 1 and getattr(self.config, "use_lang_emb", False):
            further.append("langs")
        if further and checkpoint_beside(self.path) is None:
            raise SourceError(
                f"{self.path}: {type(model).__name__} reads {', '.join(further)} beside tokens, which no call gives "
                f"for {self.task}; not supported, but for a model that headway-train has trained without"
            )

    def check_padding(self, module: nn.Module, *, name: str, pad: int | None, longest: int) -> None:
        """Checks that a text in a batch, padded on the right, is answered as it is alone.

        Args:
            module: Reads ids and mask, int64 (B, T), and gives a row, or numbers of each token.
            name: What it is called in errors.
            pad: The token that fills up a batch; None: nothing is checked.
            longest: Tokens of the longest text.

        Raises:
            SourceError: It is not.
        """
        tokens = folders.ordinary_tokens(self.config)
        count, total = min(_PADDED_TOKENS, longest, len(tokens)), min(_TOKENS_WITH_PADDING, longest)
        if pad is None or count == total:
            return
        ids = torch.full((1, total), pad)
        ids[0, :count] = torch.tensor(tokens[:count])
        mask = (torch.arange(total) < count).to(torch.int64)[None]

        def answer(length: int) -> Tensor:
            outputs = module(ids[:, :length], mask[:, :length])
            given = cast("Tensor", outputs["embedding"] if isinstance(outputs, Mapping) else outputs)
            if given.ndim > 2 and length in given.shape[1:]:  # an axis of tokens
                return given.narrow(1 + given.shape[1:].index(length), 0, count)
            return given

        with torch.inference_mode(), folders.quiet():
            alone, padded = answer(count), answer(total)
        size = float(alone.abs().max())
        if float((padded - alone).abs().max()) > _PADDING_BOUND * max(size, _PADDING_BOUND):
            raise SourceError(
                f"{self.path}: {name} answers a text of {count} tokens otherwise where it is padded to {total}, so its "
                "answer would depend on the other texts of a batch; not supported, take a model of another family"
            )

    def length(
        self, model: nn.Module, read: Callable[[Tensor, Tensor], object] | None = None
    ) -> tuple[int, tuple[str, ...]]:
        """Returns the most tokens of the bundle, and a note if the model could take more.

        Args:
            model: The model.
            read: Runs it on ids and mask, where it is not called as models of texts are.

        Raises:
            SourceError: More are asked for than the model takes.
        """
        with folders.quiet():
            asked, found = self.options.max_length, folders.length_of(model, self.config, read)
        whole = found.limit or asked or found.usual
        length, limit = whole, f"the model takes {whole} tokens"
        for bound, reason in _bounds(self.config):
            if bound < length:
                length, limit = bound, f"for more than {bound} tokens {reason}"
        if asked is not None:
            if asked > length:
                raise SourceError(f"{self.path}: --max-length {asked}: {limit}")
            return asked, ()
        chosen = min(length, folders.MAX_LENGTH)
        if length > chosen:
            return chosen, (f"texts of at most {chosen} tokens: {limit}; --max-length N changes it",)
        if whole > length:
            return chosen, (f"texts of at most {chosen} tokens: {limit}",)
        return chosen, ()


def without_parametrizations(module: nn.Module) -> nn.Module:
    """Returns a module in evaluation mode, with weights as they are in place of what they are computed from."""
    for part in list(module.modules()):
        if parametrize.is_parametrized(part):
            for name in list(cast("Any", part).parametrizations):
                parametrize.remove_parametrizations(part, name)
    return module.eval()


def model_name(title: str) -> str:
    """Returns the name in a store that a title stands for; it may be empty."""
    return re.sub(r"[^a-z0-9._-]+", "-", title.lower()).strip("._-")[:64].strip("._-")


def _bounds(config: Any) -> Iterator[tuple[int, str]]:
    """Yields up to how many tokens a model computes what its graph does, and what is otherwise for more.

    BigBird (Zaheer et al. 2020, arXiv 2007.14062): a shorter text turns the model to full attention for good, so that
    its answer to a longer one would depend on what it has read before.
    """
    if getattr(config, "attention_type", None) == "block_sparse":
        bound = (5 + 2 * int(config.num_random_blocks)) * int(config.block_size)
        yield bound, "its attention is block-sparse, and the bundle's is not"
    text = text_config(config)
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        if (kind := part.get("rope_type", part.get("type"))) in _CHANGING_ROTARY:
            longest = part.get("original_max_position_embeddings") or text.max_position_embeddings
            yield int(longest), f"its rotary positions are others ({kind}), and cached keys would have to change"


def _fix_rotary(model: nn.Module) -> None:
    """Lets rotary positions be those of texts up to the bound, which the library tells by the longest of a batch."""
    for part in model.modules():
        if getattr(part, "rope_type", None) in _CHANGING_ROTARY:
            cast("Any", part).rope_type = "default"


@contextmanager
def in_a_sentence(owner: str) -> Iterator[None]:
    """Turns whatever the library's code raises over a folder, which `owner` names, into the error of this package."""
    try:
        yield
    except (ExportError, ServerError, ValidationError, OSError):
        raise
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{owner}: cannot be exported, and is not supported ({type(error).__name__}: {reason_of(error)})"
        ) from error


@contextmanager
def as_source_error() -> Iterator[None]:
    """Turns what the reader of folders refuses into the error of this package."""
    try:
        yield
    except CheckpointError as error:
        raise SourceError(str(error)) from error


def read_configuration(path: Path) -> dict[str, Any]:
    """Reads `config.json` of a folder.

    Raises:
        SourceError: There is none, or it cannot be read.
    """
    if not path.is_dir():
        raise SourceError(f"{path}: is no folder, and no id of the hub, which is ORG/NAME or ORG/NAME@REVISION")
    with as_source_error():
        return folders.read_configuration(path)


def parse_configuration(path: Path, content: Mapping[str, Any]) -> Any:
    """As `folders.parse_configuration`, whose errors become `SourceError`."""
    with as_source_error():
        return folders.parse_configuration(path, content)


def weight_files(path: Path, there: Collection[str], *, allow_pickle: bool) -> list[str]:
    """As `folders.weight_files`, whose errors become `SourceError`."""
    with as_source_error():
        return folders.weight_files(path, there, allow_pickle=allow_pickle)


def check_weights(path: Path, *, working: int, allow_pickle: bool, is_mapped: bool = False) -> int:
    """Checks, by their headers, that a model's weights are there, whole, and fit into memory; returns how many.

    Args:
        path: The folder.
        working: Bytes that an export computes with beside weights.
        allow_pickle: True if they may be pickled.
        is_mapped: True if they are mapped from disk, in fp32, and the bundle has no fp32.

    Raises:
        SourceError: They are not, or they are pickled and that is not allowed.
    """
    with as_source_error():
        count = folders.count_weights(path, allow_pickle=allow_pickle)
    check_memory(str(path), count, working=working, is_mapped=is_mapped)
    return count


def text_config(config: Any) -> Any:
    """Returns the part of a configuration that is of texts; of several, such as MusicGen's, that of the decoder."""
    try:
        return config.get_text_config()
    except ValueError:  # there are several
        return config.get_text_config(decoder=True)


def working_bytes_of(config: Any, task: Task, max_length: int | None) -> int:
    """Returns about how many bytes an export computes with beside weights, by a configuration."""
    texts = text_config(config)
    stated = getattr(texts, "max_position_embeddings", None)
    length = max_length or min(stated if isinstance(stated, int) else folders.MAX_LENGTH, folders.MAX_LENGTH)
    if task is Task.TRANSCRIPTION:  # a window is longer than what is written of it
        length = max(length, getattr(config, "max_source_positions", 0))
    vocab_size, num_heads = getattr(texts, "vocab_size", None), getattr(texts, "num_attention_heads", 0) or 0
    if not isinstance(vocab_size, int):  # an image has few positions, and its heads may be stated by the stage
        length = vocab_size = num_heads = 0
    return working_bytes(
        writes=task_of(task).has_cache,
        num_heads=num_heads,
        length=length,
        vocab_size=vocab_size,
    )


def check_is_dense(path: Path, config: Any) -> None:
    """Checks that a model is no mixture of experts.

    Raises:
        SourceError: It is one.
    """
    if count := num_experts(config):
        raise SourceError(
            f"{path}: is a mixture of {count} experts ({config.model_type}) that are not computed through the "
            "interface of transformers, so the graph would hold those of a traced text; this is not supported"
        )


def num_experts(config: Any) -> int:
    """Returns how many experts a layer of a mixture has; 0: it is none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    parts = (config, text_config(config), getattr(config, "ffn_config", None))
    counts = (getattr(part, name, None) for part in parts for name in names)
    return next((count for count in counts if isinstance(count, int) and count > 1), 0)


def read_extractor(folder: ModelFolder) -> Any:
    """Reads the feature extractor of a model of sounds.

    Raises:
        SourceError: There is none.
    """
    try:
        return AutoFeatureExtractor.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises many kinds
        raise SourceError(
            f"{folder.path}: does not say how it hears ({first_line(error)}); it needs preprocessor_config.json"
        ) from error


def as_ids(value: int | Sequence[int] | None) -> list[int]:
    """Returns the ids that an entry of a configuration gives: none, one, or several."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(dict.fromkeys(value))
