"""Drawing images: an autoencoder, which is trained first, and a denoiser of its latents (models/diffusion.py).

B images of a batch, N images of a part, C channels and S side of a latent, I image size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.batches import Batch, even_batches
from headway_training.checkpoint import Checkpoint
from headway_training.data.captions import read_caption_table, read_own_photographs
from headway_training.data.examples import LabeledImages, Splits, UnlabeledImages
from headway_training.data.images import augment, find_unlabeled_images, normalize, read_images, resize_and_crop
from headway_training.data.pictures import CaptionedPhotographs, DescribedImages
from headway_training.data.public import Dataset
from headway_training.data.sources import OwnData
from headway_training.errors import RecipeError
from headway_training.evaluation import pad, token_mask
from headway_training.kinds import ROWS, FileSettings, Labels, augmentation, register
from headway_training.models import Autoencoder, LatentDiffusion, Model
from headway_training.models.diffusion import mix
from headway_training.recipes import Recipe, TokenizerSettings
from headway_training.tasks.base import (
    IGNORED,
    CaptionedImagesTask,
    EvaluationData,
    ImageFolderTask,
    Metrics,
    Part,
    SpecialIds,
    Task,
    TextTask,
    TrainingBatch,
)
from headway_training.tokenizers import encode_texts

DIVERGENCE_WEIGHT = 1e-3
"""Of the divergence of latents from the standard normal, in nats a number, beside the squared error of pixels of 0 to 1
(Rombach et al. 2022, appendix G: light, so that latents keep what an image shows)."""
CONDITION_DROPOUT = 0.1
"""Share of the images whose label or text is hidden, for guidance without a classifier (Ho and Salimans 2022, 3.2)."""
MEASURED_IMAGES = 512
"""Images that a checkpoint carries to measure the denoiser again."""
_EVALUATION_BATCH = 250
_NOISE_SEED = 11
_DRAWS_LABELS = "is not read, as a model that draws labels reads no texts"


Described = DescribedImages | CaptionedPhotographs
"""Images with something that describes each in words."""
Images = TypeVar("Images", LabeledImages, UnlabeledImages, DescribedImages | CaptionedPhotographs)


class _ImageTask(ImageFolderTask, Generic[Images]):
    """Images with labels or descriptions in random order; the loss of a batch is the sum of its images' losses."""

    unit = "images"
    sections = ("preprocessing",)
    described = ("image_preprocessing",)
    data_of = ("image_generation", "image_classification")

    def __init__(self, recipe: Recipe, splits: Splits[Any]) -> None:
        assert recipe.preprocessing is not None
        self._preprocessing = recipe.preprocessing
        sized: dict[str, Any] = {part: self._resize(getattr(splits, part)) for part in ("train", "valid", "test")}
        super().__init__(recipe, replace(splits, **sized))

    def _resize(self, part: Images) -> Images:
        """Brings images to the recipe's size, where they have another."""
        size = (self._preprocessing.height, self._preprocessing.width)
        if part.images.shape[1:3] == size:
            return part
        images = [resize_and_crop(Image.fromarray(image), self._preprocessing) for image in part.images]
        return replace(part, images=np.stack(images))

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

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """The loss summed over images."""
        losses = self._losses(model, tensors)
        return losses.masked_fill(tensors["targets"] == IGNORED, 0.0).sum()

    def measure_baseline(self) -> None:
        """None: no simple method draws images."""

    @abstractmethod
    def _losses(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """The loss of each image, float32 (B)."""

    def _part(self, part: Part) -> Images:
        found: Images = self._splits.valid if part == "valid" else self._splits.test
        return found

    def _pixels(self, images: NDArray[np.uint8], generator: torch.Generator | None = None) -> Tensor:
        """(B, I, I, 3) -> normalised, (B, 3, I, I), and mirrored or shifted at random where a generator is given."""
        pixel_values = torch.from_numpy(normalize(images, self._preprocessing))
        if generator is None:
            return pixel_values
        settings = self._recipe.augmentation
        return augment(pixel_values, flip=settings.flip, crop_padding=settings.crop_padding, generator=generator)

    def _noise(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Of latents: (B, C, S, S), standard normal."""
        values = self._recipe.configuration
        side = self._preprocessing.height >> int(values.get("num_halvings", 2))
        return torch.randn(len(batch), int(values.get("d_latent", 4)), side, side, generator=generator)

    def _colours(self, pixel_values: Tensor) -> Tensor:
        """Normalised pixels, (B, 3, I, I), as RGB values of 0 to 1."""
        mean, std = (
            torch.tensor(one, device=pixel_values.device)[:, None, None]
            for one in (self._preprocessing.mean, self._preprocessing.std)
        )
        return pixel_values * std + mean


@register
class AutoencodingTask(_ImageTask[Images]):
    """Images to latents and back. At the end it is found what latents are scaled by."""

    name = "autoencoding"
    metric = "psnr"
    higher_is_better = True
    settings = (ROWS, "preprocessing", *augmentation("flip", "crop_padding"))
    own_data = f"a folder of images, in further folders or not; or {CaptionedImagesTask.own_data}"
    sentence = "Turns images into small latents and back"

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[UnlabeledImages, Labels]:
        """Reads all images of a folder, or those of a table, without what is noted of them."""
        return UnlabeledImages(images=read_images(_find_unlabeled(Path(file)), settings.preprocessing)), ()

    @classmethod
    def files_behind(cls, path: Path) -> list[Path]:
        """The images, and the table where there is one."""
        return [*([] if path.is_dir() else [path]), *_find_unlabeled(path)]

    def model_fields(self) -> dict[str, int]:
        """The size that images are brought to."""
        return {"image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Preprocessing."""
        return {"image_preprocessing": self._preprocessing}

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, I, I), changed at random, noise (B, C, S, S), and targets (B), all 0."""
        tensors = {
            "pixel_values": self._pixels(self._splits.train.images[batch], generator),
            "noise": self._noise(batch, generator),
            "targets": torch.zeros(len(batch), dtype=torch.int64),
        }
        return TrainingBatch(tensors=tensors, num_units=len(batch))

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
        """Test images."""
        return EvaluationData(arrays={"images": self._splits.test.images[:MEASURED_IMAGES]})


class _DenoisingTask(_ImageTask[Images]):
    """Velocities of noisy latents, whose autoencoder stays as it is."""

    name = "image_generation"
    metric = "velocity_error"
    higher_is_better = False
    settings = (ROWS, "tokenizer", "preprocessing", *augmentation("flip", "crop_padding"))
    starts_from = "draws latents of an autoencoder: train one first (task autoencoding)"
    own_data = f"{ImageFolderTask.own_data}; or {CaptionedImagesTask.own_data}"
    sentence = "Draws images of {count} labels ({labels})"
    has_own_tokens = True

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[Any, Labels]:
        """Reads images with labels, or with captions of any language."""
        if Path(file).is_dir():
            return super().read(file, labels, settings)
        return read_own_photographs(Path(file), settings.preprocessing), ()

    @classmethod
    def files_behind(cls, path: Path) -> list[Path]:
        """The images, and the table where there is one."""
        return super().files_behind(path) if path.is_dir() else CaptionedImagesTask.files_behind(path)

    @classmethod
    def describe_own(cls, file: str, labels: Labels, source: str) -> str:
        """Captions are no labels."""
        said = super().describe_own(file, labels, source)
        return said if labels else f"Draws images as a text says; trained on {source}."

    @classmethod
    def check_description(cls, checkpoint: Checkpoint) -> None:
        """It has labels or reads texts."""
        super().check_description(checkpoint)
        if bool(checkpoint.labels) == (checkpoint.special_tokens is not None):
            raise ValueError("image_generation draws labels, or texts and then has special_tokens: one of the two")

    @classmethod
    def unread(cls, recipe: Recipe, own: OwnData | None, dataset: Dataset | None) -> Iterator[tuple[str, str]]:
        """A model that draws labels has no tokenizer and no encoder of texts."""
        if (dataset is not None and dataset.has_texts) or (own is not None and not Path(own.train).is_dir()):
            return
        for name in TokenizerSettings.model_fields:
            yield f"tokenizer.{name}", _DRAWS_LABELS
        for name in ("max_length", "text_num_layers", "text_dropout"):
            yield f"model.{name}", _DRAWS_LABELS

    def wrap(self, model: Model) -> Model:
        """The model, of which the denoiser alone is trained."""
        assert isinstance(model, LatentDiffusion)
        for part in (model.encoder, model.decoder):
            part.requires_grad_(requires_grad=False)
        return model

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, I, I), what they show, times (B), noise (B, C, S, S), and targets (B), all 0.

        Times are logistic functions of normal numbers (Esser et al. 2024, section 3.1): those between image and noise,
        which are hardest, come more often.
        """
        count = len(batch)
        tensors = {
            "pixel_values": self._pixels(self._splits.train.images[batch], generator),
            **self._shown(batch, generator),
            "timestep": torch.randn(count, generator=generator).sigmoid(),
            "noise": self._noise(batch, generator),
            "targets": torch.zeros(count, dtype=torch.int64),
        }
        return TrainingBatch(tensors=tensors, num_units=count)

    def _losses(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Squared error of the velocity."""
        assert isinstance(model, LatentDiffusion)
        with torch.no_grad():
            latents = model.encode(tensors["pixel_values"]).float()
            mixed, velocity = mix(latents, tensors["noise"], tensors["timestep"])
        predicted = model.denoiser(mixed, tensors["timestep"], *self._condition(model, tensors))
        return F.mse_loss(predicted.float(), velocity, reduction="none").mean(dim=(1, 2, 3))

    @abstractmethod
    def _shown(self, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """What training images show, some of it hidden."""

    @abstractmethod
    def _measured(self, part: Images) -> dict[str, Tensor]:
        """What the images of a part show."""

    @abstractmethod
    def _condition(self, model: LatentDiffusion, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the denoiser reads of that."""

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Mean squared error of the velocity, with the times and noise of `measured_noise`."""
        assert isinstance(model, LatentDiffusion)
        examples, device, total = self._part(part), _device_of(model), 0.0
        shown = self._measured(examples)
        noise, times = measured_noise(len(examples), model.configuration.latent_shape)
        for start in range(0, len(examples), _EVALUATION_BATCH):
            rows = slice(start, start + _EVALUATION_BATCH)
            latents = model.encode(self._pixels(examples.images[rows]).to(device)).float()
            timestep = torch.from_numpy(times[rows]).to(device)
            mixed, velocity = mix(latents, torch.from_numpy(noise[rows]).to(device), timestep)
            condition = self._condition(model, {name: tensor[rows].to(device) for name, tensor in shown.items()})
            predicted = model.denoiser(mixed, timestep, *condition)
            total += float((predicted.float() - velocity).square().mean(dim=(1, 2, 3)).sum())
        return {"velocity_error": total / len(examples)}


@register
class DiffusionTask(_DenoisingTask[LabeledImages]):
    """Images of labels."""

    @classmethod
    def variant(cls, train: LabeledImages | Described) -> type[Task]:
        """What has no labels is drawn by texts."""
        return cls if isinstance(train, LabeledImages) else TextDiffusionTask

    def model_fields(self) -> dict[str, int]:
        """The labels, and the size that images are brought to."""
        return {"num_classes": len(self._splits.labels), "image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Labels and preprocessing."""
        return {"labels": self._splits.labels, "image_preprocessing": self._preprocessing}

    def _shown(self, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """Labels (B); that after the last where one is hidden."""
        hidden = torch.rand(len(batch), generator=generator) < CONDITION_DROPOUT
        labels = torch.from_numpy(self._splits.train.labels[batch])
        return {"label": torch.where(hidden, len(self._splits.labels), labels)}

    def _measured(self, part: LabeledImages) -> dict[str, Tensor]:
        return {"label": torch.from_numpy(part.labels)}

    def _condition(self, model: LatentDiffusion, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (tensors["label"],)

    def evaluation_data(self) -> EvaluationData:
        """Test images with their labels."""
        return EvaluationData(
            images=(self._splits.test.images[:MEASURED_IMAGES], self._splits.test.labels[:MEASURED_IMAGES])
        )


class TextDiffusionTask(TextTask, _DenoisingTask[Described]):
    """Images of texts, which an encoder reads that is trained with the denoiser."""

    @classmethod
    def training_texts(cls, train: Described) -> list[str]:
        """Names and search words, or captions."""
        return train.all_texts()

    def __init__(self, recipe: Recipe, splits: Splits[Any], tokenizer: Tokenizer) -> None:
        super().__init__(recipe, splits)
        if not recipe.model.get("max_length"):
            raise RecipeError(
                "model.max_length is 0: the recipe's model draws labels, and the data has texts; take a recipe whose "
                "model reads them, such as emoji-diffusion, or give --train a folder with a folder of images for each "
                "label"
            )
        self.tokenizer = tokenizer
        self._special = SpecialIds(tokenizer)
        self._max_length = int(recipe.model["max_length"])

    def model_fields(self) -> dict[str, int]:
        """The vocabulary, and the size that images are brought to."""
        return {"vocabulary_size": self.tokenizer.get_vocab_size(), "image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens and preprocessing."""
        return {"special_tokens": self._special.tokens, "image_preprocessing": self._preprocessing}

    def _shown(self, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """Ids and mask (B, T) of texts; the empty text where one is hidden."""
        random = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        train = self._splits.train
        return self._encode(
            ["" if random.random() < CONDITION_DROPOUT else train.describe(int(row), random) for row in batch]
        )

    def _measured(self, part: Described) -> dict[str, Tensor]:
        return self._encode(part.titles())

    def _condition(self, model: LatentDiffusion, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        assert model.text_encoder is not None, "the recipe's model reads texts"
        mask = tensors["attention_mask"]
        return model.text_encoder(tensors["input_ids"], mask), mask

    def _encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        rows = encode_texts(self.tokenizer, texts, self._max_length)
        return {"input_ids": pad(rows, self._special.pad), "attention_mask": token_mask(rows)}

    def evaluation_data(self) -> EvaluationData:
        """Test images with their texts."""
        test = self._splits.test
        return EvaluationData(
            arrays={"images": test.images[:MEASURED_IMAGES], "texts": np.array(test.titles()[:MEASURED_IMAGES])}
        )


def _find_unlabeled(path: Path) -> list[Path]:
    """The images of a folder, or those that a table of captions is about."""
    return find_unlabeled_images(path) if path.is_dir() else list(read_caption_table(path))


def measured_noise(count: int, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Noise (N, *shape) and times (N,) that velocities are measured with: always the same, times evenly over 0 to 1."""
    noise = np.random.default_rng(_NOISE_SEED).standard_normal((count, *shape), np.float32)
    order = np.random.default_rng(_NOISE_SEED).permutation(count)
    return noise, ((order + 0.5) / count).astype(np.float32)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
