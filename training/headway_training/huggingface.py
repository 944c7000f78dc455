"""Model folders of Hugging Face `transformers`: what a run starts from, trains, and leaves.

A folder is fine-tuned whole, or by LoRA (Hu et al. 2021): products of two narrow matrices are added to the linear
layers and trained, with the head of a classifier, while all else stays. They are added up before the checkpoint is
written, so what a run leaves is an ordinary folder either way.

B rows, T tokens, V vocabulary, C classes.
"""

from __future__ import annotations

import copy
import difflib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, cast

import numpy as np
import peft
import torch
import transformers
from accelerate import init_empty_weights
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from headway_training.checkpoint import ImagePreprocessing, SpecialTokens
from headway_training.data.images import normalize
from headway_training.errors import CheckpointError, DataError, RecipeError
from headway_training.folders import (
    TextLength,
    check_reading,
    count_weights,
    first_line,
    labels_of,
    length_of,
    load_model,
    padding_of,
    parse_configuration,
    plain_tokenizer,
    quiet,
    read_configuration,
    read_tokenizer,
)
from headway_training.kinds import FolderKind, find_task
from headway_training.models import AttentionKind, Model
from headway_training.recipes import LoraSettings

_PREPROCESSOR_FILE: Final = "preprocessor_config.json"
_LEVEL: Final = 1 / 255
"""Largest difference of a channel, in 0 to 1, between the pixels of a recipe and those of a folder."""
_ATTENTION: Final[Mapping[AttentionKind, str]] = {"plain": "eager", "fused": "sdpa"}
_GENERATION_MARK: Final = re.compile(r"\{%-?\+?\s*generation\b")


def _kind_of(task: str) -> FolderKind:
    """Which models are trained for a task that model folders can be trained for."""
    kind = find_task(task).folder
    assert kind is not None, "the folder's kind was checked"
    return kind


def _auto_class(task: str) -> Any:
    return getattr(transformers, _kind_of(task).auto_class)


class FolderModel(Model):
    """A model of `transformers`, called as the kit's own are.

    Args:
        model: The library's.
        inputs: Names of the tensors it is called with, in their order.
        max_length: Most tokens of a text; 0 for images.
        parts: What is written beside the weights: a tokenizer or an image processor.
        start: How it starts, in words.
        use_cache: What the folder says of the cache, which training leaves off.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        inputs: Sequence[str],
        max_length: int,
        parts: Sequence[Any],
        start: str,
        use_cache: bool | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        self.start = start
        self._inputs = tuple(inputs)
        self._parts = tuple(parts)
        self._use_cache = use_cache

    def use_attention(self, kind: AttentionKind) -> Self:
        """Chooses the kernel, `plain` or `fused`, by the library's own names for them."""
        _plain(self.model).set_attn_implementation(_ATTENTION[kind])
        return self

    def forward(self, *inputs: Tensor) -> Tensor:
        """The tensors of a task -> logits: (B, C), (B, T, C), or (B, T, V)."""
        named = dict(zip(self._inputs, inputs, strict=False))
        if inputs[0].is_meta and "input_ids" in named:  # of other masks the library reads values, which are not there
            rows, length = inputs[0].shape
            named["attention_mask"] = torch.zeros(rows, 1, length, length, device="meta")
        return cast("Tensor", self.model(**named, return_dict=True).logits)

    @property
    def kind(self) -> str:
        """The name of the library's class."""
        return type(_plain(self.model)).__name__

    @property
    def configuration(self) -> dict[str, Any]:
        """What a checkpoint says of the model; the folder's own configuration says the rest."""
        length = {"max_length": self.max_length} if self.max_length else {}
        return {"model_type": _plain(self.model).config.model_type, **length}

    def merge(self) -> None:
        """Adds the matrices of LoRA to the weights that they were trained beside, where there are any."""
        if isinstance(self.model, peft.PeftModel):
            self.model = cast("nn.Module", self.model.merge_and_unload())

    def write(self, folder: Path) -> None:
        """Writes a folder of `transformers`: configuration, weights, tokenizer or image processor."""
        model = _plain(self.model).float()
        if self._use_cache is not None:
            model.config.use_cache = self._use_cache
        with quiet():
            model.save_pretrained(folder)
            for part in self._parts:
                part.save_pretrained(folder)


