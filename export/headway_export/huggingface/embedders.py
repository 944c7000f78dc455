"""Models that make vectors of texts: folders of sentence-transformers, and encoders with a pooling that is asked for.

B rows, T tokens, D model width, E width of an embedding.
"""

from __future__ import annotations

import json
import pickle
import re
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
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForTextEncoding

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder, as_source_error, weight_files
from headway_export.huggingface.graph_forms import for_graph
from headway_export.huggingface.settings import read_settings
from headway_export.source import TOKENIZER_CONFIG_FILE, ExportSource
from headway_server.bundles import SpecialTokens
from headway_training.folders import check_reading, first_line, padding_of, plain_tokenizer

MODULES_FILE: Final = "modules.json"
SPLADE: Final = "splade"
"""Pooling of sparse vectors."""
_TRANSFORMER_FILES: Final = (
    "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
    "sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)  # fmt: skip
"""Names of the settings of a `Transformer`, of which the first that is there holds."""
PROMPTS_FILE: Final = "config_sentence_transformers.json"
SETTINGS: Final[Mapping[str, frozenset[str]]] = {
    "module": frozenset(("idx", "name", "path", "type", "kwargs")),
    "transformer": frozenset((
        "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name", "model_args",
        "tokenizer_args", "config_args", "processor_args", "processing_kwargs", "unpad_inputs", "model_type",
    )),
    "sentence transformer": frozenset((
        "__version__", "prompts", "default_prompt_name", "similarity_fn_name", "model_type", "truncate_dim",
    )),
    "pooling": frozenset((
        "word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode", "pooling_mode_cls_token",
        "pooling_mode_max_tokens", "pooling_mode_mean_tokens", "pooling_mode_mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken",
    )),
    "dense": frozenset((
        "in_features", "out_features", "bias", "activation_function", "use_residual", "module_input_name",
        "module_output_name",
    )),
}  # fmt: skip
"""Settings of each file of sentence-transformers that are read, refused or named here; others are named."""
_ARGUMENTS: Final = (
    "model_args",
    "tokenizer_args",
    "config_args",
    "processor_args",
    "processing_kwargs",
    "truncate_dim",
)
"""Those that are named where they say anything."""
_ONLY: Final[Mapping[str, Any]] = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
}
"""What a `Transformer` may be asked for, if anything; all else is refused."""
UNUSED_WEIGHTS: Final = ("pooler.",)
"""Weights that the last hidden states do not depend on; many folders do not hold them."""
TEXT_ENCODERS: Final = ("t5", "mt5", "umt5")
"""Model types with a decoder of which an embedder has the encoder alone."""
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


