"""Translation models: Marian, whose source and target each have a SentencePiece model, and models of many languages.

Which languages a call is about, tokens tell: before the source that of its language (M2M-100, NLLB, mBART-50) or of the
target's (Marian), and at the beginning of the output that of the target's. The server writes them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any, Final

from tokenizers import Tokenizer, processors

from headway_export.errors import SourceError
from headway_export.huggingface.encoder_decoders import read_encoder_decoder, read_generation_config
from headway_export.huggingface.folder import ModelFolder, as_source_error
from headway_export.huggingface.tokenizers import SPACE, check_tokenizer, convert_pieces, sample_lines
from headway_export.source import ExportSource
from headway_server.bundles import TOKENIZER_FILE, Languages
from headway_training.folders import open_tokenizer

_SOURCE_PIECES: Final = "source.spm"
_PIECES: Final = "sentencepiece.bpe.model"
_VOCABULARY: Final = "vocab.json"
_LANGUAGE: Final = re.compile(r"__[a-z]{2,3}__|[a-z]{2,3}_(?:[A-Z]{2}|[A-Z][a-z]{3})")
"""Tokens of languages: those of M2M-100, and those of mBART-50 and NLLB."""
_MARK: Final = re.compile(r">>[A-Za-z_]+<<")
"""Tokens of Marian's targets."""
TRANSLATORS: Final = ("MarianMTModel", "M2M100ForConditionalGeneration", "MBartForConditionalGeneration")
"""Architectures that translate."""


