"""Tasks: what each kind of training run reads, minimises and measures.

A task is one class in a module of its own, registered by name (`headway_training.kinds`); it is imported here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headway_training.data.examples import Splits
from headway_training.kinds import find_task
from headway_training.recipes import Recipe
from headway_training.tasks import (
    captioning,
    classification,
    codec,
    contrastive,
    detection,
    diffusion,
    distillation,
    generation,
    segmentation,
    synthesis,
    token_classification,
    transcription,
    translation,
)
from headway_training.tasks.base import IGNORED, EvaluationData, Metrics, Task, TrainingBatch
from headway_training.unread import check_decided

if TYPE_CHECKING:
    from headway_training.huggingface import ModelFolder

__all__ = [
    "IGNORED",
    "EvaluationData",
    "Metrics",
    "Task",
    "TrainingBatch",
    "captioning",
    "classification",
    "codec",
    "contrastive",
    "detection",
    "diffusion",
    "distillation",
    "generation",
    "make_task",
    "segmentation",
    "synthesis",
    "token_classification",
    "transcription",
    "translation",
]


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
    kind = cast("type[Task]", find_task(recipe.task)).variant(splits.train)
    task = kind.make(recipe, splits, folder, source)
    check_decided(recipe, task.model_fields())
    return task
