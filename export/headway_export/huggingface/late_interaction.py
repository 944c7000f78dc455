"""Models with a vector of each token, which score pairs by late interaction (ColBERT).

Folders are of two forms: modules of sentence-transformers or PyLate without a pooling, and those of ColBERT's authors
(`HF_ColBERT`), whose weights have the projection beside the encoder's.

B rows, T tokens, E width of a token's vector.
"""

from __future__ import annotations

import pickle
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel

from headway_export.errors import SourceError
from headway_export.huggingface.embedders import (
    PROMPTS_FILE,
    UNUSED_WEIGHTS,
    lower,
    read_module,
    read_modules,
    read_transformer,
)
from headway_export.huggingface.folder import ModelFolder, as_source_error, weight_files
from headway_export.huggingface.settings import read_settings
from headway_export.source import ExportSource
from headway_server.bundles import LateInteraction, Scoring, SpecialTokens
from headway_training.folders import check_reading, first_line, padding_of, plain_tokenizer

_ARCHITECTURE: Final = "HF_ColBERT"
_METADATA_FILE: Final = "artifact.metadata"
_PROJECTION: Final = "linear.weight"
_SIZES: Final = ("query_length", "document_length")
"""What a folder of PyLate states, and no other."""
_SETTINGS: Final = frozenset((
    "__version__", "query_prefix", "document_prefix", *_SIZES, "do_query_expansion", "attend_to_expansion_tokens",
    "skiplist_words", "similarity_fn_name", "model_type",
))  # fmt: skip
"""Settings of PyLate that are read here, or that say nothing of the vectors; others are named."""


class LateInteractionModel(nn.Module):
    """An encoder of `transformers`, and a projection of each token."""

    def __init__(self, model: nn.Module, *, head: nn.Module, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.max_length = max_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """(B, T), (B, T) -> `token_vectors` (B, T, E), of length one."""
        states = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state
        return {"token_vectors": functional.normalize(self.head(states), dim=-1)}


def compares_tokens(path: Path, architectures: list[str]) -> bool:
    """Returns True if a folder holds a model with a vector of each token."""
    if architectures == [_ARCHITECTURE]:
        return True
    kinds = [kind for kind, _ in read_modules(path)]
    is_projected = kinds[:1] == ["Transformer"] and set(kinds[1:]) == {"Dense"}
    return is_projected and any(name in read_settings(path / PROMPTS_FILE) for name in _SIZES)


def read_late_interaction(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model with a vector of each token.

    Raises:
        SourceError: The folder is incomplete, or something in it is not supported.
    """
    own = folder.own_tokenizer()
    tokenizer = plain_tokenizer(own)
    settings, notes = read_transformer(folder.path, is_sparse=False)
    if settings.get("do_lower_case"):
        lower(tokenizer)
    is_of_authors = (folder.config.architectures or []) == [_ARCHITECTURE]
    stated = _of_authors(folder.path) if is_of_authors else read_settings(folder.path / PROMPTS_FILE)

    def token(name: str, default: str) -> int:
        text = str(stated.get(name) or default)
        found = tokenizer.token_to_id(text)
        found = tokenizer.token_to_id(text.strip()) if found is None else found
        if found is None:
            raise SourceError(f"{folder.path}: {name} is {text!r}, which is no token of its tokenizer")
        return int(found)

    fills = bool(stated.get("do_query_expansion", True))
    if fills and own.mask_token_id is None:
        raise SourceError(f"{folder.path}: fills up queries with the mask token, and its tokenizer has none")
    words = stated.get("skiplist_words")
    skipped = {tokenizer.token_to_id(word) for word in (string.punctuation if words is None else words)}
    make_head = _projection if is_of_authors else _heads
    model = folder.load(AutoModel, unused=UNUSED_WEIGHTS)
    folder.check_inputs(model)
    longest, notes_of_length = folder.length(model)
    if not is_of_authors:
        unknown = ", ".join(sorted(set(stated) - _SETTINGS))
        notes += (f"{PROMPTS_FILE}: {unknown}: not applied by the server",) if unknown else ()
    length = min(longest, folder.options.max_length or int(stated.get("document_length") or 180))

    def adapt(model: nn.Module) -> nn.Module:
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # type: ignore[assignment]  # nothing reads it
        return LateInteractionModel(model, head=make_head(folder), max_length=length).eval()

    module = adapt(model)
    with as_source_error():
        name = type(model).__name__
        check_reading(folder.path, module, name=name, config=folder.config, tokenizer=tokenizer, longest=length)
        with torch.no_grad():
            width = module(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64))["token_vectors"]
    late = LateInteraction(
        dimension=width.shape[-1],
        max_query_tokens=min(longest, int(stated.get("query_length") or 32)),
        query_marker=token("query_prefix", "[Q] "),
        text_marker=token("document_prefix", "[D] "),
        query_filler=own.mask_token_id if fills else None,
        attends_to_filler=bool(stated.get("attend_to_expansion_tokens")),
        skipped_tokens=tuple(sorted(found for found in skipped if found is not None)),
    )
    return (
        folder.source(
            model,
            module,
            make_reference=lambda: adapt(folder.load(AutoModel, unused=UNUSED_WEIGHTS)),
            tokenizer=tokenizer,
            special_tokens=SpecialTokens(pad=padding_of(folder.config, own)),
            scoring=Scoring(activation="none", late_interaction=late),
            text_pairs="required",
            evaluation=folder.evaluation(),
        ),
        (*notes, *notes_of_length),
    )


def _of_authors(path: Path) -> Mapping[str, Any]:
    """Returns what a folder of ColBERT's authors states, by the names of PyLate."""
    stated = read_settings(path / _METADATA_FILE)
    names = {"query_prefix": "query_token_id", "document_prefix": "doc_token_id", "query_length": "query_maxlen"}
    names |= {"document_length": "doc_maxlen", "attend_to_expansion_tokens": "attend_to_mask_tokens"}
    found = {name: stated.get(other) for name, other in names.items()}
    defaults = {"query_prefix": "[unused0]", "document_prefix": "[unused1]"}
    skips: dict[str, Any] = {} if stated.get("mask_punctuation", True) else {"skiplist_words": []}
    return {**found, **{name: found[name] or text for name, text in defaults.items()}, **skips}


def _heads(folder: ModelFolder) -> nn.Module:
    modules = read_modules(folder.path)[1:]
    return nn.Sequential(
        *(read_module(kind, path, folder.options.allow_pickle, of="token_embeddings") for kind, path in modules)
    )


def _projection(folder: ModelFolder) -> nn.Module:
    """Reads the projection among the weights of the encoder.

    Raises:
        SourceError: It is not there.
    """
    names = weight_files(
        folder.path, {entry.name for entry in folder.path.iterdir()}, allow_pickle=folder.options.allow_pickle
    )
    try:
        for name in names:
            file = folder.path / name
            weights = load_file(file) if name.endswith(".safetensors") else torch.load(file, weights_only=True)
            if _PROJECTION in weights:
                weight = weights[_PROJECTION].float()
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.load_state_dict({"weight": weight})
                return linear
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
        raise SourceError(f"{folder.path}: its weights cannot be read ({first_line(error)})") from error
    raise SourceError(f"{folder.path}: has no weights {_PROJECTION}, which make the vectors of tokens")
