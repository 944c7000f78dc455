"""Classification of texts, pairs of texts and images, with one label or several.

B rows, N examples, T tokens, H height, W width, C labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.baselines import multi_label_bayes_baseline, naive_bayes_baseline, pixel_regression_baseline
from headway_training.batches import Batch, bucketed_batches, count_bucketed, even_batches
from headway_training.calibration import (
    DEFAULT_THRESHOLD,
    calibration_metrics,
    choose_thresholds,
    fit_temperature,
    to_probabilities,
)
from headway_training.checkpoint import Baseline, Classification, SpecialTokens
from headway_training.data.examples import LabeledImages, LabeledTexts, MultiLabeledTexts, Splits
from headway_training.data.images import augment, normalize
from headway_training.data.public import Dataset
from headway_training.data.sources import OwnData
from headway_training.data.texts import read_labeled_texts, read_multi_labeled_texts
from headway_training.evaluation import image_logits, pad, text_logits, token_mask
from headway_training.kinds import ROWS, SMOOTHING, TOKENS, FileSettings, FolderKind, Labels, augmentation, register
from headway_training.metrics import accuracy, macro_f1, multi_label_f1
from headway_training.recipes import Recipe
from headway_training.tasks.base import (
    IGNORED,
    EvaluationData,
    Frame,
    ImageFolderTask,
    Metrics,
    Part,
    Task,
    TextTask,
    TrainingBatch,
    check_head,
    hide_tokens,
)
from headway_training.tokenizers import encode_pairs, encode_texts

if TYPE_CHECKING:
    from headway_training.huggingface import ModelFolder


class ClassificationTask(Task):
    """One label for each example; the temperature of its probabilities is fitted at the end."""

    metric = "accuracy"
    higher_is_better = True
    _temperature = 1.0

    @abstractmethod
    def _logits_of(self, model: nn.Module, examples: Any) -> NDArray[np.float32]:
        """Runs the model on a part of the data: (N, C)."""

    @property
    def num_train_examples(self) -> int:
        """Examples of the training part."""
        return len(self._splits.train)

    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Accuracy and macro F1, in percent; of test data, the expected calibration error too."""
        examples = self._splits.valid if part == "valid" else self._splits.test
        logits = self._logits_of(model, examples)
        predictions = logits.argmax(axis=-1)
        metrics: Metrics = {
            "accuracy": accuracy(predictions, examples.labels),
            "macro_f1": macro_f1(predictions, examples.labels),
        }
        if part == "test":
            metrics |= calibration_metrics(logits, examples.labels, self._temperature)
        return metrics

    def calibrate(self, model: nn.Module) -> None:
        """Fits the temperature."""
        valid = self._splits.valid
        self._temperature = fit_temperature(self._logits_of(model, valid), valid.labels)

    def _classification(self) -> Classification:
        return Classification(temperature=self._temperature)