def last_token(states: Tensor, mask: Tensor) -> Tensor:
    """(B, T, D), (B, T, 1) -> (B, D)."""
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
    "last_token": last_token,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_length": _mean_sqrt_length,
    "weighted_mean": _weighted_mean,
}
_BY_PLACE: Final = frozenset(("last_token", "weighted_mean"))
"""Poolings that count tokens from the first."""
_SPARSE_KINDS: Final = (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"])
"""Modules of a folder of sparse vectors, by sentence-transformers 5 and 6."""
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
_INSTRUCTOR: Final = re.compile(r"INSTRUCTOR_?")
"""What the kinds of INSTRUCTOR's modules begin with."""
_OF_INSTRUCTOR: Final = "from InstructorEmbedding import INSTRUCTOR"
"""What the README of published folders says, whose modules have the kinds of sentence-transformers."""
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

    def __init__(
        self, model: nn.Module, *, poolings: Sequence[str], head: nn.Module, max_length: int, pools_prompt: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self.poolings = tuple(poolings)
        self.pooling = "+".join(poolings)
        self.head = head
        self.max_length = max_length
        self.pools_prompt = pools_prompt

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """(B, T), (B, T) -> `embedding` (B, E)."""
        pooled_tokens = attention_mask
        if not self.pools_prompt:
            attention_mask, pooled_tokens = attention_mask.clamp(max=1), (attention_mask == 1).to(attention_mask.dtype)
        states = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state
        mask = pooled_tokens.unsqueeze(-1).to(states.dtype)  # (B, T, 1)
        pooled = torch.cat([_POOLINGS[name](states, mask) for name in self.poolings], dim=-1)
        return {"embedding": self.head(pooled)}


class SparseEmbedder(nn.Module):
    """A masked language model whose logits are weights of tokens (SPLADE, Formal et al. 2021)."""

    def __init__(self, model: nn.Module, *, pooling: str, activation: str, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.activation = activation
        self.max_length = max_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """(B, T), (B, T) -> `embedding` (B, V), a weight of each token of the vocabulary."""
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).logits  # (B, T, V)
        weights = torch.log1p(torch.relu(logits))
        if self.activation == "log1p_relu":
            weights = torch.log1p(weights)
        weights = weights * attention_mask.unsqueeze(-1).to(weights.dtype)
        return {"embedding": weights.amax(dim=1) if self.pooling == "max" else weights.sum(dim=1)}


class _Projection(nn.Module):
    """The `Dense` of sentence-transformers."""

    def __init__(self, linear: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        return cast("Tensor", self.activation(self.linear(vectors)))


class Normalize(nn.Module):
    """Scales vectors to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """(B, E) -> (B, E)."""
        return functional.normalize(vectors, dim=-1)


# Folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parts of a folder of sentence-transformers."""

    transformer: Path
    """Folder of the encoder."""
    poolings: tuple[str, ...]
    """Empty for sparse vectors."""
    pools_prompt: bool = True
    """False if the tokens of a prompt are left out of the pooling."""
    rest: tuple[tuple[str, Path], ...]
    """Kind and folder of each module that follows the pooling."""
    notes: tuple[str, ...]
    """What the folder says of them that is not done."""
    sparse_pooling: str = ""
    """`max` or `sum`, of sparse vectors."""
    sparse_activation: str = ""


def read_layout(path: Path) -> Layout | None:
    """Reads `modules.json`; None where there is none, or where it has no pooling.

    Raises:
        SourceError: It cannot be read, or there is a module of a kind that is not supported.
    """
    if not (path / MODULES_FILE).exists():
        return None
    entries, found = _read_modules(path)
    modules = _of_library(found)
    kinds = [kind for kind, _ in modules]
    if "Pooling" not in kinds and kinds[:1] == ["Transformer"]:
        return None
    if kinds in _SPARSE_KINDS:
        pooling, activation = _read_sparse_pooling(modules[1][1])
        return Layout(
            transformer=modules[0][1],
            poolings=(),
            rest=(),
            notes=(),
            sparse_pooling=pooling,
            sparse_activation=activation,
        )
    known = ("Dense", "Normalize", "Dropout")
    if kinds[:2] != ["Transformer", "Pooling"] or (others := [kind for kind in kinds[2:] if kind not in known]):
        unsupported = others[0] if kinds[:2] == ["Transformer", "Pooling"] else ", ".join(kinds)
        raise SourceError(
            f"{path / MODULES_FILE}: has {unsupported}; a folder is exported that has Transformer and Pooling, then "
            f"any of {', '.join(known)}"
        )
    stated = read_settings(modules[1][1] / "config.json").get("include_prompt")
    is_instructor = stated is None and (modules != found or _OF_INSTRUCTOR in _read_readme(path))
    notes = _notes_of_modules(path, entries, modules)
    if is_instructor:
        notes += ("INSTRUCTOR: tokens of a prompt are attended to and not pooled; give instructions with --prompt",)
    return Layout(
        transformer=modules[0][1],
        poolings=_read_poolings(modules[1][1]),
        pools_prompt=stated is not False and not is_instructor,
        rest=tuple((kind, folder) for kind, folder in modules[2:] if kind != "Dropout"),
        notes=notes,
    )


def _read_readme(path: Path) -> str:
    """Returns the README of a folder; an empty text where there is none."""
    try:
        return (path / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_modules(path: Path) -> list[tuple[str, Path]]:
    """Returns the kind and the folder of each module; none where there is no `modules.json`; errors: `read_layout`."""
    return _of_library(_read_modules(path)[1]) if (path / MODULES_FILE).exists() else []


def _of_library(modules: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Returns modules by the kinds of sentence-transformers, which INSTRUCTOR's are made of."""
    return [(_INSTRUCTOR.sub("", kind), folder) for kind, folder in modules]


def _read_modules(path: Path) -> tuple[list[Mapping[str, Any]], list[tuple[str, Path]]]:
    try:
        entries = json.loads((path / MODULES_FILE).read_text(encoding="utf-8"))
        modules = [(str(entry["type"]).rsplit(".", 1)[-1], path / str(entry["path"])) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path / MODULES_FILE}: cannot be read as a list of modules ({error!r})") from error
    if outside := [
        folder for _, folder in modules if not folder.is_relative_to(path) or ".." in folder.relative_to(path).parts
    ]:
        raise SourceError(f"{path / MODULES_FILE}: names {outside[0]}, which lies outside of the folder")
    return entries, modules


def _read_sparse_pooling(path: Path) -> tuple[str, str]:
    """Returns pooling and activation of SPLADE's vectors.

    Raises:
        SourceError: They are not known.
    """
    content = read_settings(path / "config.json")
    pooling, activation = content.get("pooling_strategy", "max"), content.get("activation_function", "relu")
    if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise SourceError(
            f"{path / 'config.json'}: pooling_strategy is {pooling} and activation_function is {activation}; a folder "
            "is exported with max or sum, and with relu or log1p_relu"
        )
    return str(pooling), str(activation)


def unread_notes(path: Path) -> tuple[str, ...]:
    """Returns a note that names the files of sentence-transformers in the folder of another model, if it has some."""
    names = [name for name in (MODULES_FILE, *_TRANSFORMER_FILES, PROMPTS_FILE) if (path / name).exists()]
    return (f"{', '.join(names)}: read of embedders alone, so nothing in them is applied",) if names else ()


def _notes_of_modules(
    path: Path, entries: Sequence[Mapping[str, Any]], modules: Sequence[tuple[str, Path]]
) -> tuple[str, ...]:
    """Names the settings of modules that nothing applies."""
    notes: list[str] = []
    for entry, (kind, folder) in zip(entries, modules, strict=True):
        notes += _unknown(MODULES_FILE, entry, "module")
        if names := entry.get("kwargs"):
            notes.append(
                f"{MODULES_FILE}: {kind} takes {', '.join(map(str, names))}, which calls of the server do not have"
            )
        if kind in ("Pooling", "Dense"):
            file = folder / "config.json"
            notes += _unknown(str(file.relative_to(path)), read_settings(file), kind.lower())
    return tuple(notes)


def _unknown(file: str, content: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Returns a note that names settings of a file which nothing applies, if it has some."""
    unknown = sorted(set(content) - SETTINGS[kind]) + [name for name in _ARGUMENTS if content.get(name)]
    return (f"{file}: {', '.join(unknown)}: not applied by the server",) if unknown else ()


def read_embedder(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a folder of sentence-transformers, or an encoder with the pooling that is asked for.

    Raises:
        SourceError: The folder is incomplete, no pooling is known, or something in it is not supported.
    """
    layout, asked = read_layout(folder.path), folder.options.pooling
    if asked is not None and asked not in (*_NAMES, SPLADE):
        raise SourceError(f"--pooling {asked}: is none of {', '.join((*_NAMES, SPLADE))}")
    if layout is None and asked == SPLADE:
        layout = Layout(
            transformer=folder.path, poolings=(), rest=(), notes=(), sparse_pooling="max", sparse_activation="relu"
        )
        asked = None
    is_sparse = layout is not None and bool(layout.sparse_pooling)
    if layout is None and asked is None:
        raise SourceError(
            f"{folder.path}: has no {MODULES_FILE} that says how token vectors become one; give --pooling, one of "
            f"{', '.join((*_NAMES, SPLADE))}, as the model's authors say"
        )
    if layout is not None and asked is not None:
        raise SourceError(f"--pooling {asked}: {folder.path / MODULES_FILE} says how token vectors become one")
    encoder = folder if layout is None else replace(folder, path=layout.transformer)
    settings, transformer_notes = read_transformer(encoder.path, is_sparse=is_sparse)
    own = encoder.own_tokenizer()
    tokenizer = plain_tokenizer(own)
    if settings.get("do_lower_case"):
        lower(tokenizer)
    encoder.config.use_cache = False  # a decoder that embeds keeps none
    model = _load_encoder(encoder, is_sparse=is_sparse)
    encoder.check_inputs(model)
    stated = settings.get("max_seq_length") or read_settings(encoder.path / TOKENIZER_CONFIG_FILE).get(
        "model_max_length"
    )
    length, notes = _length_of(encoder, model, stated)
    poolings = layout.poolings if layout is not None else (_NAMES[str(asked)],)
    rest = layout.rest if layout is not None else ()
    pools_prompt = layout is None or layout.pools_prompt
    if not pools_prompt and (others := set(poolings) & _BY_PLACE):
        raise SourceError(
            f"{folder.path}: leaves the prompt's tokens out of the pooling (include_prompt), which is not supported "
            f"with {min(others)}"
        )

    def adapt(model: nn.Module) -> nn.Module:
        if layout is not None and is_sparse:
            return SparseEmbedder(
                model, pooling=layout.sparse_pooling, activation=layout.sparse_activation, max_length=length
            ).eval()
        head = nn.Sequential(*(read_module(kind, path, folder.options.allow_pickle) for kind, path in rest))
        return HuggingFaceEmbedder(
            model, poolings=poolings, head=head, max_length=length, pools_prompt=pools_prompt
        ).eval()

    module = adapt(for_graph(model))
    with as_source_error():
        name = type(model).__name__
        check_reading(encoder.path, module, name=name, config=encoder.config, tokenizer=tokenizer, longest=length)
    pad = padding_of(folder.config, own)
    encoder.check_padding(module, name=name, pad=pad, longest=length)
    prompts, default, prompt_notes = read_prompts(
        folder, is_normal=any(kind == "Normalize" for kind, _ in rest), is_sparse=is_sparse
    )
    notes += (*transformer_notes, *prompt_notes, *(layout.notes if layout is not None else ()))
    return (
        folder.source(
            model,
            module,
            make_reference=lambda: adapt(_load_encoder(encoder, is_sparse=is_sparse)),
            tokenizer=tokenizer,
            special_tokens=SpecialTokens(pad=pad),
            prompts=prompts,
            default_prompt=default,
            has_sparse_vectors=is_sparse,
            pools_prompt=pools_prompt,
            evaluation=folder.evaluation(),
        ),
        notes,
    )


def _load_encoder(folder: ModelFolder, *, is_sparse: bool) -> nn.Module:
    """Loads an encoder without its pooler, which nothing reads; for sparse vectors with its language model head."""
    if is_sparse:
        return folder.load(AutoModelForMaskedLM)
    auto_class = AutoModelForTextEncoding if folder.config.model_type in TEXT_ENCODERS else AutoModel
    model = folder.load(auto_class, unused=UNUSED_WEIGHTS)
    if getattr(model, "pooler", None) is not None:
        cast("Any", model).pooler = None
    return model


def _read_poolings(path: Path) -> tuple[str, ...]:
    file = path / "config.json"
    content = read_settings(file)
    if not content:
        raise SourceError(f"{file}: is not there, and says how token vectors become one; fetch the folder again")
    if others := sorted(
        name for name, value in content.items() if value and name.startswith("pooling_mode_") and name not in _SWITCHES
    ):
        raise SourceError(f"{file}: {others[0]} is none of {', '.join(_SWITCHES)}")
    modes = content.get("pooling_mode") or [name for switch, name in _SWITCHES.items() if content.get(switch)] or "mean"
    names = [modes] if isinstance(modes, str) else list(modes)
    if unknown := [name for name in names if name not in _NAMES]:
        raise SourceError(f"{file}: pooling {unknown[0]} is none of {', '.join(_NAMES)}")
    return tuple(_NAMES[name] for name in names)


def read_module(kind: str, path: Path, allow_pickle: bool, *, of: str = "sentence_embedding") -> nn.Module:
    """Reads a module of sentence-transformers that follows the encoder or the pooling, whose output is `of`.

    Raises:
        SourceError: Its weights cannot be read, or its settings are not supported.
    """
    if kind == "Normalize":
        return Normalize()
    file = path / "config.json"
    content = read_settings(file)
    name = str(content.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if (
        name not in _ACTIVATIONS
        or content.get("use_residual")
        or any(content.get(name) not in (None, of) for name in ("module_input_name", "module_output_name"))
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


def read_transformer(path: Path, *, is_sparse: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the settings of the encoder of a folder, and notes on those that nothing applies.

    Raises:
        SourceError: They ask for something else than the last hidden states of a text.
    """
    file = next((path / name for name in _TRANSFORMER_FILES if (path / name).exists()), path / _TRANSFORMER_FILES[0])
    settings = read_settings(file)
    for name, only in () if is_sparse else _ONLY.items():
        if settings.get(name) not in (None, only):
            raise SourceError(
                f"{file}: {name} is {json.dumps(settings[name])}; a folder is exported with {json.dumps(only)}"
            )
    return settings, _unknown(file.name, settings, "transformer")


def read_prompts(
    folder: ModelFolder, *, is_normal: bool, is_sparse: bool = False
) -> tuple[dict[str, str], str | None, tuple[str, ...]]:
    """Returns the prompts of a folder and those that are asked for, the name of the default one, and notes.

    Raises:
        SourceError: The default prompt is none of them, or the model is of another type.
    """
    file = folder.path / PROMPTS_FILE
    content = read_settings(file)
    wanted = "SparseEncoder" if is_sparse else "SentenceTransformer"
    if (kind := content.get("model_type")) not in (None, wanted):
        raise SourceError(f"{file}: model_type is {kind}; a folder with these modules is exported of a {wanted}")
    prompts = {str(name): str(text or "") for name, text in (content.get("prompts") or {}).items()}
    prompts |= dict(folder.options.prompts)
    default = content.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise SourceError(
            f"{file}: default_prompt_name {default} is none of its prompts ({', '.join(prompts) or 'none'}); give it "
            f"with --prompt {default}=TEXT"
        )
    notes = _unknown(PROMPTS_FILE, content, "sentence transformer")
    similarity = content.get("similarity_fn_name")
    if similarity not in (
        (None, "dot") if is_sparse else (None, "cosine", *(("dot", "euclidean") if is_normal else ()))
    ):
        notes += (
            f"{PROMPTS_FILE}: similarity_fn_name {similarity}: the server ranks by the "
            f"{'product' if is_sparse else 'cosine'}; to compare vectors by "
            "another function, get them with normalize false",
        )
    return prompts, default, notes


def _length_of(folder: ModelFolder, model: nn.Module, stated: int | None) -> tuple[int, tuple[str, ...]]:
    """Returns the most tokens of a text: those asked for, or what the folder states, or what the model takes."""
    if folder.options.max_length is None and stated is not None:
        longest, notes = folder.length(model)
        return (int(stated), ()) if int(stated) < longest else (longest, notes)
    return folder.length(model)


def lower(tokenizer: Tokenizer) -> None:
    """Has a tokenizer read texts in small letters."""
    parts: list[Any] = [normalizers.Lowercase(), *([tokenizer.normalizer] if tokenizer.normalizer is not None else [])]
    tokenizer.normalizer = normalizers.Sequence(parts)