def _plain(model: nn.Module) -> Any:
    """The library's model, without what LoRA wraps it in."""
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder that a run of a task starts from."""

    path: Path
    task: str
    config: Any
    """The configuration as `transformers` parses it."""
    processor: Any
    """The tokenizer, or the image processor."""
    max_length: int
    """Most tokens of a text that the run reads; 0 for images."""
    has_table: bool = False
    """True if its positions are looked up in a table, which has an end."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that reads its texts; each call returns a new one. Tasks pad and cut."""
        return plain_tokenizer(self.processor)

    @property
    def num_token_types(self) -> int:
        """Types of tokens, where its tokenizer tells them apart."""
        if "token_type_ids" not in self.processor.model_input_names:
            return 0
        return int(getattr(self.config, "type_vocab_size", 0) or 0)

    @property
    def special_tokens(self) -> SpecialTokens:
        """Ids of its special tokens."""
        tokens = self.processor
        pad = padding_of(self.config, tokens)
        return SpecialTokens(pad=pad, bos=tokens.bos_token_id, eos=tokens.eos_token_id, unk=tokens.unk_token_id)

    def build(
        self,
        labels: Sequence[str],
        *,
        multi_label: bool = False,
        lora: LoraSettings | None = None,
        has_weights: bool = True,
    ) -> FolderModel:
        """Makes the model, with the folder's weights and with fresh ones where its labels are others.

        Args:
            labels: Of the data, in the order of the outputs; none for generation.
            multi_label: True if several labels may apply.
            lora: How it is trained; None: all weights.
            has_weights: False for a model whose tensors have shapes and no storage.

        Raises:
            CheckpointError: The weights cannot be read, or are not those of the model.
            RecipeError: `lora` names modules that the model does not have.
        """
        config, kind = self._configure(labels, multi_label=multi_label), _kind_of(self.task)
        start, fresh = "", frozenset[str]()
        if has_weights:
            model, fresh = self._load(config, keeps_head=not labels or tuple(labels) == labels_of(self.config))
            start = f"weights of {self.path}: {self._describe(labels, fresh)}"
        else:
            model = _auto_class(self.task).from_config(config, attn_implementation="eager")
        if lora is not None:
            model = _add_lora(model, lora, fresh, is_classifier=bool(labels))
        made = FolderModel(
            model,
            inputs=kind.inputs,
            max_length=self.max_length,
            parts=[self.processor],
            start=start,
            use_cache=getattr(self.config, "use_cache", None),
        )
        if has_weights and self.max_length:

            def read(*tensors: Tensor) -> Tensor:
                logits: Tensor = made(*tensors[: len(kind.inputs)])
                return logits

            longest = self.max_length if self.has_table else 0
            check_reading(
                self.path, read, name=made.kind, config=self.config, tokenizer=self.tokenizer, longest=longest
            )
        return made

    def _configure(self, labels: Sequence[str], *, multi_label: bool) -> Any:
        config = copy.deepcopy(self.config)
        if labels:
            config.id2label = dict(enumerate(labels))
            config.label2id = {label: index for index, label in enumerate(labels)}
            config.problem_type = "multi_label_classification" if multi_label else None
        if getattr(config, "use_cache", None):
            config.use_cache = False  # what a layer has computed is read once in training
        return config

    def _load(self, config: Any, *, keeps_head: bool) -> tuple[Any, frozenset[str]]:
        """Loads the weights: the model, and the names of its tensors that start fresh."""
        auto_class = _auto_class(self.task)
        loaded = load_model(self.path, config, auto_class, self.task)
        model, fresh = loaded.model, {*loaded.missing, *loaded.mismatched}
        if not hasattr(model, model.base_model_prefix or "-"):
            raise CheckpointError(f"{self.path}: {type(model).__name__} does not part its body from its head")
        inside = model.base_model_prefix + "."
        wrong = [name for name in fresh if name.startswith(inside) and "pooler" not in name]
        if wrong or (fresh and _kind_of(self.task).heads):
            first = min(wrong or fresh)
            raise CheckpointError(
                f"{self.path}: {len(wrong or fresh)} weights of {type(model).__name__} are not there or of another "
                f"shape ({first} is the first); these are not the weights of a model for {self.task}"
            )
        if not keeps_head:
            drawn = dict(auto_class.from_config(config).named_parameters())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if not name.startswith(inside):
                        parameter.copy_(drawn[name])
                        fresh.add(name)
        return model, frozenset(fresh)

    def _describe(self, labels: Sequence[str], fresh: Iterable[str]) -> str:
        if not (names := sorted(fresh)):
            return "all tensors are loaded"
        why = "" if tuple(labels) == labels_of(self.config) else ", as its labels are others"
        return f"all are loaded but these, which start fresh{why}: {', '.join(names)}"

    def chat_format(self) -> ChatFormat:
        """How its conversations are written; errors as `ChatFormat`."""
        return ChatFormat(self)

    def check_images(self, images: NDArray[np.uint8], preprocessing: ImagePreprocessing) -> None:
        """Checks that a recipe prepares images, (N, height, width, 3), as the folder does.

        Raises:
            RecipeError: A pixel differs by more than a level of rounding.
        """
        size = (preprocessing.height, preprocessing.width)
        if images.shape[1:3] != size:
            raise RecipeError(
                f"preprocessing: asks for images of {size[1]} x {size[0]}, and those of the data set have "
                f"{images.shape[2]} x {images.shape[1]}; give your own with --train, which are resized"
            )
        expected = np.asarray(self.processor(Image.fromarray(images[0]), return_tensors="np")["pixel_values"][0])
        found = normalize(images[:1], preprocessing)[0]
        std = np.asarray(preprocessing.std, np.float32)[:, None, None]
        if found.shape == expected.shape and float(np.abs((found - expected) * std).max()) <= 1.01 * _LEVEL:
            return
        own = self.processor
        raise RecipeError(
            f"preprocessing: prepares images otherwise than {self.path / _PREPROCESSOR_FILE}, which has "
            f"size {_of_size(own)}, mean {list(own.image_mean)} and std {list(own.image_std)}; set "
            "preprocessing.height, width, mean and std to those"
        )