@register
class ImageClassificationTask(ImageFolderTask, ClassificationTask):
    """Images of one size, mirrored and shifted at random."""

    name = "image_classification"
    unit = "images"
    settings = (ROWS, SMOOTHING, "preprocessing", "attention", *augmentation("flip", "crop_padding"))
    sections = ("preprocessing",)
    described = ("labels", "image_preprocessing")
    sentence = "Tells which of {count} labels fits an image ({labels})"
    folder = FolderKind(
        auto_class="AutoModelForImageClassification",
        model_types="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        inputs=("pixel_values",),
        noun="an image model",
    )
    takes_modules = True

    @classmethod
    def make(cls, recipe: Recipe, splits: Splits[Any], folder: Path, source: ModelFolder | None) -> Task:
        """As `Task.make`; images must be prepared as a folder's processor does."""
        if source is not None and recipe.preprocessing is not None:
            source.check_images(splits.train.images, recipe.preprocessing)
        return super().make(recipe, splits, folder, source)

    def __init__(self, recipe: Recipe, splits: Splits[LabeledImages]) -> None:
        super().__init__(recipe, splits)
        assert recipe.preprocessing is not None
        self._preprocessing = recipe.preprocessing

    def model_fields(self) -> dict[str, int]:
        """The labels, and the size that images are brought to."""
        return {"num_classes": len(self._splits.labels), "image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Labels, preprocessing and the fitted temperature."""
        return {
            "labels": self._splits.labels,
            "classification": self._classification(),
            "image_preprocessing": self._preprocessing,
        }

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of images in random order."""
        return even_batches(len(self._splits.train), self._recipe.optimization.batch_size, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, H, W), changed at random, and targets (B)."""
        settings, train = self._recipe.augmentation, self._splits.train
        pixel_values = augment(
            torch.from_numpy(normalize(train.images[batch], self._preprocessing)),
            flip=settings.flip,
            crop_padding=settings.crop_padding,
            generator=generator,
        )
        tensors = {"pixel_values": pixel_values, "targets": torch.from_numpy(train.labels[batch])}
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, C)."""
        logits: Tensor = model(tensors["pixel_values"])
        return logits

    def measure_baseline(self) -> Baseline:
        """Logistic regression on the pixels."""
        return pixel_regression_baseline(self._splits.train, self._splits.test)

    def evaluation_data(self) -> EvaluationData:
        """The test images with their labels."""
        return EvaluationData(images=(self._splits.test.images, self._splits.test.labels))

    def _logits_of(self, model: nn.Module, examples: LabeledImages) -> NDArray[np.float32]:
        return image_logits(model, torch.from_numpy(normalize(examples.images, self._preprocessing)))


@register
class TextClassificationTask(TextTask, ClassificationTask):
    """Texts, or pairs of texts, in batches of similar length."""

    name = "text_classification"
    unit = "tokens"
    more_metrics = ("micro_f1",)
    settings = (TOKENS, SMOOTHING, "tokenizer", "classification", "attention", *augmentation("token_dropout"))
    described = ("labels", "special_tokens")
    own_data = "CSV with the columns `text` and `label`, and if texts come in pairs `text_pair`"
    sentence = "Tells which of {count} labels fits a text ({labels})"
    folder = FolderKind(
        auto_class="AutoModelForSequenceClassification",
        model_types="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        inputs=("input_ids", "attention_mask", "token_type_ids"),
        noun="a text model",
    )
    takes_modules = True

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        """The head is that of whole texts."""
        super().check_recipe(recipe)
        check_head(recipe, "sequence")

    @classmethod
    def unread(cls, recipe: Recipe, own: OwnData | None, dataset: Dataset | None) -> Iterator[tuple[str, str]]:
        """What the texts of a data set do not have."""
        if own is None:
            for name in ("multi_label", "label_separator", "text_pairs"):
                yield (
                    f"classification.{name}",
                    "is not read by a data set, which has a text and a label; it is for --train",
                )
        if not recipe.classification.multi_label:
            yield "classification.label_separator", "is not read without classification.multi_label=true"

    @classmethod
    def read(
        cls, file: str, labels: Labels | None, settings: FileSettings
    ) -> tuple[LabeledTexts | MultiLabeledTexts, Labels]:
        """Reads texts with their labels."""
        classification = settings.classification
        pairs = classification.text_pairs
        if not classification.multi_label:
            return read_labeled_texts(Path(file), labels, text_pairs=pairs)
        return read_multi_labeled_texts(Path(file), labels, separator=classification.label_separator, text_pairs=pairs)

    @classmethod
    def variant(cls, train: LabeledTexts | MultiLabeledTexts) -> type[Task]:
        """Where several labels may apply each is a decision of its own."""
        return MultiLabelTask if isinstance(train, MultiLabeledTexts) else cls

    @classmethod
    def training_texts(cls, train: LabeledTexts | MultiLabeledTexts) -> list[str]:
        """The texts, and those that they are paired with."""
        return [*train.texts, *(train.text_pairs or ())]

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits[LabeledTexts] | Splits[MultiLabeledTexts],
        tokenizer: Tokenizer,
        special: SpecialTokens | None = None,
    ) -> None:
        super().__init__(recipe, splits)
        self.tokenizer = tokenizer
        self._special = Frame(tokenizer, special, recipe.augmentation.token_dropout)
        self._max_length = int(recipe.model["max_length"])
        self._has_types = int(recipe.model.get("num_token_types", 0)) > 1
        self._ids, self._types = self._encode(splits.train)
        self._lengths = [len(row) for row in self._ids]

    def model_fields(self) -> dict[str, int]:
        """The vocabulary and the labels."""
        return {"vocabulary_size": self.tokenizer.get_vocab_size(), "num_classes": len(self._splits.labels)}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens, labels, and how inputs are read and answered."""
        return {
            "special_tokens": self._special.tokens,
            "labels": self._splits.labels,
            "classification": self._classification(),
            "text_pairs": self._recipe.classification.text_pairs,
        }

    def num_batches(self, seed: int, epoch: int) -> int:
        """Counted anew for each epoch, whose lengths come together otherwise."""
        return count_bucketed(self._lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of texts of similar length."""
        return bucketed_batches(self._lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Ids, some of them hidden, and their mask (B, T), types where the model has them (B, T), and targets."""
        rows = [self._ids[i] for i in batch]
        mask, rate = token_mask(rows), self._recipe.augmentation.token_dropout
        tensors = {
            "input_ids": hide_tokens(pad(rows, self._special.pad), mask, rate, self._special.unk, generator),
            "attention_mask": mask,
            "targets": self._targets(self._splits.train, batch),
        }
        if self._types is not None:
            tensors["token_type_ids"] = pad([self._types[i] for i in batch], 0)
        return TrainingBatch(tensors=tensors, num_units=int(mask.sum()))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, C)."""
        types = (tensors["token_type_ids"],) if "token_type_ids" in tensors else ()
        logits: Tensor = model(tensors["input_ids"], tensors["attention_mask"], *types)
        return logits

    def measure_baseline(self) -> Baseline:
        """Naive Bayes on word counts."""
        return naive_bayes_baseline(self._splits.train, self._splits.test)

    def evaluation_data(self) -> EvaluationData:
        """The test texts with their labels, by index."""
        test = self._splits.test
        pairs = test.text_pairs or [""] * len(test)
        return EvaluationData(
            texts=[
                {"text": text, **({"text_pair": pair} if pair else {}), **self._label(label)}
                for text, pair, label in zip(test.texts, pairs, test.labels, strict=True)
            ]
        )

    def _encode(self, examples: Any) -> tuple[list[list[int]], list[list[int]] | None]:
        """The ids of each input; and the types of its tokens, if texts come in pairs and the model has types."""
        if examples.text_pairs is None:
            return encode_texts(self.tokenizer, examples.texts, self._max_length), None
        ids, types = encode_pairs(self.tokenizer, examples.texts, examples.text_pairs, self._max_length)
        return ids, types if self._has_types else None

    def _logits_of(self, model: nn.Module, examples: Any) -> NDArray[np.float32]:
        ids, types = self._encode(examples)
        return np.stack(text_logits(model, ids, self._special.pad, types))

    def _targets(self, examples: Any, batch: Batch) -> Tensor:
        """What the loss compares with, rows first: (B)."""
        return torch.tensor([examples.labels[i] for i in batch])

    def _label(self, label: Any) -> dict[str, Any]:
        """The label as the evaluation data has it."""
        return {"label": label}


class MultiLabelTask(TextClassificationTask):
    """Texts with any number of labels each, each label a decision of its own.

    The best weights are selected by micro F1 with every threshold at 0.5; thresholds are chosen for those weights.
    """

    metric = "micro_f1"
    _thresholds: tuple[float, ...] | None = None

    def loss_of_logits(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Binary cross-entropy of logits, (B, C), summed over rows and labels; targets (B, C)."""
        smoothed = targets.float() * (1 - label_smoothing) + label_smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none")
        return losses.masked_fill(targets == IGNORED, 0.0).sum()

    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Micro and macro F1, in percent; of test data, the expected calibration error too."""
        examples = self._splits.valid if part == "valid" else self._splits.test
        logits, truth = self._logits_of(model, examples), self._one_hot(examples.labels)
        probabilities = to_probabilities(logits / self._temperature, multi_label=True)
        micro, macro = multi_label_f1(probabilities >= np.asarray(self._current_thresholds()), truth)
        metrics: Metrics = {"micro_f1": micro, "macro_f1": macro}
        if part == "test":
            metrics |= calibration_metrics(logits, truth, self._temperature, multi_label=True)
        return metrics

    def calibrate(self, model: nn.Module) -> None:
        """Fits the temperature, and chooses the thresholds."""
        logits, truth = self._logits_of(model, self._splits.valid), self._one_hot(self._splits.valid.labels)
        self._temperature = fit_temperature(logits, truth, multi_label=True)
        self._thresholds = choose_thresholds(to_probabilities(logits / self._temperature, multi_label=True), truth)

    def measure_baseline(self) -> Baseline:
        """Naive Bayes on word counts, one for each label."""
        return multi_label_bayes_baseline(self._splits.train, self._splits.test, len(self._splits.labels))

    def _classification(self) -> Classification:
        return Classification(kind="multi_label", temperature=self._temperature, thresholds=self._current_thresholds())

    def _current_thresholds(self) -> tuple[float, ...]:
        return self._thresholds or (DEFAULT_THRESHOLD,) * len(self._splits.labels)

    def _targets(self, examples: Any, batch: Batch) -> Tensor:
        """(B, C), 1 where a label applies."""
        return torch.from_numpy(self._one_hot([examples.labels[i] for i in batch]))

    def _one_hot(self, labels: list[tuple[int, ...]]) -> NDArray[np.int64]:
        """1 where a label applies and 0 elsewhere: (N, C)."""
        matrix = np.zeros((len(labels), len(self._splits.labels)), np.int64)
        for row, several in enumerate(labels):
            matrix[row, list(several)] = 1
        return matrix

    def _label(self, label: Any) -> dict[str, Any]:
        return {"labels": list(label)}
