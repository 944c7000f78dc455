"""The kinds of models that are read, and the kind that a folder is of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import transformers

from headway_export.errors import SourceError
from headway_export.huggingface.decoders import read_decoder
from headway_export.huggingface.embedders import Layout, read_embedder, read_layout
from headway_export.huggingface.encoder_decoders import read_rewriter
from headway_export.huggingface.encoders import read_classifier
from headway_export.huggingface.folder import (
    CONFIG_FILE,
    FolderOptions,
    ModelFolder,
    check_memory,
    check_weights,
    parse_configuration,
    read_configuration,
)
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_image_classifier, read_image_embedder
from headway_export.huggingface.translators import TRANSLATORS, read_translator
from headway_export.source import ExportSource, checkpoint_beside, with_record
from headway_server.bundles import EMBEDDING_TASKS, Task
from headway_training.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Models of one task that one function reads."""

    task: Task
    heads: tuple[str, ...]
    """What the names of their architectures end with."""
    is_encoder_decoder: bool = False
    """True for models of an encoder and a decoder."""
    read: Callable[[ModelFolder], tuple[ExportSource, tuple[str, ...]]]
    """Returns what is exported, and notes for the user, a sentence each."""


KINDS: Final = (
    Kind(task=Task.GENERATION, heads=("ForCausalLM", "LMHeadModel"), read=read_decoder),
    Kind(task=Task.TRANSLATION, heads=TRANSLATORS, is_encoder_decoder=True, read=read_translator),
    Kind(task=Task.TEXT_TO_TEXT, heads=("ForConditionalGeneration",), is_encoder_decoder=True, read=read_rewriter),
    Kind(task=Task.TEXT_CLASSIFICATION, heads=("ForSequenceClassification",), read=read_classifier),
    Kind(task=Task.TOKEN_CLASSIFICATION, heads=("ForTokenClassification",), read=read_classifier),
    Kind(task=Task.TEXT_SCORING, heads=(), read=read_classifier),
    Kind(task=Task.TEXT_EMBEDDING, heads=(), read=read_embedder),
    Kind(
        task=Task.IMAGE_CLASSIFICATION,
        heads=("ForImageClassification", "ForImageClassificationWithTeacher"),
        read=read_image_classifier,
    ),
    Kind(task=Task.IMAGE_EMBEDDING, heads=(), read=read_image_embedder),
)


def from_folder(path: Path, options: FolderOptions) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model folder.

    Args:
        path: Holds `config.json`, weights, and a tokenizer.
        options: What is asked for beside it.

    Returns:
        What is exported, and notes for the user, a sentence each.

    Raises:
        SourceError: The folder is incomplete, or its model is of a kind that cannot be served.
    """
    layout = read_layout(path)
    weights = path if layout is None else layout.transformer
    content = read_configuration(weights)
    kind = _kind_of(path, content, options.task or _embedding_task(path, content, layout, options))
    if options.pooling is not None and kind.task not in EMBEDDING_TASKS:
        raise SourceError(f"--pooling is for {' and '.join(EMBEDDING_TASKS)}, and the task is {kind.task}")
    if options.prompts and kind.task is not Task.TEXT_EMBEDDING:
        raise SourceError(f"--prompt is for {Task.TEXT_EMBEDDING}, and the task is {kind.task}")
    check_weights(weights, allow_pickle=options.allow_pickle)
    check_memory(weights)
    config = parse_configuration(weights, content)
    checkpoint = checkpoint_beside(path)
    if checkpoint is not None:
        options = _asked_by(checkpoint, path, options)
    source, notes = kind.read(ModelFolder(path=path, task=kind.task, config=config, options=options))
    if checkpoint is not None:
        source = with_record(source, checkpoint, license_name=options.license_name)
    return _with_texts(source, options.texts_file), notes + _note_of_version(content)


def _asked_by(checkpoint: Checkpoint, path: Path, options: FolderOptions) -> FolderOptions:
    """Returns the options with what the checkpoint says where they say nothing."""
    length, evaluation = checkpoint.configuration.get("max_length"), checkpoint.evaluation
    return replace(
        options,
        name=options.name or checkpoint.name,
        max_length=options.max_length or (int(length) if length else None),
        evaluation_file=options.evaluation_file or (path / evaluation.file if evaluation else None),
        evaluation_name=None if options.evaluation_file or evaluation is None else evaluation.dataset,
    )


def _note_of_version(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Says that a configuration was written by a newer `transformers` than the one that has read it."""
    stated = str(content.get("transformers_version", ""))
    written, own = (tuple(map(int, re.findall(r"\d+", version)[:2])) for version in (stated, transformers.__version__))
    if written <= own:
        return ()
    return (
        f"{CONFIG_FILE} was written by transformers {stated}, and {transformers.__version__} has read it, which "
        "ignores what it does not know",
    )


def _with_texts(source: ExportSource, file: Path | None) -> ExportSource:
    """Adds the texts of a file, a line each.

    Raises:
        SourceError: It cannot be read, has none, or the model reads no texts.
    """
    if file is None:
        return source
    try:
        texts = tuple(filter(str.strip, file.read_text(encoding="utf-8").split("\n")))
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read as lines of text ({error})") from error
    if not texts or source.tokenizer is None:
        raise SourceError(f"--texts {file}: {'holds no text' if not texts else f'{source.task} reads no texts'}")
    return replace(source, texts=texts, texts_name=file.name)


def _embedding_task(
    path: Path, content: Mapping[str, Any], layout: Layout | None, options: FolderOptions
) -> str | None:
    """Returns the task of a model without a head, where the folder or the options tell it."""
    names = [str(name) for name in content.get("architectures") or []]
    sees = (path / PREPROCESSOR_FILE).exists() and "text_config" not in content
    if sees and names and all(name.endswith("Model") for name in names):
        return str(Task.IMAGE_EMBEDDING)
    return str(Task.TEXT_EMBEDDING) if layout is not None or options.pooling is not None else None


def _kind_of(path: Path, content: Mapping[str, Any], asked: str | None) -> Kind:
    """Returns the kind of model that a folder holds.

    Raises:
        SourceError: It cannot be told, or is none that this command exports.
    """
    known = ", ".join(kind.task for kind in KINDS)
    if asked is not None:
        if not (kinds := [kind for kind in KINDS if kind.task == asked]):
            raise SourceError(f"--task {asked}: this command exports {known}")
        return _of_its_parts(path, content, kinds[0])
    architectures = content.get("architectures") or []
    found = {kind.task: kind for name in architectures if (kind := _kind_named(str(name))) is not None}
    if len(found) != 1:
        raise SourceError(
            f"{path}: the task cannot be told from architectures {json.dumps(architectures)}; "
            f"give it with --task, one of {known}"
        )
    return _of_its_parts(path, content, *found.values())


def _kind_named(architecture: str) -> Kind | None:
    """Returns the kind of an architecture; the longest head decides, since one may end with another."""
    heads = {head: kind for kind in KINDS for head in kind.heads if architecture.endswith(head)}
    return heads[max(heads, key=len)] if heads else None


def _of_its_parts(path: Path, content: Mapping[str, Any], kind: Kind) -> Kind:
    """Returns a kind, if it has an encoder and a decoder where the model does.

    Raises:
        SourceError: One of them has them and the other does not.
    """
    if bool(content.get("is_encoder_decoder")) != kind.is_encoder_decoder:
        what = "an encoder-decoder" if content.get("is_encoder_decoder") else "no encoder-decoder"
        raise SourceError(f"{path}: is {what} ({content.get('model_type')}), and is not exported for {kind.task}")
    return kind
