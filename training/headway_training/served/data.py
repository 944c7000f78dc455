"""What a served model is measured on: data sets and files, as a client sends them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_client import Model
from headway_training.data.captions import CaptionedImages, read_caption_table
from headway_training.data.examples import (
    LabeledImages,
    PlainText,
    Rows,
)
from headway_training.data.images import find_images
from headway_training.data.pictures import DescribedImages, Pictures
from headway_training.data.questions import read_questions
from headway_training.data.sources import file_names, read_examples, read_splits
from headway_training.errors import DataError, EvaluationError
from headway_training.kinds import task_names
from headway_training.recipes import ClassificationSettings, Recipe, list_recipes, read_recipe

if TYPE_CHECKING:
    from headway_training.tasks.segmentation import MeasuredPicture

DEFAULT_LABEL_SEPARATOR = "|"
"""Between the labels of a text."""
_RECIPE_TASKS: Mapping[str, tuple[str, ...]] = {"image_embedding": ("image_text_embedding", "image_embedding")}
"""Of recipes' tasks that are not the model's alone: an image tower is measured with the text tower of its space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImages(Rows):
    """Image files with a label each."""

    images: list[bytes]
    labels: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbouringImages(EncodedImages):
    """Image files whose labels are to be found by those of the images that are nearest."""

    known: EncodedImages
    """The images that are looked among."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedFiles(Rows):
    """Image files with captions."""

    images: list[bytes]
    captions: list[Mapping[str, Sequence[str]]]
    """Of each, by language; where it is not known, under the empty name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedFiles(Rows):
    """Image files, each with what draws its like: a text or a label."""

    images: list[bytes]
    prompts: list[str]
    trained_on: tuple[bytes, ...] = ()
    """As many images of the training part, in no order but always the same; empty if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedFiles(Rows):
    """Pictures with segments to find."""

    pictures: list[MeasuredPicture]


@dataclass(frozen=True, slots=True)
class TestData:
    """Data to measure on."""

    name: str
    """Its name in words."""
    examples: Any
    """The examples of the model's task."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of the examples' indices."""


def read_dataset(model: Model, name: str | None, folder: Path) -> TestData:
    """Reads the test part of a data set.

    Args:
        model: The model that is to be measured.
        name: Name of the data set; None: that of the recipe that makes a model of this name.
        folder: The folder of the public data sets.

    Raises:
        EvaluationError: No recipe has such data for the model's task and languages.
        DataError: The data is missing or malformed, or has a label that the model does not know.
    """
    recipe = _find_recipe(model, name)
    splits = read_splits(recipe, folder, None)
    test = splits.test
    if isinstance(test, Pictures):
        return TestData(splits.test_name, test)
    if model.task == "segmentation":
        from headway_training.tasks.segmentation import SegmentationTask  # noqa: PLC0415 (torch, which others need not)

        return TestData(splits.test_name, SegmentedFiles(pictures=SegmentationTask(recipe, splits).measured("test")))
    if isinstance(test, CaptionedImages):
        captions: list[Mapping[str, Sequence[str]]] = [
            {one: test.captions[one][row] for one in test.captions} for row in range(len(test))
        ]
        return TestData(splits.test_name, CaptionedFiles(images=list(map(encode_png, test.images)), captions=captions))
    if model.task == "image_embedding":
        known = _encode_images(splits.train)
        nearest = NeighbouringImages(images=_encode_images(test).images, labels=test.labels.tolist(), known=known)
        return TestData(splits.test_name, nearest, splits.labels)
    if unknown := sorted(set(splits.labels) - set(model.labels)):
        raise DataError(
            f"{recipe.data.dataset}: the label {unknown[0]!r} is not one that {model.name} answers: "
            f"{', '.join(model.labels[:20])}"
        )
    if model.task == "image_generation":
        names = test.names if isinstance(test, DescribedImages) else [splits.labels[one] for one in test.labels]
        return TestData(splits.test_name, _prompted(splits.train, test, names))
    if isinstance(test, LabeledImages):
        test = _encode_images(test)
    return TestData(splits.test_name, test, splits.labels)


def _prompted(train: Rows, test: LabeledImages | DescribedImages, prompts: list[str]) -> PromptedFiles:
    """The test images with their prompts, beside images that were learned from."""
    rows = np.random.default_rng(0).permutation(len(train))[: len(test)]
    learned = cast("LabeledImages | DescribedImages", train.take(rows)).images
    return PromptedFiles(
        images=list(map(encode_png, test.images)), prompts=prompts, trained_on=tuple(map(encode_png, learned))
    )


def _find_recipe(model: Model, name: str | None) -> Recipe:
    """The recipe whose data is measured."""
    languages = (model.source_language, model.target_language)
    tasks = _RECIPE_TASKS.get(model.task, (model.task,))
    own = model.name.removesuffix("-image") if model.task in _RECIPE_TASKS else model.name
    is_file = name is not None and name.endswith(".toml")
    files = [str(name)] if is_file else [file.stem for file in list_recipes()]
    recipes = [recipe for recipe in map(read_recipe, files) if recipe.task in tasks]
    recipes = [
        one for one in recipes if one.languages is None or (one.languages.source, one.languages.target) == languages
    ]
    for recipe in recipes:
        if is_file or ((recipe.name == own) if name is None else (recipe.data.dataset == name)):
            return recipe
    known = ", ".join(sorted({recipe.data.dataset for recipe in recipes})) or "none"
    between = f" from {languages[0]} to {languages[1]}" if languages[0] else ""
    what = f"{model.name} is the name of no recipe's model" if name is None else f"--data {name} is not for this model"
    raise EvaluationError(
        f"{what}; it is for {model.task}{between}, for which there are the data sets: {known}. "
        "Name one with --data, or your own data with --file"
    )


def _encode_images(examples: LabeledImages) -> EncodedImages:
    return EncodedImages(images=[encode_png(image) for image in examples.images], labels=examples.labels.tolist())


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """Encodes an image, (height, width, 3), without loss."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def read_file(
    model: Model, file: str, manifest: Mapping[str, Any], label_separator: str, language: str = ""
) -> TestData:
    """Reads the user's own data, in the form that `headway-train run --test` takes for the model's task.

    Args:
        model: The model that is to be measured.
        file: The file, two files with a comma between them, or a folder of images.
        manifest: Of the model's bundle.
        label_separator: The character between the labels of a text, if several may apply.
        language: That captions are asked for in; empty: the model's default.

    Raises:
        DataError: The data is missing or malformed, or has a label that the model does not know.
        EvaluationError: The task is measured on no files; or there is a separator, and a text has one label or none.
    """
    several = (manifest.get("classification") or {}).get("kind") == "multi_label"
    if label_separator != DEFAULT_LABEL_SEPARATOR and not (several and model.task == "text_classification"):
        raise EvaluationError(
            f"--label-separator is for texts that may have several labels, and {model.name} gives none of them; "
            "leave it out"
        )
    if model.task == "question_answering":
        return TestData(file_names(file), read_questions(Path(file)))
    if model.task in _IMAGE_FILES:  # as they are: the server brings them to the model's size
        return TestData(file_names(file), *_IMAGE_FILES[model.task](model, Path(file), language))
    classification = ClassificationSettings(
        multi_label=several,
        text_pairs=manifest.get("text_pairs") or "never",
        label_separator=label_separator,
    )
    if model.task not in task_names():
        raise EvaluationError(f"--file: {model.task} is measured on no file of your own")
    rate = (manifest.get("audio_preprocessing") or {}).get("sampling_rate")
    examples, labels = read_examples(model.task, file, model.labels, classification=classification, sampling_rate=rate)
    return TestData(file_names(file), examples, labels)


