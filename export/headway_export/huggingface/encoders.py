"""Classifiers of texts, pairs and tokens, exported as they are: an encoder needs no cache.

B rows, T tokens, C classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder, as_source_error
from headway_export.huggingface.graph_forms import for_graph
from headway_export.source import ExportSource, checkpoint_beside, make_tagging
from headway_export.tasks.table import task_of
from headway_server.bundles import ClassificationScheme, Scoring, SpecialTokens, Tagging, Task, WordBoxes
from headway_server.bundles.tags import OF_WORDS, find_scheme
from headway_server.tasks.tokens.pages import THOUSANDTHS
from headway_training.folders import check_reading, labels_of, padding_of, plain_tokenizer

_AUTO_CLASSES: Final = {
    Task.TEXT_CLASSIFICATION: AutoModelForSequenceClassification,
    Task.TOKEN_CLASSIFICATION: AutoModelForTokenClassification,
}
_SCORE_ACTIVATIONS: Final[dict[str, Literal["none", "sigmoid"]]] = {"Identity": "none", "Sigmoid": "sigmoid"}
"""By the name of the class that a folder states, such as `torch.nn.modules.linear.Identity`."""
ENCODER_DECODER_CLASSIFIERS: Final = frozenset({"bart", "t5", "mt5", "umt5"})
"""Model types with a decoder whose classifiers are read."""
_ZERO: Final = (0, 0, 0, 0)
_END: Final = (THOUSANDTHS,) * 4
_BOXES: Final = {
    "layoutlm": WordBoxes(unit="thousandths", before=_ZERO, after=_END),
    "lilt": WordBoxes(unit="thousandths", before=_ZERO, after=_ZERO),
    "bros": WordBoxes(unit="fractions", before=_ZERO, after=_END),
}
"""Boxes by model type, as a family was trained with first; a tokenizer that has boxes of its own says otherwise."""


class HuggingFaceClassifier(nn.Module):
    """A classifier of texts or tokens of `transformers`, in its own arithmetic."""

    def __init__(self, model: nn.Module, *, max_length: int, has_types: bool) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        self.num_token_types = int(getattr(cast("Any", model).config, "type_vocab_size", 0) or 0) if has_types else 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """(B, T), (B, T), (B, T) -> logits (B, C), or (B, T, C) of a token classifier."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **types)
        return cast("Tensor", output.logits)


class BoxClassifier(HuggingFaceClassifier):
    """A classifier of a page's tokens, which reads the box of each."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, bbox: Tensor | None = None) -> Tensor:
        """(B, T), (B, T), (B, T, 4) -> logits (B, T, C); without boxes all are zeros."""
        boxes = torch.zeros((*input_ids.shape, 4), dtype=torch.int64) if bbox is None else bbox
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, bbox=boxes, return_dict=True)
        return cast("Tensor", output.logits)


class _EncoderDecoderClassifier(HuggingFaceClassifier):
    """A classifier whose decoder reads the text too, and whose last end token is classified (BART, T5)."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """(B, T), (B, T), None -> logits (B, C)."""
        model = cast("Any", self.model)
        first = torch.full_like(input_ids[:, :1], int(model.config.decoder_start_token_id))
        output = getattr(model, model.base_model_prefix)(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=torch.cat([first, input_ids[:, :-1]], dim=1),
            use_cache=False,
            return_dict=True,
        )
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)  # (T,)
        last = (positions * (input_ids == int(model.config.eos_token_id))).argmax(dim=1)  # (B,)
        states = output.last_hidden_state  # (B, T, D)
        ends = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)
        return cast("Tensor", model.classification_head(ends))


class Opened(NamedTuple):
    """An encoder of a folder, in the modules that are traced and compared."""

    model: nn.Module
    """As `transformers` makes it."""
    module: nn.Module
    """What is traced."""
    own_tokenizer: Any
    tokenizer: Tokenizer
    notes: tuple[str, ...]
    make_reference: Callable[[], nn.Module]


def open_encoder(
    folder: ModelFolder,
    auto_class: Any,
    kind: Callable[..., nn.Module],
    reference: Callable[..., nn.Module] | None = None,
) -> Opened:
    """Opens an encoder with the head of its task.

    Args:
        folder: Its folder.
        auto_class: The `Auto` class of `transformers` that makes models of the task.
        kind: Makes what is traced, of a model, `max_length` and `has_types`.
        reference: Makes what that is held against; None: `kind` does.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    own = folder.own_tokenizer()
    tokenizer, has_types = plain_tokenizer(own), "token_type_ids" in own.model_input_names
    model = folder.load(auto_class)
    folder.check_inputs(model, reads_boxes=kind is BoxClassifier)
    length, notes = folder.length(model, kind(model, max_length=0, has_types=False))
    module = kind(for_graph(model), max_length=length, has_types=has_types)
    with as_source_error():
        name = type(model).__name__
        check_reading(folder.path, module, name=name, config=folder.config, tokenizer=tokenizer, longest=length)
    folder.check_padding(module, name=name, pad=padding_of(folder.config, own), longest=length)
    make = partial(reference or kind, max_length=length, has_types=has_types)
    return Opened(model, module, own, tokenizer, notes, lambda: make(folder.load(auto_class)))


