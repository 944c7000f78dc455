"""Image labels: tell the class of an image.

B rows, N examples, H height, W width, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_training.baselines import pixel_regression_baseline
from headway_training.batches import Batch, even_batches
from headway_training.calibration import calibration_metrics, fit_temperature
from headway_training.checkpoint import Baseline, Classification
from headway_training.data.examples import LabeledImages, Splits
from headway_training.evaluation import image_logits
from headway_training.image_augmentation import rand_augment_pixels
from headway_training.images import augment, normalize
from headway_training.metrics import accuracy, macro_f1
from headway_training.recipes.settings import Recipe
from headway_training.tasks.base import EvaluationData, Metrics, Task, TrainingBatch


class ImageClassificationTask(Task):
    """Images of one size, mirrored and shifted at random."""

    unit = "images"
    metric = "accuracy"
    higher_is_better = True

    def __init__(self, recipe: Recipe, splits: Splits[LabeledImages]) -> None:
        assert recipe.preprocessing is not None
        self._preprocessing = recipe.preprocessing
        self._recipe = recipe
        self._splits = splits
        self._temperature = 1.0

    @property
    def num_train_examples(self) -> int:
        """Images of the training part."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """The classes, and the size that images are brought to."""
        return {"num_classes": len(self._splits.labels), "image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Labels, preprocessing and the fitted temperature."""
        return {
            "labels": self._splits.labels,
            "classification": Classification(temperature=self._temperature),
            "image_preprocessing": self._preprocessing,
        }

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of images in random order."""
        return even_batches(len(self._splits.train), self._recipe.optimization.batch_size, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, H, W), changed at random, and targets (B)."""
        settings = self._recipe.augmentation
        images = self._splits.train.images[batch]
        if settings.random_operations:
            images = rand_augment_pixels(
                images,
                operations=settings.random_operations,
                strength=settings.random_strength,
                generator=generator,
            )
        pixel_values = torch.from_numpy(normalize(images, self._preprocessing))
        pixel_values = augment(
            pixel_values, flip=settings.flip, crop_padding=settings.crop_padding, generator=generator
        )
        tensors = {"pixel_values": pixel_values, "targets": torch.from_numpy(self._splits.train.labels[batch])}
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, C)."""
        logits: Tensor = model(tensors["pixel_values"])
        return logits

    def evaluate(self, model: nn.Module, part: Literal["valid", "test"]) -> Metrics:
        """Accuracy and macro F1, in percent; of test data, the expected calibration error too."""
        examples = self._splits.valid if part == "valid" else self._splits.test
        logits = self._evaluation_logits(model, examples)
        predictions = logits.argmax(axis=-1)
        metrics: Metrics = {
            "accuracy": accuracy(predictions, examples.labels),
            "macro_f1": macro_f1(predictions, examples.labels, len(self._splits.labels)),
        }
        if part == "test":
            metrics |= calibration_metrics(logits, examples.labels, self._temperature)
        return metrics

    def calibrate(self, model: nn.Module) -> None:
        """Fits the temperature."""
        valid = self._splits.valid
        self._temperature = fit_temperature(self._evaluation_logits(model, valid), valid.labels)

    def _evaluation_logits(self, model: nn.Module, examples: LabeledImages) -> NDArray[np.float32]:
        """(N, C)."""
        return image_logits(model, torch.from_numpy(normalize(examples.images, self._preprocessing)))

    def measure_baseline(self) -> Baseline:
        """Logistic regression on the pixels."""
        return pixel_regression_baseline(self._splits.train, self._splits.test)

    def evaluation_data(self) -> EvaluationData:
        """The test images with their labels."""
        return EvaluationData(images=(self._splits.test.images, self._splits.test.labels))