def _read_labeled(model: Model, folder: Path, _language: str) -> tuple[EncodedImages, tuple[str, ...]]:
    """Reads a folder with a folder of images for each label."""
    found = find_images(folder)
    labels = tuple(sorted({label for _, label in found}))
    if unknown := sorted(set(labels) - set(model.labels)):
        raise DataError(f"{folder}: the label {unknown[0]!r} is not among those of the model")
    files = [path.read_bytes() for path, _ in found]
    return EncodedImages(images=files, labels=[labels.index(label) for _, label in found]), labels


def _read_captioned(_model: Model, table: Path, language: str) -> tuple[CaptionedFiles]:
    """Reads a table of images with captions, whose language is the given one where the table says nothing of it."""
    found = read_caption_table(table, language)
    return (CaptionedFiles(images=[path.read_bytes() for path in found], captions=list(found.values())),)


def _read_drawn(model: Model, file: Path, language: str) -> tuple[PromptedFiles]:
    """Reads images with what draws their like: their labels, or their first captions."""
    if model.labels:
        examples, labels = _read_labeled(model, file, language)
        return (PromptedFiles(images=examples.images, prompts=[labels[one] for one in examples.labels]),)
    (captioned,) = _read_captioned(model, file, language)
    prompts = [next(iter(one.values()))[0] for one in captioned.captions]
    return (PromptedFiles(images=captioned.images, prompts=prompts),)


def _read_segmented(_model: Model, folder: Path, _language: str) -> tuple[SegmentedFiles]:
    """Reads a folder of pictures with masks."""
    from headway_training.tasks.segmentation import read_measured  # noqa: PLC0415 (torch, which others need not)

    return (SegmentedFiles(pictures=read_measured(folder)),)


_IMAGE_FILES: Mapping[str, Callable[[Model, Path, str], tuple[Any, ...]]] = {
    "image_classification": _read_labeled,
    "image_generation": _read_drawn,
    "image_embedding": _read_captioned,
    "captioning": _read_captioned,
    "segmentation": _read_segmented,
}
"""Of tasks of images, whose files are sent as they are: model, file or folder, and language -> examples and labels."""


def first_examples(examples: Any, limit: int | None) -> Any:
    """The first `limit` examples, or characters of a running text; the pictures of a data set are measured whole.

    Raises:
        EvaluationError: There is a limit, and only the whole can be measured.
    """
    if limit is not None and isinstance(examples, Pictures):
        raise EvaluationError("--limit: recall is that among all pictures, which are measured whole; leave it out")
    if limit is None or limit >= len(examples):
        return examples
    if isinstance(examples, PlainText):
        return PlainText(examples.text[:limit])
    return examples.take(np.arange(limit))
