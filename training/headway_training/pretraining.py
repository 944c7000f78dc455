"""What may come before an encoder's training: it learns to tell hidden tokens of the training text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import nn

from headway_training.data.examples import Splits
from headway_training.errors import RecipeError
from headway_training.models import Model, build_model
from headway_training.recipes import Recipe
from headway_training.recipes.regularization import DistillationSettings, RegularizationSettings
from headway_training.state import RunState
from headway_training.tasks import Task
from headway_training.tasks.masked_language import MaskedLanguageTask
from headway_training.trainer import Trainer

PRETRAINING_FOLDER = "pretraining"


def pretrain(
    recipe: Recipe,
    task: Task,
    splits: Splits[Any],
    model: Model,
    *,
    folder: Path,
    seed: int,
    console: Console,
    accelerator: Accelerator,
) -> None:
    """Gives a model the weights of a pretraining, where its recipe asks for one; the head keeps its fresh weights.

    The pretraining is a run of its own in `folder/pretraining`, resumed like one. Once the model's own training has a
    state there is nothing to do.

    Args:
        recipe: With `pretraining.epochs` above 0, of a model that reads text in both directions.
        task: What the model is trained for afterwards.
        splits: Whose training texts are learned from.
        model: With fresh weights.
        folder: The run's folder.
        seed: Of the run.
        console: Where progress is shown.
        accelerator: The devices.

    Raises:
        RecipeError: The model is no encoder.
        StoppedError: A signal came.
    """
    if not recipe.pretraining.epochs or RunState(folder).latest() is not None:
        return
    if recipe.model["architecture"] != "encoder":
        raise RecipeError(
            f"pretraining.epochs is {recipe.pretraining.epochs}; model.architecture is "
            f"{recipe.model['architecture']!r}, and only 'encoder' can be pretrained. Set it to 0"
        )
    trainer = _make_trainer(
        recipe,
        task,
        splits,
        folder=folder / PRETRAINING_FOLDER,
        seed=seed,
        console=console,
        accelerator=accelerator,
    )
    if accelerator.is_main_process:
        console.print(f"pretraining on the training text: {trainer.num_steps:,} steps", highlight=False)
    trainer.fit()
    copy_common_weights(trainer.model, model)


def _make_trainer(
    recipe: Recipe,
    task: Task,
    splits: Splits[Any],
    *,
    folder: Path,
    seed: int,
    console: Console,
    accelerator: Accelerator,
) -> Trainer:
    assert task.tokenizer is not None, "encoders read text"
    settings = recipe.pretraining
    masked = MaskedLanguageTask(
        recipe, task.tokenizer, splits.train.texts, splits.valid.texts, int(recipe.model["max_length"])
    )
    fields = {name: value for name, value in recipe.model.items() if name != "architecture"}
    torch.manual_seed(seed)
    optimization = replace(
        recipe.optimization,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate or recipe.optimization.learning_rate,
        label_smoothing=0.0,
    )
    return Trainer(
        task=masked,
        model=build_model("encoder", {**fields, **masked.model_fields()}),
        recipe=replace(
            recipe,
            optimization=optimization,
            regularization=RegularizationSettings(),
            distillation=DistillationSettings(),
        ),
        folder=folder,
        seed=seed,
        console=console,
        accelerator=accelerator,
    )


@torch.no_grad()
def copy_common_weights(source: nn.Module, target: nn.Module) -> None:
    """Copies every weight but the heads' that both models have."""
    weights = dict(source.named_parameters())
    for name, weight in target.named_parameters():
        if not name.startswith("head."):
            weight.copy_(weights[name])
