"""Makes a recipe's task from its data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headway_training.data.examples import (
    LabeledImages,
    LabeledTexts,
    MultiLabeledTexts,
    ParallelTexts,
    PlainText,
    SpanLabeledTexts,
    Splits,
)
from headway_training.recipes.settings import Recipe
from headway_training.tasks.base import Task
from headway_training.tasks.generation import GenerationTask
from headway_training.tasks.image_classification import ImageClassificationTask
from headway_training.tasks.multi_label import MultiLabelTask
from headway_training.tasks.text_classification import TextClassificationTask
from headway_training.tasks.token_classification import TokenClassificationTask
from headway_training.tasks.translation import TranslationTask
from headway_training.tokenizers import train_tokenizer

_PIECE = 1_000_000
"""Characters of a running text that a tokenizer is handed at once."""


def make_task(recipe: Recipe, splits: Splits[Any], tokenizer_file: Path) -> Task:
    """Makes the task; a tokenizer is trained once, and read from `tokenizer_file` when it is there already.

    Raises:
        DataError: The data is too small.
    """
    if isinstance(splits.train, LabeledImages):
        return ImageClassificationTask(recipe, splits)
    tokenizer = _tokenizer(recipe, splits, tokenizer_file)
    if isinstance(splits.train, PlainText):
        return GenerationTask(recipe, splits, tokenizer)
    if isinstance(splits.train, ParallelTexts):
        return TranslationTask(recipe, splits, tokenizer)
    if isinstance(splits.train, SpanLabeledTexts):
        return TokenClassificationTask(recipe, splits, tokenizer)
    if isinstance(splits.train, MultiLabeledTexts):
        return MultiLabelTask(recipe, splits, tokenizer)
    assert isinstance(splits.train, LabeledTexts)
    return TextClassificationTask(recipe, splits, tokenizer)


def _tokenizer(recipe: Recipe, splits: Splits[Any], file: Path) -> Tokenizer:
    """Reads or trains the tokenizer."""
    if file.is_file():
        return Tokenizer.from_file(str(file))
    tokenizer = train_tokenizer(_training_texts(splits), recipe.tokenizer, recipe.task)
    file.parent.mkdir(parents=True, exist_ok=True)
    staging = file.with_suffix(".writing")
    tokenizer.save(str(staging))
    staging.replace(file)
    return tokenizer


def _training_texts(splits: Splits[Any]) -> Iterable[str]:
    """Texts of the training part."""
    train = splits.train
    if isinstance(train, PlainText):
        return [train.text[start : start + _PIECE] for start in range(0, len(train.text), _PIECE)]
    if isinstance(train, ParallelTexts):
        return [*train.sources, *train.targets]
    if isinstance(train, SpanLabeledTexts):
        return train.texts
    assert isinstance(train, LabeledTexts | MultiLabeledTexts)
    return [*train.texts, *(train.text_pairs or ())]
