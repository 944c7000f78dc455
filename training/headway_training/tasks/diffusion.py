"""Drawing images: an autoencoder, which is trained first, and a denoiser of its latents (models/diffusion.py).

B images of a batch, N images of a part, C channels and S side of a latent, I image size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.batches import Batch, even_batches
from headway_training.checkpoint import Metric
from headway_training.data.examples import LabeledImages, Splits
from headway_training.data.images import augment, normalize
from headway_training.models import Autoencoder, LatentDiffusion, Model
from headway_training.models.diffusion import mix
from headway_training.recipes import Recipe
from headway_training.tasks.base import IGNORED, EvaluationData, Metrics, Part, Task, TrainingBatch

DIVERGENCE_WEIGHT = 1e-3
"""Of the divergence of latents from the standard normal, in nats a number, beside the squared error of pixels of 0 to 1
(Rombach et al. 2022, appendix G: light, so that latents keep what an image shows)."""
LABEL_DROPOUT = 0.1
"""Share of the images whose label is hidden, for guidance without a classifier (Ho and Salimans 2022, section 3.2)."""
MEASURED_IMAGES = 512
"""Images that a checkpoint carries to measure the denoiser again."""
_EVALUATION_BATCH = 250
_NOISE_SEED = 11


class _ImageTask(Task):
    """Labelled images in random order; the loss of a batch is the sum of its images' losses."""

    unit = "images"

    def __init__(self, recipe: Recipe, splits: Splits[LabeledImages]) -> None:
        assert recipe.preprocessing is not None
        self._recipe = recipe
        self._splits = splits
        self._preprocessing = recipe.preprocessing

    @property
    def num_train_examples(self) -> int:
        """Images."""
        return len(self._splits.train)

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of images in random order."""
        return even_batches(len(self._splits.train), self._recipe.optimization.batch_size, seed=seed, epoch=epoch)

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """The loss of each image, (B): what is predicted are numbers, not classes."""
        return self._losses(model, tensors)

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:  # noqa: ARG002 (no classes are predicted)
        """The loss summed over images."""
        losses = self._losses(model, tensors)
        return losses.masked_fill(tensors["targets"] == IGNORED, 0.0).sum()

    def measure_baseline(self) -> None:
        """None: no simple method draws images."""

    @abstractmethod
    def _losses(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """The loss of each image, float32 (B)."""

    def _part(self, part: Part) -> LabeledImages:
        return self._splits.valid if part == "valid" else self._splits.test

    def _pixels(self, images: NDArray[np.uint8], generator: torch.Generator | None = None) -> Tensor:
        """(B, I, I, 3) -> normalised, (B, 3, I, I), and mirrored or shifted at random where a generator is given."""
        pixel_values = torch.from_numpy(normalize(images, self._preprocessing))
        if generator is None:
            return pixel_values
        settings = self._recipe.augmentation
        return augment(pixel_values, flip=settings.flip, crop_padding=settings.crop_padding, generator=generator)

    def _colours(self, pixel_values: Tensor) -> Tensor:
        """Normalised pixels, (B, 3, I, I), as RGB values of 0 to 1."""
        mean, std = (
            torch.tensor(one, device=pixel_values.device)[:, None, None]
            for one in (self._preprocessing.mean, self._preprocessing.std)
        )
        return pixel_values * std + mean


class AutoencodingTask(_ImageTask):
    """Images to latents and back. At the end it is found what latents are scaled by."""

    metric: ClassVar[Metric] = "psnr"
    higher_is_better = True

    def model_fields(self) -> dict[str, int]:
        """The size that images are brought to."""
        return {"image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Preprocessing."""
        return {"image_preprocessing": self._preprocessing}

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, I, I), changed at random, noise (B, C, S, S), and targets (B), all 0."""
        shape = self._latent_shape()
        tensors = {
            "pixel_values": self._pixels(self._splits.train.images[batch], generator),
            "noise": torch.randn(len(batch), *shape, generator=generator),
            "targets": torch.zeros(len(batch), dtype=torch.int64),
        }
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def _latent_shape(self) -> tuple[int, int, int]:
        values = self._recipe.configuration
        side = self._preprocessing.height >> int(values.get("num_halvings", 2))
        return int(values.get("d_latent", 4)), side, side

    def _losses(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Squared error and divergence."""
        pixel_values = tensors["pixel_values"]
        images, divergence = model(pixel_values, tensors["noise"])
        errors = (images.float() - self._colours(pixel_values)).square().mean(dim=(1, 2, 3))
        losses: Tensor = errors + DIVERGENCE_WEIGHT * divergence.float()
        return losses

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Peak signal-to-noise ratio in decibels, of the squared error over all pixels, from the latents' means."""
        assert isinstance(model, Autoencoder)
        images, total = self._part(part).images, 0.0
        for start in range(0, len(images), _EVALUATION_BATCH):
            pixel_values = self._pixels(images[start : start + _EVALUATION_BATCH]).to(_device_of(model))
            found = model.decode(model.encode(pixel_values)).float().clamp(0, 1)
            total += float((found - self._colours(pixel_values)).square().mean(dim=(1, 2, 3)).sum())
        return {"psnr": -10 * float(np.log10(max(total / len(images), 1e-10)))}

    @torch.inference_mode()
    def calibrate(self, model: nn.Module) -> None:
        """Finds the mean and deviation of the validation images' latents."""
        assert isinstance(model, Autoencoder)
        images = self._splits.valid.images
        parts = [images[start : start + _EVALUATION_BATCH] for start in range(0, len(images), _EVALUATION_BATCH)]
        device = _device_of(model)
        model.scale_latents(torch.cat([model.encoder(self._pixels(part).to(device))[0].float() for part in parts]))

    def evaluation_data(self) -> EvaluationData:
        """Test images with their labels."""
        return EvaluationData(
            images=(self._splits.test.images[:MEASURED_IMAGES], self._splits.test.labels[:MEASURED_IMAGES])
        )


