"""Translation models: Marian, whose source and target each have a SentencePiece model."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from headway_export.errors import SourceError
from headway_export.huggingface.encoder_decoders import adapt, read_generation_config
from headway_export.huggingface.folder import ModelFolder, first_line
from headway_export.huggingface.tokenizers import SPACE, check_tokenizer, convert_pieces, sample_lines
from headway_export.source import ExportSource
from headway_server.bundles import Languages

_SOURCE_PIECES: Final = "source.spm"
_VOCABULARY: Final = "vocab.json"


def read_translator(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a translation model.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    special_tokens, suppressed, notes = read_generation_config(folder)
    languages = _languages_of(folder)
    tokenizer = _marian_tokenizer(folder)
    folder.check_vocabulary(tokenizer)
    model = folder.load(AutoModelForSeq2SeqLM)
    length, more_notes = folder.length(model)
    module = adapt(folder, model, max_source_length=length, max_target_length=length)
    return (
        folder.source(
            model,
            module,
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            suppressed_tokens=suppressed,
            languages=languages,
            evaluation=folder.evaluation(),
        ),
        notes + more_notes,
    )


def _languages_of(folder: ModelFolder) -> Languages:
    """Returns the languages that are asked for, or those of `tokenizer_config.json`, or of the folder's name.

    Raises:
        SourceError: They cannot be told.
    """
    if folder.options.languages is not None:
        return folder.options.languages
    settings = _read_json(folder, "tokenizer_config.json")
    named = re.search(r"opus-mt(?:-[a-z]+)*?-([a-z]{2,3})-([a-z]{2,3})$", folder.path.resolve().name.lower())
    pair = [settings.get("source_lang"), settings.get("target_lang")]
    if not all(isinstance(code, str) and code for code in pair):
        if named is None:
            raise SourceError(f"{folder.path}: its languages cannot be told; give them with --languages, such as en-de")
        pair = list(named.groups())
    return Languages(source=str(pair[0]), target=str(pair[1]))


def _marian_tokenizer(folder: ModelFolder) -> Tokenizer:
    """Converts the tokenizer of a Marian model and holds it against the folder's own.

    Raises:
        SourceError: It cannot be converted, or differs.
    """
    file = folder.path / _SOURCE_PIECES
    if not file.exists() or not (folder.path / _VOCABULARY).exists():
        raise SourceError(f"{folder.path}: has no tokenizer; a Marian model needs {_SOURCE_PIECES} and {_VOCABULARY}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it recommends a library that it does not use here
            own = AutoTokenizer.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{folder.path}: has no tokenizer that can be read ({first_line(error)})") from error
    if getattr(own, "separate_vocabs", False):
        raise SourceError(f"{folder.path}: source and target have vocabularies of their own, which is not supported")
    ids = {str(piece): int(index) for piece, index in _read_json(folder, _VOCABULARY).items()}
    special = [str(token) for token in own.all_special_tokens]
    tokenizer = convert_pieces(file, ids, unknown=str(own.unk_token), end=str(own.eos_token), special=special)
    pieces = [*special, *(piece.replace(SPACE, " ") for piece in ids)]
    # Its own tokenizer takes `>>fra<<` at the beginning for the language to translate to; ours takes all text for text.
    lines = (line for line in sample_lines(pieces=pieces) if not line.startswith(">>"))
    check_tokenizer(folder.path, tokenizer, lambda line: list(own(line).input_ids), lines=lines)
    return tokenizer


def _read_json(folder: ModelFolder, name: str) -> dict[str, Any]:
    """Returns what a file holds; nothing, if it is not there.

    Raises:
        SourceError: It cannot be read.
    """
    file = folder.path / name
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read ({error})") from error
    return content if isinstance(content, dict) else {}
