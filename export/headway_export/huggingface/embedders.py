"""Models that make vectors of texts: folders of sentence-transformers, and encoders with a pooling that is asked for.

B rows, T tokens, D model width, E width of an embedding.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, normalizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder, as_source_error, weight_files
from headway_export.source import TOKENIZER_CONFIG_FILE, ExportSource
from headway_server.bundles import SpecialTokens
from headway_training.folders import check_reading, first_line, padding_of, plain_tokenizer

MODULES_FILE: Final = "modules.json"
_TRANSFORMER_FILE: Final = "sentence_bert_config.json"
_PROMPTS_FILE: Final = "config_sentence_transformers.json"
_UNUSED: Final = ("pooler.",)
"""Weights that the last hidden states do not depend on; many folders do not hold them."""
_ACTIVATIONS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "Sigmoid": nn.Sigmoid,
}


# Pooling: states (B, T, D) and mask (B, T, 1), 1 at tokens, to (B, D)


def _first_token(states: Tensor, _: Tensor) -> Tensor:
    return states[:, 0]


def _last_token(states: Tensor, mask: Tensor) -> Tensor:
    last = mask.sum(dim=1, keepdim=True).to(torch.int64) - 1  # (B, 1, 1)
    return states.gather(1, last.expand(-1, 1, states.shape[-1])).squeeze(1)


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)


def _mean_sqrt_length(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9).sqrt()


def _weighted_mean(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask * mask.cumsum(dim=1)  # 1, 2, 3, ...
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)


def _max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask == 0, torch.finfo(states.dtype).min).amax(dim=1)


_POOLINGS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "first_token": _first_token,
    "last_token": _last_token,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_length": _mean_sqrt_length,
    "weighted_mean": _weighted_mean,
}
_NAMES: Final = {
    "cls": "first_token",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "weightedmean": "weighted_mean",
    "lasttoken": "last_token",
    "last": "last_token",
}
"""Poolings by the names of sentence-transformers, in the order in which it joins the vectors of several; and `last`."""
_SWITCHES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How its older versions write which poolings there are: true or false each."""


class HuggingFaceEmbedder(nn.Module):
    """An encoder of `transformers`, a pooling, and what follows it."""

    def __init__(self, model: nn.Module, *, poolings: Sequence[str], head: nn.Module, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.poolings = tuple(poolings)
        self.pooling = "+".join(poolings)
        self.head = head
        self.max_length = max_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """(B, T), (B, T) -> `embedding` (B, E)."""
        states = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)  # (B, T, 1)
        pooled = torch.cat([_POOLINGS[name](states, mask) for name in self.poolings], dim=-1)
        return {"embedding": self.head(pooled)}


