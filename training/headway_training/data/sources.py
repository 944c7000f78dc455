"""A recipe's data: its public data set, or the user's own files in its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway_training.data.conll import read_span_labeled_texts
from headway_training.data.examples import Splits
from headway_training.data.image_folder import read_image_folder
from headway_training.data.labeled_text import read_labeled_texts, read_multi_labeled_texts
from headway_training.data.parallel_text import read_parallel_texts
from headway_training.data.plain_text import read_plain_text
from headway_training.data.public import (
    read_ag_news,
    read_cifar10,
    read_multi30k,
    read_tiny_shakespeare,
    read_ud_english_ewt,
    read_wnut17,
)
from headway_training.data.sst2 import read_sst2
from headway_training.errors import DataError, RecipeError
from headway_training.recipes.settings import Recipe, TaskName

DATA_DIR_VARIABLE = "HEADWAY_DATA_DIR"
DEFAULT_DATA_DIR = Path("data")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """The user's own files: CSV, parallel text, plain text, or folders of images, as the recipe's task wants."""

    train: str
    """What the weights are fitted to."""
    valid: str
    """What the best weights are selected on."""
    test: str | None = None
    """What is measured at the end; None: the validation data again."""


def data_folder(chosen: Path | None) -> Path:
    """The folder of the data sets: the one chosen, that of the environment, or `data`."""
    return chosen or Path(os.environ.get(DATA_DIR_VARIABLE) or DEFAULT_DATA_DIR)


def read_splits(recipe: Recipe, folder: Path, own: OwnData | None) -> Splits[Any]:
    """Reads a recipe's data.

    Args:
        recipe: The recipe.
        folder: The folder of the public data sets.
        own: The user's own files; None: the recipe's data set.

    Raises:
        DataError: Data is missing or malformed.
        RecipeError: The recipe names no known data set.
    """
    if own is not None:
        return _read_own(recipe, own)
    readers: Mapping[str, tuple[TaskName, Callable[[], Splits[Any]]]] = {
        "ag-news": ("text_classification", lambda: read_ag_news(folder, recipe.data.valid_fraction)),
        "ud-english-ewt": ("token_classification", lambda: read_ud_english_ewt(folder, recipe.data.valid_fraction)),
        "wnut17": ("token_classification", lambda: read_wnut17(folder, recipe.data.valid_fraction)),
        "sst2": ("text_classification", lambda: read_sst2(folder, recipe.data.valid_fraction)),
        "tiny-shakespeare": (
            "generation",
            lambda: read_tiny_shakespeare(folder, recipe.data.valid_fraction, recipe.data.test_fraction),
        ),
        "multi30k-en-de": ("translation", lambda: read_multi30k(folder, ("en", "de"))),
        "multi30k-de-en": ("translation", lambda: read_multi30k(folder, ("de", "en"))),
        "cifar10": ("image_classification", lambda: read_cifar10(folder, recipe.data.valid_fraction)),
    }
    task, read = readers.get(recipe.data.dataset, (None, None))
    if read is None:
        raise RecipeError(f"data.dataset is {recipe.data.dataset!r}; it must be one of {', '.join(readers)}")
    if task != recipe.task:
        raise RecipeError(f"data.dataset {recipe.data.dataset!r} is for the task {task}; the recipe's is {recipe.task}")
    return read()


def _read_own(recipe: Recipe, own: OwnData) -> Splits[Any]:
    """Reads the user's files; labels are those of the training data."""
    labels: tuple[str, ...] | None = None
    parts: list[Any] = []
    for name in (own.train, own.valid, own.test):
        if name is None:
            parts.append(parts[-1])
            continue
        examples, labels = _read_part(recipe, name, labels)
        parts.append(examples)
    train_name, test_name = (_short_name(name) for name in (own.train, own.test or own.valid))
    return Splits(
        train=parts[0],
        valid=parts[1],
        test=parts[2],
        train_name=train_name,
        test_name=test_name,
        license="not stated",
        home="the user's own data",
        labels=labels or (),
    )


def _read_part(recipe: Recipe, name: str, labels: tuple[str, ...] | None) -> tuple[Any, tuple[str, ...] | None]:
    """One part of the user's data, and the labels."""
    if recipe.task == "text_classification":
        settings = recipe.classification
        if settings.multi_label:
            separator, pairs = settings.label_separator, settings.text_pairs
            return read_multi_labeled_texts(Path(name), labels, separator=separator, text_pairs=pairs)
        return read_labeled_texts(Path(name), labels, text_pairs=settings.text_pairs)
    if recipe.task == "token_classification":
        return read_span_labeled_texts(Path(name), labels)
    if recipe.task == "image_classification":
        assert recipe.preprocessing is not None
        return read_image_folder(Path(name), recipe.preprocessing, labels)
    if recipe.task == "translation":
        return read_parallel_texts(name), None
    return read_plain_text(Path(name)), None


def _short_name(name: str) -> str:
    """File names without their folders, which are nobody's business."""
    return ", ".join(Path(part).name for part in name.split(","))


def for_own_data(recipe: Recipe, own: OwnData, labels: tuple[str, ...] = ()) -> Recipe:
    """The recipe with a description that fits the user's data.

    Raises:
        DataError: Only one of the training and validation data is named.
    """
    source = _short_name(own.train)
    shown = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
    description = {
        "text_classification": f"Tells which of {len(labels)} labels fits a text ({shown}); trained on {source}.",
        "token_classification": f"Finds the parts of a text that bear one of {len(labels)} labels ({shown}); "
        f"trained on {source}.",
        "image_classification": f"Tells which of {len(labels)} labels fits an image ({shown}); trained on {source}.",
        "translation": f"Translates text; trained on {source}.",
        "generation": f"Continues text; trained on {source}.",
    }[recipe.task]
    return replace(recipe, description=description)


def check_own_data(train: str | None, valid: str | None, test: str | None) -> OwnData | None:
    """The user's files, or None where none is named.

    Raises:
        DataError: One of training and validation data is named without the other.
    """
    if train is None and valid is None and test is None:
        return None
    if train is None or valid is None:
        missing = "--train" if train is None else "--valid"
        raise DataError(f"{missing} is missing: own data needs --train FILE and --valid FILE, and takes --test FILE")
    return OwnData(train=train, valid=valid, test=test)
