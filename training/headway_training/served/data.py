"""What a served model is measured on: the test part of a recipe's data set, or the user's own file.

H height, W width.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_client import Model, Task
from headway_training.checkpoint import TextPairUse
from headway_training.data.conll import read_span_labeled_texts
from headway_training.data.examples import LabeledImages, LabeledTexts, ParallelTexts, PlainText, SpanLabeledTexts
from headway_training.data.image_folder import SUFFIXES
from headway_training.data.labeled_text import read_rows, split_labels
from headway_training.data.parallel_text import read_parallel_texts
from headway_training.data.plain_text import read_plain_text
from headway_training.data.sources import read_splits
from headway_training.errors import DataError, EvaluationError
from headway_training.recipes import Recipe, list_recipes, read_recipe


@dataclass(frozen=True, slots=True)
class LabeledInputs:
    """Texts, or images as encoded files, each with the name of its class."""

    inputs: list[str] | list[bytes]
    labels: list[str]
    text_pairs: list[str] | None = None
    """The text that each is paired with, empty where there is none; None: no text has one."""

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class MultiLabeledInputs:
    """Texts, each with the names of the labels that apply to it."""

    texts: list[str]
    labels: list[frozenset[str]]
    text_pairs: list[str] | None = None
    """As in `LabeledInputs`."""

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextForm:
    """What a text classifier reads and answers, and so what its data looks like."""

    multi_label: bool = False
    """Whether several labels may apply to a text, or none."""
    text_pairs: TextPairUse = "never"
    """Whether an input may be, or is, a pair of texts."""
    label_separator: str = "|"
    """What separates the labels of a text in its label column."""


@dataclass(frozen=True, slots=True)
class SpanInputs:
    """Texts, each with start, end and label of its spans."""

    texts: list[str]
    spans: list[list[tuple[int, int, str]]]
    covering: bool
    """Whether the spans are all the words there are."""

    def __len__(self) -> int:
        return len(self.texts)


ServedExamples: TypeAlias = LabeledInputs | MultiLabeledInputs | SpanInputs | ParallelTexts | PlainText


@dataclass(frozen=True, slots=True)
class ServedData:
    """Data to measure on, and its name in words."""

    name: str
    examples: ServedExamples


def read_dataset(model: Model, name: str | None, folder: Path) -> ServedData:
    """Reads the test part of a data set.

    Args:
        model: The model that is to be measured.
        name: Name of the data set; None: that of the recipe which makes a model of this name.
        folder: The folder of the public data sets.

    Raises:
        EvaluationError: No recipe has such data for the model's task and languages.
        DataError: The data is not there, or malformed.
    """
    recipe = _find_recipe(model, name)
    splits = read_splits(recipe, folder, None)
    test = splits.test
    if isinstance(test, LabeledImages | LabeledTexts):
        labels = [splits.labels[index] for index in test.labels]
        if isinstance(test, LabeledTexts):
            test = LabeledInputs(test.texts, labels, test.text_pairs)
        else:
            test = LabeledInputs([_as_png(image) for image in test.images], labels)
        _check_labels(test.labels, model, recipe.data.dataset)
    if isinstance(test, SpanLabeledTexts):
        test = _named_spans(test, splits.labels)
        _check_labels((label for spans in test.spans for _, _, label in spans), model, recipe.data.dataset)
    return ServedData(splits.test_name, test)


def _find_recipe(model: Model, name: str | None) -> Recipe:
    recipes = [recipe for recipe in map(read_recipe, _names()) if _fits(recipe, model)]
    for recipe in recipes:
        if (recipe.name == model.name) if name is None else (recipe.data.dataset == name):
            return recipe
    known = ", ".join(sorted({recipe.data.dataset for recipe in recipes})) or "none"
    languages = f" from {model.source_language} to {model.target_language}" if model.source_language else ""
    what = f"{model.name} is the name of no recipe's model" if name is None else f"--data {name} is not for this model"
    raise EvaluationError(
        f"{what}; it is for {model.task}{languages}, for which there are the data sets: {known}. "
        "Name one with --data, or your own data with --file"
    )


def _names() -> list[str]:
    return [file.stem for file in list_recipes()]


def _fits(recipe: Recipe, model: Model) -> bool:
    """Whether a recipe's data is for a model's task and languages."""
    if recipe.task != model.task.value:
        return False
    languages = recipe.languages
    return languages is None or (languages.source, languages.target) == (model.source_language, model.target_language)


def _as_png(image: NDArray[np.uint8]) -> bytes:
    """Encodes an image (H, W, 3) without loss."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def text_form(manifest_json: str, label_separator: str) -> TextForm:
    """What a model's manifest says that its texts look like."""
    manifest = json.loads(manifest_json)
    classification = manifest.get("classification") or {}
    return TextForm(
        multi_label=classification.get("kind") == "multi_label",
        text_pairs=manifest.get("text_pairs", "never"),
        label_separator=label_separator,
    )