class _Projection(nn.Module):
    """The `Dense` of sentence-transformers."""

    def __init__(self, linear: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        return cast("Tensor", self.activation(self.linear(vectors)))


class _Normalize(nn.Module):
    """Scales vectors to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1)


# Folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parts of a folder of sentence-transformers."""

    transformer: Path
    """Folder of the encoder."""
    poolings: tuple[str, ...]
    rest: tuple[tuple[str, Path], ...]
    """Kind and folder of each module that follows the pooling."""


def read_layout(path: Path) -> Layout | None:
    """Reads `modules.json`; None where there is none, or where it has no pooling.

    Raises:
        SourceError: It cannot be read, or there is a module of a kind that is not supported.
    """
    if not (path / MODULES_FILE).exists():
        return None
    try:
        entries = json.loads((path / MODULES_FILE).read_text(encoding="utf-8"))
        modules = [(str(entry["type"]).rsplit(".", 1)[-1], path / str(entry["path"])) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path / MODULES_FILE}: cannot be read as a list of modules ({error!r})") from error
    if outside := [
        folder for _, folder in modules if not folder.is_relative_to(path) or ".." in folder.relative_to(path).parts
    ]:
        raise SourceError(f"{path / MODULES_FILE}: names {outside[0]}, which lies outside of the folder")
    kinds = [kind for kind, _ in modules]
    if "Pooling" not in kinds and kinds[:1] == ["Transformer"]:
        return None
    known = ("Dense", "Normalize", "Dropout")
    if kinds[:2] != ["Transformer", "Pooling"] or (others := [kind for kind in kinds[2:] if kind not in known]):
        unsupported = others[0] if kinds[:2] == ["Transformer", "Pooling"] else ", ".join(kinds)
        raise SourceError(
            f"{path / MODULES_FILE}: has {unsupported}; a folder is exported that has Transformer and Pooling, then "
            f"any of {', '.join(known)}"
        )
    return Layout(
        transformer=modules[0][1],
        poolings=_read_poolings(modules[1][1]),
        rest=tuple((kind, folder) for kind, folder in modules[2:] if kind != "Dropout"),
    )


def read_embedder(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a folder of sentence-transformers, or an encoder with the pooling that is asked for.

    Raises:
        SourceError: The folder is incomplete, no pooling is known, or something in it is not supported.
    """
    layout, asked = read_layout(folder.path), folder.options.pooling
    if asked is not None and asked not in _NAMES:
        raise SourceError(f"--pooling {asked}: is none of {', '.join(_NAMES)}")
    if layout is None and asked is None:
        raise SourceError(
            f"{folder.path}: has no {MODULES_FILE} that says how token vectors become one; give --pooling, one of "
            f"{', '.join(_NAMES)}, as the model's authors say"
        )
    if layout is not None and asked is not None:
        raise SourceError(f"--pooling {asked}: {folder.path / MODULES_FILE} says how token vectors become one")
    encoder = folder if layout is None else replace(folder, path=layout.transformer)
    settings = _read_json(encoder.path / _TRANSFORMER_FILE)
    own = encoder.own_tokenizer()
    tokenizer = plain_tokenizer(own)
    if settings.get("do_lower_case"):
        _lower(tokenizer)
    encoder.config.use_cache = False  # a decoder that embeds keeps none
    model = _load_encoder(encoder)
    encoder.check_inputs(model)
    stated = settings.get("max_seq_length") or _read_json(encoder.path / TOKENIZER_CONFIG_FILE).get("model_max_length")
    length, notes = _length_of(encoder, model, stated)
    poolings = layout.poolings if layout is not None else (_NAMES[str(asked)],)
    rest = layout.rest if layout is not None else ()

    def adapt(model: nn.Module) -> nn.Module:
        head = nn.Sequential(*(_read_module(kind, path, folder.options.allow_pickle) for kind, path in rest))
        return HuggingFaceEmbedder(model, poolings=poolings, head=head, max_length=length).eval()

    module = adapt(model)
    with as_source_error():
        name = type(model).__name__
        check_reading(encoder.path, module, name=name, config=encoder.config, tokenizer=tokenizer, longest=length)
    prompts, default = _read_prompts(folder)
    return (
        folder.source(
            model,
            module,
            make_reference=lambda: adapt(_load_encoder(encoder)),
            tokenizer=tokenizer,
            special_tokens=SpecialTokens(pad=padding_of(folder.config, own)),
            prompts=prompts,
            default_prompt=default,
            evaluation=folder.evaluation(),
        ),
        notes,
    )


def _load_encoder(folder: ModelFolder) -> nn.Module:
    """Loads an encoder without its pooler, which nothing reads."""
    model = folder.load(AutoModel, unused=_UNUSED)
    if getattr(model, "pooler", None) is not None:
        cast("Any", model).pooler = None
    return model


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a file, or an empty one where there is no file.

    Raises:
        SourceError: It is no JSON object.
    """
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise SourceError(f"{file}: is not a JSON object")
    return content


def _read_poolings(path: Path) -> tuple[str, ...]:
    file = path / "config.json"
    content = _read_json(file)
    if not content:
        raise SourceError(f"{file}: is not there, and says how token vectors become one; fetch the folder again")
    if content.get("include_prompt", True) is False:
        raise SourceError(
            f"{file}: leaves the prompt's tokens out of the pooling (include_prompt), which is not supported"
        )
    modes = content.get("pooling_mode") or [name for switch, name in _SWITCHES.items() if content.get(switch)] or "mean"
    names = [modes] if isinstance(modes, str) else list(modes)
    if unknown := [name for name in names if name not in _NAMES]:
        raise SourceError(f"{file}: pooling {unknown[0]} is none of {', '.join(_NAMES)}")
    return tuple(_NAMES[name] for name in names)


def _read_module(kind: str, path: Path, allow_pickle: bool) -> nn.Module:
    if kind == "Normalize":
        return _Normalize()
    file = path / "config.json"
    content = _read_json(file)
    name = str(content.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if (
        name not in _ACTIVATIONS
        or content.get("use_residual")
        or content.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    ):
        raise SourceError(
            f"{file}: has settings that are not supported; {', '.join(_ACTIVATIONS)} may follow its product"
        )
    try:
        (stored,) = weight_files(path, {entry.name for entry in path.iterdir()}, allow_pickle=allow_pickle)
        is_pickled = not stored.endswith(".safetensors")
        weights = torch.load(path / stored, weights_only=True) if is_pickled else load_file(path / stored)
        linear = nn.Linear(
            int(content["in_features"]), int(content["out_features"]), bias=bool(content.get("bias", True))
        )
        linear.load_state_dict({key.removeprefix("linear."): value.float() for key, value in weights.items()})
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise SourceError(f"{path}: its weights cannot be read ({first_line(error)})") from error
    return _Projection(linear, _ACTIVATIONS[name]())


def _read_prompts(folder: ModelFolder) -> tuple[dict[str, str], str | None]:
    """Returns the prompts of a folder and those that are asked for, and the name of the one that is the default."""
    content = _read_json(folder.path / _PROMPTS_FILE)
    prompts = {str(name): str(text or "") for name, text in (content.get("prompts") or {}).items()}
    default = content.get("default_prompt_name")
    return prompts | dict(folder.options.prompts), default if default in prompts else None


def _length_of(folder: ModelFolder, model: nn.Module, stated: int | None) -> tuple[int, tuple[str, ...]]:
    """Returns the most tokens of a text: those asked for, or what the folder states, or what the model takes."""
    if folder.options.max_length is None and stated is not None:
        longest, notes = folder.length(model)
        return (int(stated), ()) if int(stated) < longest else (longest, notes)
    return folder.length(model)


def _lower(tokenizer: Tokenizer) -> None:
    """Has a tokenizer read texts in small letters."""
    parts: list[Any] = [normalizers.Lowercase(), *([tokenizer.normalizer] if tokenizer.normalizer is not None else [])]
    tokenizer.normalizer = normalizers.Sequence(parts)
