"""Finding objects: boxes with labels, on pictures composed of emoji.

B rows, I image size, P most objects of a picture of a batch, Q cells, C labels, N objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_training.batches import Batch
from headway_training.data.examples import Splits
from headway_training.data.images import normalize
from headway_training.data.objects import Boxes, ComposedPictures, boxes_of
from headway_training.data.views import random_coarseness, random_colours
from headway_training.kinds import ROWS, augmentation, register
from headway_training.metrics import FoundObjects, box_iou, mean_average_precision
from headway_training.models.detection import detection_loss, logits_of_objects
from headway_training.recipes import Recipe
from headway_training.tasks.base import IGNORED, EvaluationData, Metrics, Part, Task, TrainingBatch

PASSES = 40
"""Pictures of an epoch in which each drawing is the first."""
MOST_OBJECTS = 100
"""Objects of a picture that are measured, those of the highest scores."""
MOST_CANDIDATES = 300
"""Pairs of a cell and a label that may be objects, those of the highest scores."""
OVERLAP = 0.5
"""Intersection over union of two objects of a label from which the one of the lower score is left out."""
_SEEDS: Mapping[Part, int] = {"valid": 11, "test": 12}
_MEASURED: Mapping[Part, int] = {"valid": 200, "test": 600}
"""Pictures, at most."""
_MEASURED_PASSES = 7
"""Pictures that are measured in which each drawing is the first, at most."""
_EVALUATION_IMAGES = 32


@register
class ObjectDetectionTask(Task):
    """Batches of composed pictures in random order, each composed anew."""

    name = "object_detection"
    unit = "images"
    metric = "mean_average_precision"
    higher_is_better = True
    settings = (ROWS, "preprocessing", *augmentation("colour_change", "grey", "coarse"))
    sections = ("preprocessing",)
    described = ("labels", "image_preprocessing")

    def __init__(self, recipe: Recipe, splits: Splits[Any]) -> None:
        assert recipe.preprocessing is not None
        super().__init__(recipe, splits)
        self._preprocessing = recipe.preprocessing
        self._size = recipe.preprocessing.height
        self._train: ComposedPictures = splits.train
        self._composer = self._train.composer()
        self._measured: dict[Part, tuple[NDArray[np.uint8], list[Boxes]]] = {}

    @property
    def num_train_examples(self) -> int:
        """Drawings."""
        return len(self._train)

    def model_fields(self) -> dict[str, int]:
        """The labels, and the size that images are brought to."""
        return {"num_classes": len(self._splits.labels), "image_size": self._size}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Labels and preprocessing."""
        return {"labels": self._splits.labels, "image_preprocessing": self._preprocessing}

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of the first drawings of pictures, in random order."""
        order = np.random.default_rng((seed, epoch)).permutation(np.tile(np.arange(len(self._train)), PASSES))
        size = self._recipe.optimization.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, I, I), boxes (B, P, 4), and their labels as targets, (B, P), ignored where there is none."""
        random = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        images = np.empty((len(batch), self._size, self._size, 3), np.uint8)
        found = []
        for row, drawing in enumerate(batch):
            scene = self._composer.compose(int(drawing), self._size, random)
            images[row] = scene.image
            found.append(boxes_of(scene, self._train.drawings.emoji))
        most = max(1, *(len(one.labels) for one in found))
        boxes = np.zeros((len(batch), most, 4), np.float32)
        targets = np.full((len(batch), most), IGNORED, np.int64)
        for row, one in enumerate(found):
            boxes[row, : len(one.labels)], targets[row, : len(one.labels)] = one.boxes, one.labels
        if (targets == IGNORED).all():
            boxes[0, 0], targets[0, 0] = (0.0, 0.0, 1.0, 1.0), 0  # a step needs a target
        settings = self._recipe.augmentation
        values = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        values = random_colours(values, settings.colour_change, grey=settings.grey, generator=generator)
        values = random_coarseness(values, settings.coarse, least_size=self._size // 2, generator=generator)
        mean, std = (torch.tensor(one)[:, None, None] for one in (self._preprocessing.mean, self._preprocessing.std))
        tensors = {
            "pixel_values": (values - mean) / std,
            "boxes": torch.from_numpy(boxes),
            "targets": torch.from_numpy(targets),
        }
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Of the cells in which objects have their centres, (B, P, C)."""
        return logits_of_objects(model(tensors["pixel_values"])["logits"], tensors["boxes"])

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """The loss summed over objects."""
        found, targets = model(tensors["pixel_values"]), tensors["targets"]
        is_there = targets != IGNORED
        labels = targets.masked_fill(~is_there, 0)
        return detection_loss(found["logits"].float(), found["boxes"].float(), tensors["boxes"], labels, is_there)

    def measured(self, part: Part) -> tuple[NDArray[np.uint8], list[Boxes]]:
        """Composed pictures of a part, (N, I, I, 3), and their objects; the same in every run."""
        if part not in self._measured:
            pictures: ComposedPictures = getattr(self._splits, part)
            composer, random = pictures.composer(), np.random.default_rng(_SEEDS[part])
            count = min(_MEASURED[part], _MEASURED_PASSES * len(pictures))
            scenes = [composer.compose(number % len(pictures), self._size, random) for number in range(count)]
            images = np.stack([scene.image for scene in scenes])
            self._measured[part] = images, [boxes_of(scene, pictures.drawings.emoji) for scene in scenes]
        return self._measured[part]

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Mean average precision in percent, at an intersection over union of one half."""
        images, truth = self.measured(part)
        device = next(model.parameters()).device
        found: list[FoundObjects] = []
        for start in range(0, len(images), _EVALUATION_IMAGES):
            pixels = normalize(images[start : start + _EVALUATION_IMAGES], self._preprocessing)
            outputs = model(torch.from_numpy(pixels).to(device))
            arrays = (outputs[name].float().cpu().numpy() for name in ("logits", "boxes"))
            found += [objects_of(*one) for one in zip(*arrays, strict=True)]
        return {self.metric: mean_average_precision(found, [(one.boxes, one.labels) for one in truth])}

    def measure_baseline(self) -> None:
        """None: no simple method finds objects of many labels."""

    def evaluation_data(self) -> EvaluationData:
        """Test pictures, and their objects with the picture of each."""
        images, truth = self.measured("test")
        return EvaluationData(
            arrays={
                "images": images,
                "image_index": np.repeat(np.arange(len(truth)), [len(one.labels) for one in truth]),
                "boxes": np.concatenate([one.boxes for one in truth]),
                "labels": np.concatenate([one.labels for one in truth]),
            }
        )


def objects_of(logits: NDArray[np.float32], boxes: NDArray[np.float32]) -> FoundObjects:
    """Reads the objects of an image as a server does.

    Args:
        logits: (Q, C).
        boxes: (Q, 4): centre, width and height.
    """
    scores = (1 / (1 + np.exp(-logits.ravel()))).astype(np.float32)
    order = np.argsort(-scores, kind="stable")[:MOST_CANDIDATES]
    places, labels = np.divmod(order, logits.shape[1])
    corners = np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=-1)[places]
    covers = (box_iou(corners, corners) > OVERLAP) & (labels[:, None] == labels)
    is_kept = np.ones(len(order), bool)
    for row in range(len(order)):
        if is_kept[row]:
            is_kept[row + 1 :] &= ~covers[row, row + 1 :]
    kept = np.flatnonzero(is_kept)[:MOST_OBJECTS]
    return FoundObjects(scores=scores[order][kept], labels=labels[kept], boxes=corners[kept])
