"""What is exported: a module with everything a bundle says of it, wherever they come from."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from tokenizers import Tokenizer
from torch import nn

from headway_export.chat import find_chat_template, read_chat_template
from headway_export.errors import SourceError
from headway_export.graphs import parameter_count
from headway_server.bundles import (
    Architecture,
    ClassificationScheme,
    ImagePreprocessing,
    Languages,
    Limits,
    SamplingDefaults,
    SpecialTokens,
    Task,
)
from headway_server.bundles.tags import TagSet
from headway_training.checkpoint import (
    TextPairUse,
    TrainingRecord,
    load_model,
    load_tokenizer,
    read_image_evaluation,
    read_text_evaluation,
)
from headway_training.errors import TrainingError

_METRICS = {
    Task.GENERATION: ("nats_per_character", False),
    Task.TRANSLATION: ("sacrebleu", True),
    Task.TEXT_CLASSIFICATION: ("accuracy", True),
    Task.TOKEN_CLASSIFICATION: ("span_f1", True),
    Task.IMAGE_CLASSIFICATION: ("accuracy", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Examples that a task metric is measured on."""

    dataset: str
    metric: str
    higher_is_better: bool
    texts: Sequence[str] = ()
    text_pairs: Sequence[str] | None = None
    """What each text is paired with, empty where there is nothing; None: no text is."""
    references: Sequence[str] = ()
    """Translations of the texts."""
    spans: Sequence[Collection[tuple[int, int, str]]] = ()
    """Start, end and label of the spans of each text."""
    labels: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """(N,) the class of each; where several labels may apply, (N, C), 1 for those that do."""
    images: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 0, 0, 3), np.uint8))
    """(N, height, width, 3), already resized and cropped."""

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.images) or len(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """A module with everything a bundle says of it."""

    name: str
    task: Task
    module: nn.Module
    """fp32, on the CPU, in evaluation mode."""
    description: str
    license: str
    architecture: Architecture
    limits: Limits
    tokenizer: Tokenizer | None = None
    special_tokens: SpecialTokens | None = None
    chat_template: str | None = None
    """Jinja that makes a prompt of a conversation; for generation."""
    labels: tuple[str, ...] = ()
    classification: ClassificationScheme | None = None
    """How logits become probabilities; None: single_label, and a temperature of 1."""
    text_pairs: TextPairUse = "never"
    """Whether a text classifier reads two texts as one input."""
    image_preprocessing: ImagePreprocessing | None = None
    languages: Languages | None = None
    sampling_defaults: SamplingDefaults | None = None
    evaluation: EvaluationData | None = None
    training: TrainingRecord | None = None

    @property
    def has_token_types(self) -> bool:
        """Whether the module is told which text of a pair a token is of."""
        return self.text_pairs != "never" and int(getattr(self.module, "num_token_types", 0) or 0) > 1


def from_checkpoint(path: Path, *, name: str | None = None) -> ExportSource:
    """Reads a checkpoint of the kit (docs/checkpoint.md).

    Args:
        path: Its folder.
        name: The model's name in the store; None takes the checkpoint's.

    Raises:
        SourceError: It is not a checkpoint, is damaged, or is of a task that cannot be exported.
    """
    try:
        module, checkpoint = load_model(path)
        tokenizer = None if checkpoint.image_preprocessing else load_tokenizer(path)
    except TrainingError as error:
        raise SourceError(str(error)) from error
    task = _exportable(checkpoint.task)
    _check_tags(task, checkpoint.labels)
    evaluation = checkpoint.evaluation
    return ExportSource(
        name=name or checkpoint.name,
        task=task,
        module=module,
        description=checkpoint.description,
        license=checkpoint.license,
        architecture=Architecture(
            kind=checkpoint.architecture,
            parameter_count=parameter_count(module),
            configuration=checkpoint.configuration,
        ),
        limits=limits_of(module, task),
        tokenizer=tokenizer,
        special_tokens=_convert(SpecialTokens, checkpoint.special_tokens),
        chat_template=find_chat_template(path) if task is Task.GENERATION else None,
        labels=checkpoint.labels,
        classification=_convert(ClassificationScheme, checkpoint.classification),
        text_pairs=checkpoint.text_pairs,
        image_preprocessing=_convert(ImagePreprocessing, checkpoint.image_preprocessing),
        languages=_convert(Languages, checkpoint.languages),
        sampling_defaults=_convert(SamplingDefaults, checkpoint.sampling_defaults),
        evaluation=_read_evaluation(path, task, evaluation.dataset, len(checkpoint.labels)) if evaluation else None,
        training=checkpoint.training,
    )


def from_factory(
    factory: str,
    weights: Path,
    *,
    task: str,
    name: str,
    tokenizer_file: Path | None = None,
    special_tokens: SpecialTokens | None = None,
    chat_template_file: Path | None = None,
    labels: Sequence[str] = (),
    multi_label: bool = False,
    text_pairs: TextPairUse = "never",
    image_preprocessing: ImagePreprocessing | None = None,
    languages: Languages | None = None,
    evaluation_file: Path | None = None,
    description: str = "",
    license_name: str = "not stated",
) -> ExportSource:
    """Takes a module from outside the kit (docs/bring-your-own.md).

    Args:
        factory: `package.module:function`; the function returns the module.
        weights: safetensors file, loaded strictly.
        task: The task it follows the protocol of.
        name: The model's name in the store.
        tokenizer_file: `tokenizer.json`, for text.
        special_tokens: Ids with a meaning of their own, for text.
        chat_template_file: Jinja, or a `tokenizer_config.json` that holds it, for generation.
        labels: Names in the order of the outputs, for classifiers.
        multi_label: Whether several labels may apply to a text: those of a probability of 0.5 and more.
        text_pairs: Whether two texts are read as one input, for text classification.
        image_preprocessing: For images.
        languages: For translation.
        evaluation_file: Evaluation data in the format of docs/checkpoint.md.
        description: One sentence.
        license_name: Of the weights.

    Raises:
        SourceError: Something is missing or does not fit.
    """
    exportable = _exportable(task)
    needed = {
        "--tokenizer": tokenizer_file is not None or exportable is Task.IMAGE_CLASSIFICATION,
        "--labels": bool(labels) or exportable in (Task.GENERATION, Task.TRANSLATION),
        "--languages": languages is not None or exportable is not Task.TRANSLATION,
        "--preprocessing": image_preprocessing is not None or exportable is not Task.IMAGE_CLASSIFICATION,
    }
    if missing := [flag for flag, given in needed.items() if not given]:
        raise SourceError(f"--task {task} needs {', '.join(missing)}")
    if exportable is not Task.TEXT_CLASSIFICATION and (multi_label or text_pairs != "never"):
        raise SourceError(f"--multi-label and --text-pairs are for text_classification, not for {task}; leave them out")
    if chat_template_file is not None and exportable is not Task.GENERATION:
        raise SourceError(f"--chat-template is for generation, not for {task}; leave it out")
    _check_tags(exportable, labels)
    module = _build(factory)
    try:
        load_weights(module, str(weights))
    except (RuntimeError, SafetensorError, OSError) as error:
        raise SourceError(f"{weights}: does not fit the module of {factory}: {error}") from error
    module = module.float().eval()
    return ExportSource(
        name=name,
        task=exportable,
        module=module,
        description=description or f"{type(module).__name__}, exported from {factory}.",
        license=license_name,
        architecture=Architecture(
            kind=type(module).__name__, parameter_count=parameter_count(module), configuration={"factory": factory}
        ),
        limits=limits_of(module, exportable),
        tokenizer=_open_tokenizer(tokenizer_file) if tokenizer_file else None,
        special_tokens=None if exportable is Task.IMAGE_CLASSIFICATION else special_tokens or SpecialTokens(),
        chat_template=_open_chat_template(chat_template_file) if chat_template_file else None,
        labels=tuple(labels),
        classification=(
            ClassificationScheme(kind="multi_label", thresholds=(0.5,) * len(labels)) if multi_label else None
        ),
        text_pairs=text_pairs,
        image_preprocessing=image_preprocessing,
        languages=languages,
        evaluation=_read_evaluation_file(evaluation_file, exportable, len(labels)) if evaluation_file else None,
    )


def limits_of(module: nn.Module, task: Task) -> Limits:
    """Reads the lengths that a module states.

    Raises:
        SourceError: It does not state them.
    """
    try:
        match task:
            case Task.GENERATION:
                length = int(cast("Any", module).max_length)
                return Limits(max_input_tokens=length - 1, max_total_tokens=length)
            case Task.TRANSLATION:
                source = int(cast("Any", module).max_source_length)
                return Limits(max_input_tokens=source, max_total_tokens=int(cast("Any", module).max_target_length))
            case Task.IMAGE_CLASSIFICATION:
                return Limits()
            case _:
                return Limits(max_input_tokens=int(cast("Any", module).max_length))
    except (AttributeError, TypeError) as error:
        raise SourceError(f"{type(module).__name__}: {error}; {task} needs it (docs/bring-your-own.md)") from error


def _exportable(task: str) -> Task:
    if task not in {str(known) for known in _METRICS}:
        raise SourceError(f"task {task}: cannot be exported; this version exports {', '.join(_METRICS)}")
    return Task(task)


def _check_tags(task: Task, labels: Sequence[str]) -> None:
    """Checks that the labels of a token classifier are tags."""
    if task is Task.TOKEN_CLASSIFICATION:
        try:
            TagSet.parse(labels)
        except ValueError as error:
            raise SourceError(f"labels: {error}") from error


def _convert(record: Any, value: Any) -> Any:
    """Turns a checkpoint's record into the manifest's of the same fields."""
    return None if value is None else record.model_validate(value.model_dump())


def _build(factory: str) -> nn.Module:
    module_name, _, function_name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name or "build")
    except (ImportError, AttributeError, ValueError) as error:
        raise SourceError(
            f"--model {factory}: {error}; give it as package.module:function, importable from here"
        ) from error
    finally:
        sys.path.pop(0)
    module = function()
    if not isinstance(module, nn.Module):
        raise SourceError(f"--model {factory}: returned {type(module).__name__}; it must return a torch.nn.Module")
    return module


