"""What a training minimises: the task's loss, and what a recipe adds to it.

B rows, N predictions, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.checkpoint import Checkpoint, load_model, load_tokenizer
from headway_training.errors import RecipeError
from headway_training.recipes import Recipe
from headway_training.recipes.regularization import RegularizationSettings
from headway_training.tasks import Task
from headway_training.tasks.base import IGNORED


class Objective(nn.Module):
    """Model and loss in one forward call, which is what data parallelism and autocast wrap.

    Args:
        task: Loss of logits.
        model: What is trained.
        recipe: What is added to the loss.
        device_type: Where autocast is for.
        teacher: The model that is distilled, on the model's device.
    """

    def __init__(
        self, task: Task, model: nn.Module, recipe: Recipe, device_type: str, teacher: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._recipe = recipe
        self._device_type = device_type
        self._teacher = [] if teacher is None else [teacher.eval().requires_grad_(False)]  # a list hides its weights

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The loss summed over the targets of a batch, a scalar."""
        bf16 = self._recipe.optimization.precision == "bf16"
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=bf16):
            if self.training and self._recipe.regularization.mixup and "pixel_values" in tensors:
                return self._mixed(tensors)
            return self._loss(tensors)

    def _mixed(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Mixup: images are weighted sums of two, and so are their losses."""
        alpha = self._recipe.regularization.mixup
        draw = np.random.default_rng(int(torch.randint(2**62, ())))
        share = float(draw.beta(alpha, alpha))
        images, targets = tensors["pixel_values"], tensors["targets"]
        partner = torch.from_numpy(draw.permutation(len(targets))).to(targets.device)
        mixed = share * images + (1 - share) * images[partner]
        return self._loss({**tensors, "pixel_values": mixed}, [(share, targets), (1 - share, targets[partner])])

    def _loss(self, tensors: Mapping[str, Tensor], parts: list[tuple[float, Tensor]] | None = None) -> Tensor:
        """The loss, on one or several weighted targets."""
        targets = parts or [(1.0, tensors["targets"])]
        r_drop = self._recipe.regularization.r_drop
        passes = [self._task.logits(self.model, tensors).float() for _ in range(2 if r_drop else 1)]  # (B, ..., C)
        smoothing = self._recipe.optimization.label_smoothing
        total = sum(
            (
                weight * self._task.loss_of_logits(logits, target, smoothing)
                for logits in passes
                for weight, target in targets
            ),
            start=passes[0].new_zeros(()),
        ) / len(passes)
        if r_drop:
            # Half of the paper's loss, so that both terms are those of one pass: alpha keeps its meaning.
            total = total + r_drop / 2 * symmetric_divergence(passes[0], passes[1], tensors["targets"])
        if self._teacher:
            total = self._distilled(total, passes[0], tensors)
        return total

    def _distilled(self, loss: Tensor, logits: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The loss with the teacher's part, scaled by the squared temperature, as gradients shrink by it."""
        settings = self._recipe.distillation
        with torch.no_grad():
            expected = self._task.logits(self._teacher[0], tensors).float()
        distance = divergence(expected / settings.temperature, logits / settings.temperature, tensors["targets"])
        return (1 - settings.weight) * loss + settings.weight * settings.temperature**2 * distance


def divergence(expected: Tensor, given: Tensor, targets: Tensor) -> Tensor:
    """Kullback-Leibler divergence of softmax(given) from softmax(expected), (B, ..., C), summed over predictions."""
    predicted = targets.flatten() != IGNORED  # (N)
    expected, given = expected.flatten(0, -2)[predicted], given.flatten(0, -2)[predicted]
    return F.kl_div(given.log_softmax(dim=-1), expected.log_softmax(dim=-1), reduction="sum", log_target=True)


def symmetric_divergence(one: Tensor, other: Tensor, targets: Tensor) -> Tensor:
    """The mean of both divergences (Liang et al. 2021, equation 2)."""
    return (divergence(one, other, targets) + divergence(other, one, targets)) / 2


class DropoutSchedule:
    """Turns the dropout of a model off outside of a part of the training."""

    def __init__(self, model: nn.Module, settings: RegularizationSettings, num_steps: int) -> None:
        self._modules = [(module, module.p) for module in model.modules() if isinstance(module, nn.Dropout)]
        self._steps = range(round(settings.dropout_from * num_steps), round(settings.dropout_until * num_steps))

    def apply(self, step: int) -> None:
        """Sets the dropout of step `step`, counted from 0."""
        for module, rate in self._modules:
            module.p = rate if step in self._steps else 0.0


def load_teacher(recipe: Recipe, task: Task) -> nn.Module | None:
    """Loads the model that a recipe distils; None where it names none.

    Raises:
        RecipeError: It is of another task, or has another tokenizer or other labels.
        CheckpointError: The folder is no checkpoint.
    """
    if recipe.classification.multi_label and (recipe.distillation.teacher or recipe.regularization.r_drop):
        raise RecipeError("distillation and regularization.r_drop are for one label a text; leave multi_label out")
    if not recipe.distillation.teacher:
        return None
    folder = Path(recipe.distillation.teacher)
    teacher, checkpoint = load_model(folder)
    _check_teacher(checkpoint, folder, recipe, task)
    return teacher


def _check_teacher(checkpoint: Checkpoint, folder: Path, recipe: Recipe, task: Task) -> None:
    where = f"distillation.teacher is {folder}, "
    if checkpoint.task != recipe.task:
        raise RecipeError(f"{where}which is for {checkpoint.task}; the recipe is for {recipe.task}")
    if task.tokenizer is not None and load_tokenizer(folder).to_str() != task.tokenizer.to_str():
        raise RecipeError(
            f"{where}which has another tokenizer; train both on the same data with the same section [tokenizer]"
        )
    labels = tuple(task.checkpoint_fields().get("labels", ()))
    if checkpoint.labels != labels:
        raise RecipeError(f"{where}whose labels are {checkpoint.labels}; those of the data are {labels}")
