"""Images without labels: an encoder learns from views of them, and is measured by the labels of its neighbours.

B images, V views of an image, N images of a part, I image size and J size of a local view in pixels, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_training.batches import Batch, even_batches
from headway_training.checkpoint import Baseline
from headway_training.data.examples import LabeledImages, Splits
from headway_training.data.images import normalize
from headway_training.data.views import random_colours, random_crops
from headway_training.errors import RecipeError
from headway_training.kinds import PHOTOGRAPHS, ROWS, augmentation, register
from headway_training.metrics import accuracy, nearest_neighbour_labels
from headway_training.models import DINO, DINOConfig, ImageEmbedder, Model
from headway_training.models.dino import NUM_GLOBAL_VIEWS, cosine_momentum
from headway_training.recipes import Recipe
from headway_training.tasks.base import IGNORED, EvaluationData, ImageFolderTask, Metrics, Part, TrainingBatch

_EVALUATION_ROWS = 250


@register
class DistillationTask(ImageFolderTask):
    """Views of images; labels are read when a model is measured, and by nothing that trains."""

    name = "image_embedding"
    unit = "images"
    metric = "knn_accuracy"
    higher_is_better = True
    settings = (ROWS, "preprocessing", "distillation", "attention", *augmentation("flip"), *PHOTOGRAPHS)
    sections = ("preprocessing",)
    described = ("image_preprocessing",)
    sentence = "Turns an image into a vector"

    def __init__(self, recipe: Recipe, splits: Splits[LabeledImages]) -> None:
        assert recipe.preprocessing is not None
        super().__init__(recipe, splits)
        self._settings = recipe.distillation
        self._preprocessing = recipe.preprocessing
        self._images = torch.from_numpy(np.ascontiguousarray(splits.train.images.transpose(0, 3, 1, 2)))
        size, patch_size = self._settings.local_size, int(recipe.model["patch_size"])
        if size % patch_size or size > self._preprocessing.height:
            raise RecipeError(
                f"distillation.local_size is {size}; it must be a multiple of model.patch_size ({patch_size}), and at "
                f"most preprocessing.height ({self._preprocessing.height})"
            )
        if recipe.model.get("positions", "learned") not in ("learned", "none"):
            raise RecipeError(
                f"model.positions is {recipe.model['positions']!r}; positions of views of two sizes are interpolated, "
                "which needs 'learned'"
            )

    @property
    def num_train_examples(self) -> int:
        """Images of the training part."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """The size that images are brought to."""
        return {"image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Preprocessing."""
        return {"image_preprocessing": self._preprocessing}

    def wrap(self, model: Model) -> Model:
        """A student and a teacher, who both begin as the model."""
        assert isinstance(model, ImageEmbedder)
        settings = self._settings
        return DINO(
            model,
            DINOConfig(
                d_hidden=settings.d_hidden,
                d_bottleneck=settings.d_bottleneck,
                num_prototypes=settings.num_prototypes,
                student_temperature=settings.student_temperature,
                teacher_temperature=settings.teacher_temperature,
                centre_momentum=settings.centre_momentum,
            ),
        )

    def finished(self, model: nn.Module) -> nn.Module:
        """The teacher's encoder."""
        assert isinstance(model, DINO)
        return model.embedder

    def before_step(self, model: nn.Module, step: int, num_steps: int) -> None:
        """Sets the teacher's temperature, and whether the last layer learns."""
        assert isinstance(model, DINO)
        settings = self._settings
        warmth = min(1.0, step / max(1.0, settings.temperature_warmup_fraction * num_steps))
        start, end = settings.first_teacher_temperature, settings.teacher_temperature
        model.begin_step(
            temperature=start + (end - start) * warmth,
            learns_prototypes=step >= round(settings.frozen_fraction * num_steps),
        )

    def after_step(self, model: nn.Module, step: int, num_steps: int) -> None:
        """Moves teacher and centre."""
        assert isinstance(model, DINO)
        model.end_step(momentum=cosine_momentum(self._settings.momentum, step, num_steps))

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of images in random order."""
        return even_batches(len(self._images), self._recipe.optimization.batch_size, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Global views (B, 2, 3, I, I), local ones (B, V - 2, 3, J, J), and targets (B): the images' numbers."""
        settings, least = self._settings, self._recipe.augmentation.least_crop_area
        images = self._images[torch.from_numpy(batch)]
        size, num_local = self._preprocessing.height, settings.num_local_views
        small = (settings.least_local_area, least)
        tensors = {
            "global_views": self._cut(images, NUM_GLOBAL_VIEWS, size, areas=(least, 1.0), generator=generator),
            "local_views": self._cut(images, num_local, settings.local_size, areas=small, generator=generator),
            "targets": torch.from_numpy(batch),
        }
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """The loss of each image, (B): what is predicted are other views, not classes."""
        losses: Tensor = model(tensors["global_views"], tensors["local_views"], tensors["targets"] != IGNORED)
        return losses

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """The cross-entropy of student and teacher, summed over images."""
        return self.logits(model, tensors).masked_fill(tensors["targets"] == IGNORED, 0.0).sum()

    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """k-NN accuracy in percent by the teacher's embeddings, and what tells a collapse (`DINO.spread`)."""
        assert isinstance(model, DINO)
        measured: LabeledImages = getattr(self._splits, part)
        found = self._embed(model.embedder, measured)
        entropy, information = model.spread(torch.from_numpy(found))
        labels = nearest_neighbour_labels(self._embed(model.embedder, self._splits.train), self._train_labels, found)
        return {
            "knn_accuracy": accuracy(labels, measured.labels),
            "teacher_entropy": entropy,
            "teacher_information": information,
        }

    def measure_baseline(self) -> Baseline:
        """The same neighbours, by the images' pixels."""
        train, test = (
            normalize(images.images, self._preprocessing).reshape(len(images), -1)
            for images in (self._splits.train, self._splits.test)
        )
        labels = nearest_neighbour_labels(train, self._train_labels, test)
        return Baseline(name="k-NN of pixels", metric=self.metric, value=accuracy(labels, self._splits.test.labels))

    def evaluation_data(self) -> EvaluationData:
        """The test images and their labels, by index."""
        return EvaluationData(images=(self._splits.test.images, self._splits.test.labels))

    @property
    def _train_labels(self) -> NDArray[np.int64]:
        labels: NDArray[np.int64] = self._splits.train.labels
        return labels

    def _cut(
        self, images: Tensor, count: int, size: int, *, areas: tuple[float, float], generator: torch.Generator
    ) -> Tensor:
        """Cuts views out of each image, changes their colours, and normalises them: (B, `count`, 3, `size`, `size`)."""
        num_images, images = len(images), images.repeat_interleave(count, dim=0)
        settings, image = self._recipe.augmentation, self._preprocessing
        mirrored = torch.rand(len(images), generator=generator) < (0.5 if settings.flip else 0.0)
        views = random_crops(
            images, size, least_area=areas[0], most_area=areas[1], mirrored=mirrored, generator=generator
        )
        views = random_colours(views, settings.colour_change, grey=settings.grey, generator=generator)
        mean, std = (torch.tensor(values)[:, None, None] for values in (image.mean, image.std))
        return ((views - mean) / std).reshape(num_images, count, 3, size, size)

    @torch.inference_mode()
    def _embed(self, embedder: ImageEmbedder, images: LabeledImages) -> NDArray[np.float32]:
        """(N, D)."""
        device = next(embedder.buffers()).device
        parts = [
            embedder.pooled(torch.from_numpy(normalize(rows, self._preprocessing)).to(device)).float().cpu()
            for rows in np.array_split(images.images, max(1, len(images) // _EVALUATION_ROWS))
        ]
        vectors: NDArray[np.float32] = torch.cat(parts).numpy()
        return vectors
