"""An architecture and a task as users write them: a line through points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headway_training.batches import Batch, even_batches
from headway_training.kinds import ROWS, FileSettings, Labels, register
from headway_training.models import Configuration, Model, architecture
from headway_training.tasks.base import EvaluationData, Metrics, Part, Task, TrainingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SlopeConfig(Configuration):
    """Shape of a line."""

    degree: int = 1
    """Of the polynomial."""


@architecture("slope", SlopeConfig, "slope_finding")
class Slope(Model):
    """A polynomial of a number."""

    def __init__(self, configuration: SlopeConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.factors = nn.Parameter(torch.zeros(configuration.degree + 1))

    def forward(self, numbers: Tensor) -> Tensor:
        powers = torch.stack([numbers**power for power in range(len(self.factors))], dim=-1)  # (B, degree + 1)
        return powers @ self.factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Places of a line."""

    points: np.ndarray[Any, np.dtype[np.float32]]
    """(N, 2)."""

    def __len__(self) -> int:
        return len(self.points)


@register
class SlopeTask(Task):
    """Points of a line, each a line of two numbers."""

    name = "slope_finding"
    unit = "images"
    metric = "squared_error"
    higher_is_better = False
    settings = (ROWS,)
    sentence = "Finds a slope"

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[Points, Labels]:  # noqa: ARG003 (of tasks that need them)
        return Points(points=np.loadtxt(Path(file), dtype=np.float32)), ()

    @property
    def num_train_examples(self) -> int:
        return len(self._splits.train)

    def model_fields(self) -> dict[str, Any]:
        return {}

    def checkpoint_fields(self) -> dict[str, Any]:
        return {}

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        return even_batches(len(self._splits.train), self._recipe.optimization.batch_size, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:  # noqa: ARG002 (nothing is random)
        points = torch.from_numpy(self._splits.train.points[batch])
        tensors = {
            "numbers": points[:, 0],
            "heights": points[:, 1],
            "targets": torch.zeros(len(batch), dtype=torch.int64),
        }
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        losses: Tensor = (model(tensors["numbers"]) - tensors["heights"]).square()
        return losses

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:  # noqa: ARG002 (there are no labels)
        return self.logits(model, tensors).masked_fill(tensors["targets"] < 0, 0.0).sum()

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        numbers, heights = torch.from_numpy(getattr(self._splits, part).points).unbind(dim=1)
        return {"squared_error": float((model(numbers) - heights).square().mean())}

    def measure_baseline(self) -> None:
        pass

    def evaluation_data(self) -> EvaluationData:
        return EvaluationData(arrays={"points": self._splits.test.points})
