"""Tasks: what each kind of training run reads, minimises and measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from headway_training.checkpoint import TOKENIZER_FILE, TaskName
from headway_training.data.captions import CaptionedImages, language_token
from headway_training.data.examples import (
    Conversations,
    LabeledImages,
    LabeledTexts,
    MultiLabeledTexts,
    ParallelTexts,
    PlainText,
    SpanLabeledTexts,
    Splits,
)
from headway_training.data.pictures import DescribedImages, Pictures
from headway_training.data.speech import Recordings
from headway_training.data.token_file import PART_CHARACTERS
from headway_training.durable import replacing
from headway_training.errors import DataError
from headway_training.recipes import Recipe
from headway_training.tasks.base import IGNORED, EvaluationData, Metrics, Task, TrainingBatch
from headway_training.tasks.captioning import CaptioningTask
from headway_training.tasks.classification import (
    ImageClassificationTask,
    MultiLabelTask,
    TextClassificationTask,
)
from headway_training.tasks.codec import AudioCodingTask
from headway_training.tasks.contrastive import ContrastiveTask
from headway_training.tasks.conversation import ConversationTask
from headway_training.tasks.diffusion import AutoencodingTask, DiffusionTask, TextDiffusionTask
from headway_training.tasks.distillation import DistillationTask
from headway_training.tasks.generation import GenerationTask
from headway_training.tasks.segmentation import SegmentationTask
from headway_training.tasks.synthesis import SpeechSynthesisTask
from headway_training.tasks.token_classification import TokenClassificationTask
from headway_training.tasks.transcription import TranscriptionTask, spaced
from headway_training.tasks.translation import TranslationTask
from headway_training.tokenizers import SPEECH, take_tokenizer, train_tokenizer
from headway_training.unread import check_decided, takes_tokenizer

if TYPE_CHECKING:
    from headway_training.huggingface import ModelFolder

__all__ = ["IGNORED", "EvaluationData", "Metrics", "Task", "TrainingBatch", "make_task"]

TOKENS_FILE = "tokens.bin"
"""Tokens of a running text, in the run's folder."""
_TASKS: Mapping[type, Callable[..., Task]] = MappingProxyType(
    {
        ParallelTexts: TranslationTask,
        SpanLabeledTexts: TokenClassificationTask,
        MultiLabeledTexts: MultiLabelTask,
        LabeledTexts: TextClassificationTask,
        Pictures: ContrastiveTask,
        CaptionedImages: CaptioningTask,
        DescribedImages: TextDiffusionTask,
    }
)
"""The tasks of examples with separate texts; they take recipe, data and tokenizer, and special tokens of a folder."""
_IMAGE_TASKS: Mapping[TaskName, Callable[..., Task]] = MappingProxyType(
    {
        "image_classification": ImageClassificationTask,
        "image_embedding": DistillationTask,
        "image_generation": DiffusionTask,
    }
)
"""The tasks of labelled images."""
_TASKS_WITHOUT_NAMES: Mapping[TaskName, Callable[..., Task]] = MappingProxyType(
    {"segmentation": SegmentationTask, "autoencoding": AutoencodingTask, "audio_coding": AudioCodingTask}
)
"""The tasks that read neither labels nor texts."""
_SPEECH_TASKS: Mapping[TaskName, Callable[..., Task]] = MappingProxyType(
    {"transcription": TranscriptionTask, "speech_synthesis": SpeechSynthesisTask}
)
"""The tasks of recordings with texts."""


def make_task(recipe: Recipe, splits: Splits[Any], folder: Path, source: ModelFolder | None = None) -> Task:
    """Makes a recipe's task from its data.

    Args:
        recipe: The recipe.
        splits: Its data.
        folder: The run's folder. The tokenizer is read from it, or else trained or taken from the checkpoint that the
            recipe starts from, and written there; so are the tokens of a running text.
        source: The model folder that the run starts from, whose tokenizer is taken.

    Raises:
        DataError: The data is too small.
        CheckpointError: The checkpoint's tokenizer cannot be taken, or the folder has no chat template.
        RecipeError: The recipe says another size of its model than the data does.
    """
    task = _make_task(recipe, splits, folder, source)
    check_decided(recipe, task.model_fields())
    return task


def _make_task(recipe: Recipe, splits: Splits[Any], folder: Path, source: ModelFolder | None) -> Task:
    """As `make_task`, whatever the recipe says of its model."""
    if recipe.task in _TASKS_WITHOUT_NAMES:
        return _TASKS_WITHOUT_NAMES[recipe.task](recipe, splits)
    if isinstance(splits.train, LabeledImages):
        if source is not None and recipe.preprocessing is not None:
            source.check_images(splits.train.images, recipe.preprocessing)
        return _IMAGE_TASKS[recipe.task](recipe, splits)
    if isinstance(splits.train, Conversations):
        if source is None:
            raise DataError("conversations are written by the chat template of a model folder: give it with --init")
        return ConversationTask(recipe, splits, source)
    tokenizer = _make_tokenizer(recipe, splits, folder / TOKENIZER_FILE, source)
    special = None if source is None else source.special_tokens
    if isinstance(splits.train, PlainText):
        return GenerationTask(recipe, splits, tokenizer, folder / TOKENS_FILE, special)
    make = _SPEECH_TASKS.get(recipe.task) or _TASKS[type(splits.train)]
    return make(recipe, splits, tokenizer, *([] if special is None else [special]))


def _make_tokenizer(recipe: Recipe, splits: Splits[Any], file: Path, source: ModelFolder | None) -> Tokenizer:
    """Reads, takes or trains the tokenizer."""
    if file.is_file():
        return Tokenizer.from_file(str(file))
    if source is not None:
        tokenizer = source.tokenizer
    elif recipe.init.checkpoint is not None and takes_tokenizer(recipe, recipe.init.checkpoint):
        tokenizer = take_tokenizer(recipe.init.checkpoint, recipe.task)
    else:
        train = splits.train
        marks: list[str] = []
        if isinstance(train, CaptionedImages):
            marks = [language_token(one) for one in train.captions]
        elif recipe.task == "transcription":
            marks = [language_token(recipe.speech.language)]
        elif recipe.task == "speech_synthesis":
            marks = [SPEECH]
        tokenizer = train_tokenizer(_training_texts(train, recipe.task), recipe.tokenizer, recipe.task, marks)
    with replacing(file) as staging:
        tokenizer.save(str(staging))
    return tokenizer


def _training_texts(train: Any, task: TaskName) -> Iterable[str]:  # noqa: PLR0911 (a case for each kind of data)
    """Texts of the training part."""
    if isinstance(train, PlainText):
        return train.parts(PART_CHARACTERS)
    if isinstance(train, Pictures | DescribedImages):
        return train.all_texts()
    if isinstance(train, CaptionedImages):
        return [caption for language in train.captions for caption in train.all_texts(language)]
    if isinstance(train, Recordings):
        return spaced(train.texts) if task == "transcription" else train.texts
    if isinstance(train, ParallelTexts):
        return [*train.sources, *train.targets]
    if isinstance(train, SpanLabeledTexts):
        return train.texts
    return [*train.texts, *(train.text_pairs or ())]