def _open_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise SourceError(f"{file}: cannot be read as a tokenizer ({error})") from error


def _open_chat_template(file: Path) -> str:
    template = read_chat_template(file)
    if template is None:
        raise SourceError(f"{file}: holds no chat_template")
    return template


def _read_evaluation(path: Path, task: Task, dataset: str, num_labels: int) -> EvaluationData:
    if task is Task.IMAGE_CLASSIFICATION:
        images, labels = read_image_evaluation(path)
        return _evaluation(task, dataset, images=images, labels=labels)
    return _text_evaluation(task, dataset, read_text_evaluation(path), num_labels)


def _read_evaluation_file(file: Path, task: Task, num_labels: int) -> EvaluationData:
    try:
        if task is Task.IMAGE_CLASSIFICATION:
            with np.load(file) as arrays:
                return _evaluation(task, file.name, images=arrays["images"], labels=arrays["labels"])
        lines = file.read_text(encoding="utf-8").splitlines()
        return _text_evaluation(task, file.name, [json.loads(line) for line in lines if line.strip()], num_labels)
    except (OSError, ValueError, KeyError, ValidationError) as error:
        raise SourceError(
            f"{file}: cannot be read as evaluation data of {task} ({error}); see docs/checkpoint.md"
        ) from error


def _text_evaluation(task: Task, dataset: str, rows: list[dict[str, Any]], num_labels: int) -> EvaluationData:
    if task is Task.TEXT_CLASSIFICATION:
        return _classified_texts(dataset, rows, num_labels)
    columns = {
        Task.GENERATION: ("text",),
        Task.TRANSLATION: ("source", "target"),
        Task.TOKEN_CLASSIFICATION: ("text", "spans"),
    }[task]
    texts, *rest = ([row[column] for row in rows] for column in columns)
    if task is Task.TRANSLATION:
        return _evaluation(task, dataset, texts=texts, references=rest[0])
    if task is Task.GENERATION:
        return _evaluation(task, dataset, texts=texts)
    assert task is Task.TOKEN_CLASSIFICATION
    spans = TypeAdapter(list[list[tuple[int, int, str]]]).validate_python(rest[0])
    return _evaluation(task, dataset, texts=texts, spans=spans)


def _classified_texts(dataset: str, rows: list[dict[str, Any]], num_labels: int) -> EvaluationData:
    """Reads texts with a label each, or with several: `labels` in place of `label`."""
    texts = [str(row["text"]) for row in rows]
    has_pairs = any("text_pair" in row for row in rows)
    pairs = [str(row.get("text_pair", "")) for row in rows] if has_pairs else None
    task = Task.TEXT_CLASSIFICATION
    if not any("labels" in row for row in rows):
        labels = TypeAdapter(list[int]).validate_python([row["label"] for row in rows])
        return _evaluation(task, dataset, texts=texts, text_pairs=pairs, labels=np.array(labels, np.int64))
    several = TypeAdapter(list[list[int]]).validate_python([row["labels"] for row in rows])
    truth = np.array([[label in own for label in range(num_labels)] for own in several], np.int64)  # (N, C)
    return _evaluation(task, dataset, metric="micro_f1", texts=texts, text_pairs=pairs, labels=truth)


def _evaluation(task: Task, dataset: str, metric: str = "", **examples: Any) -> EvaluationData:
    usual, higher_is_better = _METRICS[task]
    metric = metric or usual
    return EvaluationData(dataset=dataset, metric=metric, higher_is_better=higher_is_better, **examples)