def read_classifier(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a classifier of texts or tokens.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    scoring = _scoring_of(folder)
    if scoring is not None:
        folder = replace(folder, task=Task.TEXT_SCORING)
    auto_class = _AUTO_CLASSES.get(folder.task, AutoModelForSequenceClassification)
    kind = _EncoderDecoderClassifier if folder.config.is_encoder_decoder else HuggingFaceClassifier
    family = _BOXES.get(folder.config.model_type) if folder.task is Task.TOKEN_CLASSIFICATION else None
    if family is not None and checkpoint_beside(folder.path) is None:  # which was trained on texts
        return _read_box_classifier(folder, family)
    opened = open_encoder(folder, auto_class, kind)
    labels, scheme = _labels_of(folder) if scoring is None else ((), None)
    tagging = _tagging_of(folder, labels)
    return (
        folder.source(
            opened.model,
            opened.module,
            make_reference=opened.make_reference,
            tokenizer=opened.tokenizer,
            special_tokens=SpecialTokens(pad=padding_of(folder.config, opened.own_tokenizer)),
            labels=labels,
            classification=scheme,
            scoring=scoring,
            tagging=tagging,
            text_pairs=_text_pairs(opened.tokenizer, folder.task),
            evaluation=folder.evaluation(len(labels)),
        ),
        opened.notes,
    )


def _read_box_classifier(folder: ModelFolder, family: WordBoxes) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a classifier of a page's tokens; errors are those of `read_classifier`."""
    if folder.options.evaluation_file is not None:
        raise SourceError(
            f"--evaluation {folder.options.evaluation_file}: has texts without boxes, and {folder.config.model_type} "
            "reads words with their boxes; leave it out"
        )
    if folder.options.aggregation == "simple":
        raise SourceError(
            f"{folder.path}: --aggregation simple: labels parts of words, and {folder.config.model_type} reads whole "
            f"words; give one of {', '.join(sorted({*OF_WORDS, 'sequence'}))}"
        )
    rows = getattr(folder.config, "max_2d_position_embeddings", THOUSANDTHS + 1)
    if rows <= THOUSANDTHS:
        raise SourceError(
            f"{folder.path}: its tables have {rows} rows for sides of boxes (max_2d_position_embeddings), and these "
            f"are from 0 to {THOUSANDTHS}; not supported"
        )
    opened = open_encoder(folder, AutoModelForTokenClassification, BoxClassifier)
    split = json.loads(opened.tokenizer.to_str())["pre_tokenizer"] or {}
    if any(step.get("add_prefix_space") is False for step in split.get("pretokenizers", [split])):
        raise SourceError(
            f"{folder.path}: its tokenizer reads a word otherwise at the beginning of a text (add_prefix_space is "
            "false), and words of a page come one by one; train it with add_prefix_space=True, as transformers demands"
        )
    labels = labels_of(folder.config)
    sides = {
        name: getattr(opened.own_tokenizer, f"{token}_token_box", None)
        for name, token in (("before", "cls"), ("after", "sep"))
    }
    stated = {name: tuple(box) for name, box in sides.items() if box is not None}
    boxes = WordBoxes.model_validate({**family.model_dump(), **stated})
    return (
        folder.source(
            opened.model,
            opened.module,
            make_reference=opened.make_reference,
            tokenizer=opened.tokenizer,
            special_tokens=SpecialTokens(pad=padding_of(folder.config, opened.own_tokenizer)),
            labels=labels,
            tagging=_tagging_of(folder, labels),
            word_boxes=boxes,
        ),
        (
            *opened.notes,
            f"special tokens have the boxes {list(boxes.before)} and {list(boxes.after)}, as "
            + ("its tokenizer says" if stated else f"{folder.config.model_type} was trained with first"),
        ),
    )


def _scoring_of(folder: ModelFolder) -> Scoring | None:
    """Returns how the one output of a reranker or a regression is read; None for a model with labels.

    Raises:
        SourceError: It has several outputs and no labels, or another function is applied to the one it has.
    """
    config = folder.config
    if folder.task is Task.TOKEN_CLASSIFICATION or (config.num_labels > 1 and config.problem_type != "regression"):
        if folder.task is Task.TEXT_SCORING:
            raise SourceError(
                f"{folder.path}: has {config.num_labels} labels; {Task.TEXT_SCORING} needs a model of one output"
            )
        return None
    if config.num_labels > 1:
        raise SourceError(
            f"{folder.path}: is a regression to {config.num_labels} numbers, and a score is one; not supported"
        )
    stated = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    stated = stated or getattr(config, "sbert_ce_default_activation_function", None)
    if stated is None:  # what sentence-transformers and the pipelines of transformers do
        return Scoring(activation="none" if config.problem_type == "regression" else "sigmoid")
    name = str(stated).rsplit(".", 1)[-1]
    if name not in _SCORE_ACTIVATIONS:
        raise SourceError(
            f"{folder.path}: its score is made by {stated}, which is none of {', '.join(_SCORE_ACTIVATIONS)}"
        )
    return Scoring(activation=_SCORE_ACTIVATIONS[name])


def _labels_of(folder: ModelFolder) -> tuple[tuple[str, ...], ClassificationScheme | None]:
    config = folder.config
    labels = labels_of(config)
    if folder.task is Task.TEXT_CLASSIFICATION and config.problem_type == "multi_label_classification":
        return labels, ClassificationScheme(kind="multi_label", thresholds=(0.5,) * len(labels))
    return labels, None


def _tagging_of(folder: ModelFolder, labels: Sequence[str]) -> Tagging | None:
    """Returns how spans are found by a token classifier's tags.

    Raises:
        SourceError: The labels are not tags of the scheme that is asked for.
    """
    if folder.task is not Task.TOKEN_CLASSIFICATION:
        return None
    options = folder.options
    tagging = make_tagging(options.tag_scheme or find_scheme(labels), options.aggregation or "first")
    try:
        task_of(folder.task).check_labels(labels, tagging)
    except SourceError as error:
        raise SourceError(f"{folder.path}: {error}; token classifiers are served as spans (docs/spans.md)") from error
    return tagging


def _text_pairs(tokenizer: Tokenizer, task: Task) -> Literal["never", "optional"]:
    """A classifier reads pairs where its tokenizer knows how to join two texts."""
    return "optional" if task is not Task.TOKEN_CLASSIFICATION and joins_texts(tokenizer) else "never"


def joins_texts(tokenizer: Tokenizer) -> bool:
    """Returns True if a tokenizer puts more tokens around two texts than around one."""
    return bool(tokenizer.num_special_tokens_to_add(True) > tokenizer.num_special_tokens_to_add(False))