def read_file(model: Model, file: str, form: TextForm) -> ServedData:
    """Reads the user's own data, in the form that `headway-train run --test` takes for the model's task.

    Raises:
        EvaluationError: There is no form for the model's task.
        DataError: The data is not there or malformed, or has a label that the model does not know.
    """
    if model.task is Task.TEXT_CLASSIFICATION:
        examples: ServedExamples = _read_texts(file, form)
    elif model.task in _READERS:
        examples = _READERS[model.task](file)
    else:
        raise EvaluationError(f"{model.name} is for {model.task}, which `headway-train evaluate` cannot measure")
    if isinstance(examples, LabeledInputs):
        _check_labels(examples.labels, model, file)
    if isinstance(examples, MultiLabeledInputs):
        _check_labels((label for labels in examples.labels for label in labels), model, file)
    if isinstance(examples, SpanInputs):
        _check_labels((label for spans in examples.spans for _, _, label in spans), model, file)
    name = ", ".join(Path(part).name for part in file.split(","))
    return ServedData(name, examples)


def _read_texts(file: str, form: TextForm) -> LabeledInputs | MultiLabeledInputs:
    rows = list(read_rows(Path(file), text_pairs=form.text_pairs, needs_label=not form.multi_label))
    if not rows:
        raise DataError(f"{file} holds no rows; expected a header with the columns text and label")
    texts, pairs = [row.text for row in rows], [row.text_pair for row in rows]
    text_pairs = None if form.text_pairs == "never" else pairs
    if not form.multi_label:
        return LabeledInputs(texts, [row.label for row in rows], text_pairs)
    return MultiLabeledInputs(
        texts, [frozenset(split_labels(row.label, form.label_separator)) for row in rows], text_pairs
    )


def _read_images(file: str) -> LabeledInputs:
    """Files of a folder with a folder for each class, as they are: the server brings them to the model's size."""
    folder = Path(file)
    if not folder.is_dir():
        raise DataError(f"{file} is not a folder; expected a folder with a folder of images for each class")
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise DataError(f"{file} holds no images; expected FOLDER/LABEL/IMAGE, ending in {', '.join(sorted(SUFFIXES))}")
    return LabeledInputs([path.read_bytes() for path in paths], [path.parent.name for path in paths])


_READERS: Mapping[Task, Callable[[str], ServedExamples]] = {
    Task.GENERATION: lambda file: read_plain_text(Path(file)),
    Task.TRANSLATION: read_parallel_texts,
    Task.TOKEN_CLASSIFICATION: lambda file: _named_spans(*read_span_labeled_texts(Path(file))),
    Task.IMAGE_CLASSIFICATION: _read_images,
}


def _named_spans(examples: SpanLabeledTexts, labels: Sequence[str]) -> SpanInputs:
    spans = [[(span.start, span.end, labels[span.label]) for span in row] for row in examples.spans]
    return SpanInputs(examples.texts, spans, examples.covering)


def _check_labels(labels: Iterable[str], model: Model, source: str) -> None:
    unknown = sorted(set(labels) - set(model.labels))
    if unknown:
        raise DataError(
            f"{source}: the label {unknown[0]!r} is not one that {model.name} answers: {', '.join(model.labels[:20])}"
        )


def first_examples(data: ServedData, count: int | None) -> ServedData:
    """The first `count` examples of the data, of a running text its first `count` characters; None keeps all."""
    examples = data.examples
    if count is None or count >= len(examples):
        return data
    kept: ServedExamples
    if isinstance(examples, PlainText):
        kept = PlainText(text=examples.text[:count])
    elif isinstance(examples, ParallelTexts):
        kept = ParallelTexts(sources=examples.sources[:count], targets=examples.targets[:count])
    elif isinstance(examples, SpanInputs):
        kept = SpanInputs(examples.texts[:count], examples.spans[:count], examples.covering)
    else:
        pairs = None if examples.text_pairs is None else examples.text_pairs[:count]
        if isinstance(examples, MultiLabeledInputs):
            kept = MultiLabeledInputs(examples.texts[:count], examples.labels[:count], pairs)
        else:
            kept = LabeledInputs(examples.inputs[:count], examples.labels[:count], pairs)
    return replace(data, name=f"{data.name}, the first {count:,}", examples=kept)
