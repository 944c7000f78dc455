"""A recipe's data: its public data set, or the user's own files in its place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_training.checkpoint import ImagePreprocessing
from headway_training.data.examples import Splits
from headway_training.data.public import DATASETS, Dataset
from headway_training.errors import DataError, RecipeError
from headway_training.kinds import FileSettings, find_task
from headway_training.recipes import ClassificationSettings, Recipe

DATA_DIR_VARIABLE = "HEADWAY_DATA_DIR"
DEFAULT_DATA_DIR = Path("data")
OWN_LICENSE = "not stated; the training data is the user's own"
"""Licence of the user's own data, and of what is trained on nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """The user's own files, in the form that the recipe's task takes."""

    train: str
    """What the weights are fitted to."""
    valid: str
    """What the best weights are selected on."""
    test: str | None = None
    """What is measured at the end; None: the validation data again."""

    @property
    def train_name(self) -> str:
        """The training data's file names, without their folders."""
        return file_names(self.train)


def check_own_data(train: str | None, valid: str | None, test: str | None) -> OwnData | None:
    """The user's files; None if none is named.

    Raises:
        DataError: Training or validation data is missing.
    """
    if train is None and valid is None and test is None:
        return None
    if train is None or valid is None:
        missing = "--train" if train is None else "--valid"
        raise DataError(f"{missing} is missing: own data needs --train FILE and --valid FILE, and takes --test FILE")
    return OwnData(train=train, valid=valid, test=test)


def data_folder(chosen: Path | None) -> Path:
    """The folder of the data sets: the chosen one, that of the environment, or `data`."""
    return chosen or Path(os.environ.get(DATA_DIR_VARIABLE) or DEFAULT_DATA_DIR)


def find_unchecked_files(recipe: Recipe, folder: Path, own: OwnData | None) -> list[Path]:
    """The files of a recipe's data that nobody has a checksum of, as far as they are there.

    Args:
        recipe: The recipe.
        folder: The folder of the public data sets.
        own: The user's own files; None: the recipe's data set.

    Raises:
        DataError: A folder or a table that names further files is malformed.
        RecipeError: The recipe names no known data set.
    """
    if own is None:
        dataset = find_dataset_of(recipe)
        names = (*dataset.made, *(f"{dataset.folder}/{file.name}" for file in dataset.files if file.maker))
        return [file for name in names if (file := folder / name).is_file()]
    kind, found = find_task(recipe.task), list[Path]()
    for name in dict.fromkeys((own.train, own.valid, own.test or own.valid)):
        path = Path(name)
        parts = list(kind.files_behind(path)) if path.exists() else [Path(part) for part in name.split(",")]
        found += [part for part in parts if part.is_file()]
    return found


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
    dataset = find_dataset_of(recipe)
    return dataset.read(dataset, folder, recipe.data)


def find_dataset_of(recipe: Recipe) -> Dataset:
    """The public data set of a recipe.

    Raises:
        RecipeError: It is not known, or is for another task.
    """
    name = recipe.data.dataset
    if name not in DATASETS:
        raise RecipeError(f"data.dataset is {name!r}; it must be one of {', '.join(DATASETS)}")
    dataset = DATASETS[name]
    if dataset.task not in (find_task(recipe.task).data_of or (recipe.task,)):
        raise RecipeError(f"data.dataset {name!r} is for the task {dataset.task}; the recipe's is {recipe.task}")
    return dataset


def _read_own(recipe: Recipe, own: OwnData) -> Splits[Any]:
    """Reads the user's files; labels are those of the training data."""
    kind = find_task(recipe.task)
    settings = FileSettings(
        classification=recipe.classification,
        preprocessing=recipe.preprocessing,
        sampling_rate=kind.sampling_rate(recipe),
    )
    train, labels = kind.read_own(own.train, None, settings)
    valid, _ = kind.read_own(own.valid, labels, settings)
    test = valid if own.test is None else kind.read_own(own.test, labels, settings)[0]
    kind.check_own(train, valid, test)
    return Splits(
        train=train,
        valid=valid,
        test=test,
        train_name=own.train_name,
        test_name=file_names(own.test or own.valid),
        license=OWN_LICENSE,
        home="the user's own data",
        labels=labels,
    )


def read_examples(
    task: str,
    name: str,
    labels: tuple[str, ...] | None,
    *,
    classification: ClassificationSettings,
    preprocessing: ImagePreprocessing | None = None,
    sampling_rate: int | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Reads one part of the user's data.

    Args:
        task: What it is for.
        name: A file, two files with a comma between them, or a folder of images.
        labels: Known labels in the order of their indices; None: those of the file.
        classification: What the rows of a text classifier hold.
        preprocessing: The size of images; for tasks of images.
        sampling_rate: Samples a second of recordings; None: those of the first.

    Returns:
        The examples and the labels, of which tasks without labels have none.

    Raises:
        DataError: Data is missing or malformed, or a label is not known.
    """
    settings = FileSettings(classification=classification, preprocessing=preprocessing, sampling_rate=sampling_rate)
    return find_task(task).read(name, labels, settings)


def file_names(name: str) -> str:
    """File names without their folders, which are nobody else's business."""
    return ", ".join(Path(part).name for part in name.split(","))