def _of_size(processor: Any) -> str:
    size = getattr(processor, "crop_size", None) if getattr(processor, "do_center_crop", False) else None
    return " x ".join(str(value) for value in dict(size or processor.size).values() if value)


# Reading a folder


def open_folder(path: Path, task: str, max_length: int | None = None) -> ModelFolder:
    """Reads what a folder says of its model.

    Args:
        path: Holds `config.json`, weights, and a tokenizer or `preprocessor_config.json`.
        task: What it is trained for.
        max_length: Most tokens of a text; None: what the model takes, at most `folders.MAX_LENGTH`.

    Raises:
        CheckpointError: The folder is incomplete, or holds a model that cannot be trained for the task.
        RecipeError: `max_length` is more than the model takes.
    """
    config = parse_configuration(path, read_configuration(path))
    _check_kind(path, config, task)
    count_weights(path)
    kind = _kind_of(task)
    if kind.reads_images:
        return ModelFolder(path=path, task=task, config=config, processor=_read_processor(path), max_length=0)
    tokenizer = read_tokenizer(path, config)
    if kind.needs_padding and padding_of(config, tokenizer) is None:
        raise CheckpointError(f"the tokenizer of {path} has no pad_token, which {task} needs: name one and save it")
    if kind.needs_padding:  # a decoder that classifies finds a text's end by it
        config.get_text_config().pad_token_id = padding_of(config, tokenizer)
    length = _length(path, config, task)
    if max_length is not None and length.limit is not None and max_length > length.limit:
        raise RecipeError(
            f"model.max_length is {max_length}, and the model in {path} takes at most {length.limit} tokens: give "
            f"--set model.max_length={length.limit} or less"
        )
    return ModelFolder(
        path=path,
        task=task,
        config=config,
        processor=tokenizer,
        max_length=max_length or length.usual,
        has_table=length.has_table,
    )


def _length(path: Path, config: Any, task: str) -> TextLength:
    """How long texts a folder's model reads, told without its weights.

    Raises:
        CheckpointError: There is no such model.
    """
    try:
        with quiet(), init_empty_weights(include_buffers=False):  # positions are computed of buffers
            model = _auto_class(task).from_config(config, attn_implementation="eager").eval()
    except Exception as error:  # whatever its code raises
        raise CheckpointError(f"{path}: has no model for {task} ({first_line(error)})") from error
    return length_of(model, config)


def _check_kind(path: Path, config: Any, task: str) -> None:
    """Checks that a folder's model can be trained for a task.

    Raises:
        CheckpointError: It cannot.
    """
    kind = find_task(task).folder
    if kind is None:
        raise CheckpointError(f"{path} is a folder of transformers; {task} is trained by the kit's own models alone")
    names = [str(name) for name in config.architectures or []]
    what = f"{path} holds {' and '.join(names) or 'a model'} ({config.model_type})"
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{what}, an encoder-decoder, which is not fine-tuned")
    has_head = not kind.heads or any(name.endswith(kind.heads) for name in names)
    if config.model_type not in getattr(modeling_auto, kind.model_types) or not has_head:
        raise CheckpointError(f"{what}, and a recipe for {task} needs {kind.noun}")


def _read_processor(path: Path) -> Any:
    if not (path / _PREPROCESSOR_FILE).is_file():
        raise CheckpointError(f"{path} has no {_PREPROCESSOR_FILE}, which says how images are prepared")
    try:
        return transformers.AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the library raises many kinds
        raise CheckpointError(f"{path / _PREPROCESSOR_FILE} cannot be read: {first_line(error)}") from error