def read_translator(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a translation model.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    start = read_generation_config(folder)
    own = _own_tokenizer(folder)
    if folder.config.model_type == "marian":
        tokenizer = _marian_tokenizer(folder, own)
        marks = {token[2:-2]: token for token in own.get_vocab() if _MARK.fullmatch(token)}
        languages = _marked_languages(folder, _ids_of(own, marks)) if marks else _pair_of(folder)
    elif tokens := _language_tokens(own):
        tokenizer = _without_language(folder, own)
        languages = _many_languages(folder, tokens, start.prefix)
    else:
        tokenizer = folder.tokenizer()
        languages = _pair_of(folder)
    folder.check_vocabulary(tokenizer)
    return read_encoder_decoder(folder, tokenizer, start, languages)


def _own_tokenizer(folder: ModelFolder) -> Any:
    """Returns the folder's tokenizer as `transformers` reads it.

    Raises:
        SourceError: There is none that can be read.
    """
    if folder.config.model_type == "marian" and not all(
        (folder.path / name).exists() for name in (_SOURCE_PIECES, _VOCABULARY)
    ):
        raise SourceError(f"{folder.path}: has no tokenizer; a Marian model needs {_SOURCE_PIECES} and {_VOCABULARY}")
    with as_source_error(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Marian's recommends a library that it does not use here
        return open_tokenizer(folder.path)


# Languages


def _pair_of(folder: ModelFolder) -> Languages:
    """Returns the languages that are asked for, or those of `tokenizer_config.json`, or of the folder's name.

    Raises:
        SourceError: They cannot be told.
    """
    if folder.options.languages is not None:
        return folder.options.languages
    settings = _read_json(folder, "tokenizer_config.json")
    named = re.search(r"opus-mt(?:-[a-z]+)*?-([a-z]{2,3})-([a-z]{2,3})$", folder.title().lower())
    pair = [settings.get("source_lang"), settings.get("target_lang")]
    if not all(isinstance(code, str) and code for code in pair):
        if named is None:
            raise SourceError(f"{folder.path}: its languages cannot be told; give them with --languages, such as en-de")
        pair = list(named.groups())
    return Languages(source=str(pair[0]), target=str(pair[1]))


def _marked_languages(folder: ModelFolder, marks: Mapping[str, int]) -> Languages:
    """Returns the languages of a model that is told its target by a token before the source.

    Raises:
        SourceError: The source cannot be told, or a target is asked for that the model does not have.
    """
    pair = _pair_of(folder)
    asked = folder.options.languages
    return Languages(source=pair.source, target_marks=_chosen(folder, marks, asked.target if asked else ""))


def _language_tokens(own: Any) -> dict[str, int]:
    """Returns the tokens of a tokenizer that stand for languages, by their codes.

    None, if they are not what a source begins with: then what the tokenizer writes is fixed, and so is the pair.
    """
    codes = {_LANGUAGE.fullmatch(str(token)): str(token) for token in own.all_special_tokens}
    tokens = _ids_of(own, {_code_of(match): token for match, token in codes.items() if match is not None})
    begins = len(own("a").input_ids) > 1 and own("a").input_ids[0] in tokens.values()
    return tokens if begins else {}


def _code_of(token: re.Match[str]) -> str:
    """Returns the code of a language's token: `fr` of `__fr__`, `en` of `en_XX`, `fra-Latn` of `fra_Latn`."""
    return token[0].strip("_").removesuffix("_XX").replace("_", "-")


def _ids_of(own: Any, tokens: Mapping[str, str]) -> dict[str, int]:
    """Returns the ids of those tokens that a vocabulary has."""
    ids = {code: int(own.convert_tokens_to_ids(token)) for code, token in sorted(tokens.items())}
    return {code: token_id for code, token_id in ids.items() if token_id != own.unk_token_id}


def _many_languages(folder: ModelFolder, tokens: Mapping[str, int], forced: Collection[int]) -> Languages:
    """Returns the languages of a model that is told both by tokens.

    Args:
        folder: The model's.
        tokens: Of languages, by their codes.
        forced: The token that `generation_config.json` has each output begin with: that of the only target.

    Raises:
        SourceError: A language is asked for that the model does not have.
    """
    asked = folder.options.languages
    targets = {code: token for code, token in tokens.items() if token in forced} or tokens
    return Languages(
        source_tokens=_chosen(folder, tokens, asked.source if asked else ""),
        target_tokens=_chosen(folder, targets, asked.target if asked else ""),
    )


def _chosen(folder: ModelFolder, tokens: Mapping[str, int], code: str) -> dict[str, int]:
    """Returns the token of the language that is asked for; of all, if none is.

    Raises:
        SourceError: There is none.
    """
    if not code:
        return dict(tokens)
    known = Languages.match(code, list(tokens))
    if known is None:
        raise SourceError(f"{folder.path}: --languages: has no language {code}; it has {', '.join(tokens)}")
    return {known: tokens[known]}


# Tokenizers


def _without_language(folder: ModelFolder, own: Any) -> Tokenizer:
    """Returns the tokenizer of a model of many languages, whose token the server puts before a source.

    Raises:
        SourceError: It cannot be converted, or differs from the folder's own.
    """
    end = str(own.eos_token)
    pieces = folder.path / _PIECES
    if getattr(own, "backend_tokenizer", None) is not None:
        tokenizer = Tokenizer.from_str(own.backend_tokenizer.to_str())
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, own.eos_token_id)]
        )
    elif pieces.exists() and (folder.path / _VOCABULARY).exists():
        ids = {str(piece): int(index) for piece, index in _read_json(folder, _VOCABULARY).items()}
        special = [str(token) for token in own.all_special_tokens]
        ids |= {token: own.convert_tokens_to_ids(token) for token in special}
        tokenizer = convert_pieces(pieces, ids, unknown=str(own.unk_token), end=end, special=special)
    else:
        raise SourceError(f"{folder.path}: has no tokenizer; it needs {TOKENIZER_FILE}, or {_PIECES} and {_VOCABULARY}")
    check_tokenizer(folder.path, tokenizer, lambda line: list(own(line).input_ids)[1:], lines=sample_lines())
    return tokenizer


def _marian_tokenizer(folder: ModelFolder, own: Any) -> Tokenizer:
    """Converts the tokenizer of a Marian model and holds it against the folder's own.

    Raises:
        SourceError: It cannot be converted, or differs.
    """
    file = folder.path / _SOURCE_PIECES
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