class DiffusionTask(_ImageTask):
    """Velocities of noisy latents, whose autoencoder stays as it is."""

    metric: ClassVar[Metric] = "velocity_error"
    higher_is_better = False

    def model_fields(self) -> dict[str, int]:
        """The labels, and the size that images are brought to."""
        return {"num_classes": len(self._splits.labels), "image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Labels and preprocessing."""
        return {"labels": self._splits.labels, "image_preprocessing": self._preprocessing}

    def wrap(self, model: Model) -> Model:
        """The model, of which the denoiser alone is trained."""
        assert isinstance(model, LatentDiffusion)
        for part in (model.encoder, model.decoder):
            part.requires_grad_(requires_grad=False)
        return model

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, I, I), labels (B), some hidden, times (B) and seeds of noise (B); targets (B), all 0.

        Times are logistic functions of normal numbers (Esser et al. 2024, section 3.1): those between image and noise,
        which are hardest, come more often.
        """
        train, count = self._splits.train, len(batch)
        hidden = torch.rand(count, generator=generator) < LABEL_DROPOUT
        labels = torch.from_numpy(train.labels[batch])
        tensors = {
            "pixel_values": self._pixels(train.images[batch], generator),
            "label": torch.where(hidden, len(self._splits.labels), labels),
            "timestep": torch.randn(count, generator=generator).sigmoid(),
            "targets": torch.zeros(count, dtype=torch.int64),
        }
        return TrainingBatch(tensors=tensors, num_units=count)

    def _losses(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Squared error of the velocity, whose noise is drawn as dropout is: by the step's own random numbers."""
        assert isinstance(model, LatentDiffusion)
        with torch.no_grad():
            latents = model.encode(tensors["pixel_values"]).float()
            mixed, velocity = mix(latents, torch.randn_like(latents), tensors["timestep"])
        predicted = model.denoiser(mixed, tensors["timestep"], tensors["label"])
        return F.mse_loss(predicted.float(), velocity, reduction="none").mean(dim=(1, 2, 3))

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Mean squared error of the velocity, with the times and noise of `measured_noise`."""
        assert isinstance(model, LatentDiffusion)
        examples, device, total = self._part(part), _device_of(model), 0.0
        noise, times = measured_noise(len(examples), model.configuration.latent_shape)
        for start in range(0, len(examples), _EVALUATION_BATCH):
            rows = slice(start, start + _EVALUATION_BATCH)
            latents = model.encode(self._pixels(examples.images[rows]).to(device)).float()
            timestep = torch.from_numpy(times[rows]).to(device)
            mixed, velocity = mix(latents, torch.from_numpy(noise[rows]).to(device), timestep)
            predicted = model.denoiser(mixed, timestep, torch.from_numpy(examples.labels[rows]).to(device))
            total += float((predicted.float() - velocity).square().mean(dim=(1, 2, 3)).sum())
        return {"velocity_error": total / len(examples)}

    def evaluation_data(self) -> EvaluationData:
        """Test images with their labels."""
        return EvaluationData(
            images=(self._splits.test.images[:MEASURED_IMAGES], self._splits.test.labels[:MEASURED_IMAGES])
        )


def measured_noise(count: int, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Noise (N, *shape) and times (N,) that velocities are measured with: always the same, times evenly over 0 to 1."""
    noise = np.random.default_rng(_NOISE_SEED).standard_normal((count, *shape), np.float32)
    order = np.random.default_rng(_NOISE_SEED).permutation(count)
    return noise, ((order + 0.5) / count).astype(np.float32)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
