"""The kinds of models that are read, and the kind that a folder is of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway_export.errors import SourceError
from headway_export.huggingface.decoders import read_decoder
from headway_export.huggingface.encoders import read_classifier
from headway_export.huggingface.folder import (
    FolderOptions,
    ModelFolder,
    check_weights,
    parse_configuration,
    read_configuration,
)
from headway_export.huggingface.translators import read_translator
from headway_export.source import ExportSource
from headway_server.bundles import Task


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
    Kind(task=Task.TRANSLATION, heads=("MarianMTModel",), is_encoder_decoder=True, read=read_translator),
    Kind(task=Task.TEXT_CLASSIFICATION, heads=("ForSequenceClassification",), read=read_classifier),
    Kind(task=Task.TOKEN_CLASSIFICATION, heads=("ForTokenClassification",), read=read_classifier),
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
    content = read_configuration(path)
    kind = _kind_of(path, content, options.task)
    check_weights(path, allow_pickle=options.allow_pickle)
    config = parse_configuration(path, content)
    return kind.read(ModelFolder(path=path, task=kind.task, config=config, options=options))


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
    found = [kind for kind in KINDS if any(str(name).endswith(kind.heads) for name in architectures)]
    if len(found) != 1:
        raise SourceError(
            f"{path}: the task cannot be told from architectures {json.dumps(architectures)}; "
            f"give it with --task, one of {known}"
        )
    return _of_its_parts(path, content, found[0])


def _of_its_parts(path: Path, content: Mapping[str, Any], kind: Kind) -> Kind:
    """Returns a kind, if it has an encoder and a decoder where the model does.

    Raises:
        SourceError: One of them has them and the other does not.
    """
    if bool(content.get("is_encoder_decoder")) != kind.is_encoder_decoder:
        what = "an encoder-decoder" if content.get("is_encoder_decoder") else "no encoder-decoder"
        raise SourceError(f"{path}: is {what} ({content.get('model_type')}), and is not exported for {kind.task}")
    return kind
