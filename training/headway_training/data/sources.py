"""A recipe's data: its public data set, or the user's own files in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headway_training.checkpoint import AudioPreprocessing, ImagePreprocessing, TaskName
from headway_training.data.conll import read_span_labeled_texts
from headway_training.data.conversations import holds_conversations, read_conversations
from headway_training.data.examples import PlainText, Splits
from headway_training.data.images import find_images, read_image_folder
from headway_training.data.public import DATASETS, Dataset
from headway_training.data.speech import MOST_TEST_SECONDS, Recordings, find_recordings, read_recordings
from headway_training.data.texts import read_labeled_texts, read_multi_labeled_texts, read_parallel_texts
from headway_training.errors import DataError, RecipeError
from headway_training.recipes import ClassificationSettings, Recipe

DATA_DIR_VARIABLE = "HEADWAY_DATA_DIR"
DEFAULT_DATA_DIR = Path("data")
_DATA_TASKS: Mapping[TaskName, TaskName] = MappingProxyType(
    {
        "image_embedding": "image_classification",
        "autoencoding": "image_classification",
        "image_generation": "image_classification",
        "audio_coding": "speech_synthesis",
    }
)
"""The task whose data another one reads."""
_MORE_DATA_TASKS: Mapping[TaskName, tuple[TaskName, ...]] = MappingProxyType(
    dict.fromkeys(("autoencoding", "image_generation"), ("image_generation",))
)
"""Tasks that read images with descriptions too."""
MIN_CHARACTERS = 100
"""Fewest characters of a running text."""


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
        return [file for name in find_dataset_of(recipe).made if (file := folder / name).is_file()]
    found: list[Path] = []
    for name in dict.fromkeys((own.train, own.valid, own.test or own.valid)):
        path, kind = Path(name), _DATA_TASKS.get(recipe.task, recipe.task)
        parts = [path] if path.exists() else [Path(part) for part in name.split(",")]
        if path.is_dir() and kind == "image_classification":
            parts = [file for file, _ in find_images(path)]
        elif path.is_file() and kind in {"transcription", "speech_synthesis"}:
            parts += find_recordings(path)
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
    if dataset.task not in (*_MORE_DATA_TASKS.get(recipe.task, ()), _DATA_TASKS.get(recipe.task, recipe.task)):
        raise RecipeError(f"data.dataset {name!r} is for the task {dataset.task}; the recipe's is {recipe.task}")
    return dataset


def _read_own(recipe: Recipe, own: OwnData) -> Splits[Any]:
    """Reads the user's files; labels are those of the training data."""
    if recipe.task in {"image_text_embedding", "segmentation", "captioning"}:
        raise DataError(f"{recipe.task} reads its own data set; leave out --train, --valid and --test")

    def read(name: str, labels: tuple[str, ...] | None) -> tuple[Any, tuple[str, ...]]:
        if recipe.task == "generation" and holds_conversations(Path(name)):
            return read_conversations(Path(name)), ()
        return read_examples(
            recipe.task,
            name,
            labels,
            classification=recipe.classification,
            preprocessing=recipe.preprocessing or recipe.audio,
        )

    train, labels = read(own.train, None)
    valid, _ = read(own.valid, labels)
    test = valid if own.test is None else read(own.test, labels)[0]
    if isinstance(test, Recordings) and test.seconds > MOST_TEST_SECONDS:
        raise DataError(
            f"the test recordings are {test.seconds / 60:.0f} minutes long, and the checkpoint carries at most "
            f"{MOST_TEST_SECONDS // 60}; give fewer with --test"
        )
    if any(type(part) is not type(train) for part in (valid, test)):
        raise DataError("--train, --valid and --test must all be conversations (.jsonl), or all running text")
    return Splits(
        train=train,
        valid=valid,
        test=test,
        train_name=own.train_name,
        test_name=file_names(own.test or own.valid),
        license="not stated",
        home="the user's own data",
        labels=labels,
    )


def read_examples(  # noqa: PLR0911 (a case for each kind of data)
    task: TaskName,
    name: str,
    labels: tuple[str, ...] | None,
    *,
    classification: ClassificationSettings,
    preprocessing: ImagePreprocessing | AudioPreprocessing | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Reads one part of the user's data.

    Args:
        task: What it is for.
        name: A file, two files with a comma between them, or a folder of images.
        labels: Known labels in the order of their indices; None: those of the file.
        classification: What the rows of a text classifier hold.
        preprocessing: The size of images, or the rate of audio; for tasks of labelled images and of recordings.

    Returns:
        The examples and the labels, of which tasks without labels have none.

    Raises:
        DataError: Data is missing or malformed, or a label is not known.
    """
    path = Path(name)
    if task == "translation":
        return read_parallel_texts(name), ()
    if task == "generation":
        text = PlainText(path)
        if len(text) < MIN_CHARACTERS:
            raise DataError(f"{path} has {len(text)} characters; expected at least {MIN_CHARACTERS}")
        return text, ()
    if task == "token_classification":
        return read_span_labeled_texts(path, labels)
    if _DATA_TASKS.get(task, task) == "speech_synthesis":
        return read_recordings(path, with_speakers=True), ()
    if task == "transcription":
        assert isinstance(preprocessing, AudioPreprocessing)
        return read_recordings(path, preprocessing.sampling_rate), ()
    if _DATA_TASKS.get(task, task) == "image_classification":
        assert isinstance(preprocessing, ImagePreprocessing)
        return read_image_folder(path, preprocessing, labels)
    if classification.multi_label:
        separator, pairs = classification.label_separator, classification.text_pairs
        return read_multi_labeled_texts(path, labels, separator=separator, text_pairs=pairs)
    return read_labeled_texts(path, labels, text_pairs=classification.text_pairs)


def file_names(name: str) -> str:
    """File names without their folders, which are nobody else's business."""
    return ", ".join(Path(part).name for part in name.split(","))


def describe_own_data(recipe: Recipe, own: OwnData, labels: tuple[str, ...] = ()) -> str:
    """One sentence about a model that is trained on the user's data."""
    source = own.train_name
    shown = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
    return {
        "text_classification": f"Tells which of {len(labels)} labels fits a text ({shown}); trained on {source}.",
        "token_classification": f"Finds the parts of a text with one of {len(labels)} labels ({shown}); "
        f"trained on {source}.",
        "image_classification": f"Tells which of {len(labels)} labels fits an image ({shown}); trained on {source}.",
        "image_embedding": f"Turns an image into a vector; trained on {source}.",
        "autoencoding": f"Turns images into small latents and back; trained on {source}.",
        "image_generation": f"Draws images of {len(labels)} labels ({shown}); trained on {source}.",
        "audio_coding": f"Turns speech into codes and back; trained on {source}.",
        "speech_synthesis": f"Speaks; trained on {source}.",
        "transcription": f"Writes what is said; trained on {source}.",
        "translation": f"Translates text; trained on {source}.",
        "generation": f"{'Talks' if holds_conversations(Path(own.train)) else 'Continues text'}; trained on {source}.",
    }[recipe.task]