# LoRA


def _add_lora(model: Any, settings: LoraSettings, fresh: Iterable[str], *, is_classifier: bool) -> nn.Module:
    """Freezes a model but for its head and what starts fresh, and adds trained matrices to its linear layers.

    Raises:
        RecipeError: `settings` name modules that it does not have.
    """
    fresh, inside = set(fresh), model.base_model_prefix + "."
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    own = [name for name in linear if name.startswith(inside) and f"{name}.weight" not in fresh]
    if not own:
        raise RecipeError("lora: the model has no linear layers; leave the section [lora] out to train all weights")
    known = sorted({name.rpartition(".")[2] for name in own})
    for target in settings.target_modules:
        if target not in known and target not in own:
            nearest = difflib.get_close_matches(target, known, n=1, cutoff=0.0)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise RecipeError(
                f"lora.target_modules: the model has no linear layer {target!r}{hint} It has {', '.join(known)}"
            )
    wanted = settings.target_modules or known
    targets = [name for name in own if name in wanted or name.rpartition(".")[2] in wanted]
    wrapped = _wrap(
        model,
        peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha if settings.alpha is not None else 2 * settings.rank,
            lora_dropout=settings.dropout,
            target_modules=targets,
            fan_in_fan_out=any(isinstance(linear[name], Conv1D) for name in targets),
        ),
    )
    for name, parameter in _plain(wrapped).named_parameters():
        if is_classifier and (name in fresh or not name.startswith(inside)):
            parameter.requires_grad_(True)
    return cast("nn.Module", wrapped)


def _wrap(model: Any, adapter: peft.LoraConfig) -> Any:
    with warnings.catch_warnings():  # it asks the model for a property by an old name
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        return peft.get_peft_model(model, adapter)


# Conversations


class ChatFormat:
    """The chat template of a folder: conversations to tokens, and which of them the assistant writes.

    Where a template marks what the assistant writes (`{% generation %}`), its marks are taken. Otherwise it is what a
    conversation grows by when a turn of the assistant is added to one that ends with the template's prompt for it, up
    to and including an end token. A template that changes what stands before is refused then.

    Raises:
        CheckpointError: The folder has none.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self._path = folder.path
        self._tokenizer = folder.processor
        if not self._tokenizer.chat_template:
            raise CheckpointError(
                f"the tokenizer of {folder.path} has no chat template, which conversations are written by: add "
                "chat_template.jinja to the folder"
            )
        self._has_marks = bool(_GENERATION_MARK.search(self._tokenizer.get_chat_template()))
        ends = folder.config.get_text_config().eos_token_id
        self._ends = {self._tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    def __repr__(self) -> str:
        return f"ChatFormat({self._path}, has_marks={self._has_marks})"

    def render(self, messages: Sequence[Mapping[str, Any]], *, is_prompt: bool = False) -> str:
        """Writes a conversation as text, with the prompt for the assistant's turn behind it if `is_prompt`.

        Raises:
            DataError: The template refuses it.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=is_prompt)
            )
        except Exception as error:  # a template raises what it likes
            raise DataError(f"the chat template of {self._path} refuses a conversation: {first_line(error)}") from error

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Encodes a conversation.

        Returns:
            Its tokens, and which of them the assistant writes, (T,) each.

        Raises:
            DataError: A message holds a special token, or the template refuses the conversation or changes what stands
                before a turn of the assistant.
        """
        special = [token for token in self._tokenizer.all_special_tokens if token]
        for message in messages:
            if found := next((token for token in special if token in str(message.get("content") or "")), None):
                raise DataError(f"a message holds the special token {found!r}, which a server reads as text: remove it")
        return self._marked(messages) if self._has_marks else self._grown(messages)

    def _marked(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        self.render(messages)  # for its errors
        encoded = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

    def _grown(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        whole = self.render(messages)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], is_prompt=True)
            after = self.render(messages[: number + 1])
            if not after.startswith(before) or not whole.startswith(after):
                raise DataError(
                    f"the chat template of {self._path} writes turns differently once others follow, so what the "
                    "assistant writes cannot be told from what it reads; mark it with {% generation %} in the template"
                )
            spans.append((len(before), len(after)))
        encoding = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoding["input_ids"])
        mask = [False] * len(ids)
        for first, end in spans:
            own = [i for i, (start, _) in enumerate(encoding["offset_mapping"]) if first <= start < end]
            ended = [i for i in own if ids[i] in self._ends]
            for i in own:
                mask[i] = not ended or i <= ended[-1]
        return ids, mask
