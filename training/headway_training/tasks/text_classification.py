"""Text classification: tell the class of a text, or of a pair of texts.

B rows, N examples, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_training.baselines import naive_bayes_baseline
from headway_training.batches import Batch, bucketed_batches
from headway_training.calibration import calibration_metrics, fit_temperature
from headway_training.checkpoint import Baseline, Classification
from headway_training.data.examples import LabeledTexts, MultiLabeledTexts, Splits
from headway_training.evaluation import pad, text_logits, token_mask
from headway_training.metrics import accuracy, macro_f1
from headway_training.recipes.settings import Recipe
from headway_training.tasks.base import EvaluationData, Metrics, Task, TrainingBatch
from headway_training.tokenizers import encode_pairs, encode_texts, special_tokens

Texts = TypeVar("Texts", LabeledTexts, MultiLabeledTexts)


class TextTask(Task, Generic[Texts]):
    """Texts in batches of similar length: what single and several labels have in common."""

    unit = "tokens"
    higher_is_better = True

    def __init__(self, recipe: Recipe, splits: Splits[Texts], tokenizer: Tokenizer) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self._recipe = recipe
        self._splits: Splits[Texts] = splits
        self._special = special_tokens(tokenizer)
        assert self._special.pad is not None
        assert self._special.unk is not None
        self._pad, self._unk = self._special.pad, self._special.unk
        self._max_length = int(recipe.model["max_length"])
        self._has_types = int(recipe.model.get("num_token_types", 0)) > 1
        self._temperature = 1.0
        self._ids, self._types = self._encode(splits.train)
        self._lengths = [len(row) for row in self._ids]

    @property
    def num_train_examples(self) -> int:
        """Texts of the training part."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """The vocabulary and the classes."""
        return {"vocabulary_size": self.tokenizer.get_vocab_size(), "num_classes": len(self._splits.labels)}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens, labels, and how inputs are read and answered."""
        return {
            "special_tokens": self._special,
            "labels": self._splits.labels,
            "classification": self._classification(),
            "text_pairs": self._recipe.classification.text_pairs,
        }

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of texts of similar length."""
        return bucketed_batches(self._lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Ids and their mask (B, T), of which some tokens are hidden, types where there are any, and targets."""
        rows = [self._ids[i] for i in batch]
        input_ids, mask = pad(rows, self._pad), token_mask(rows)
        rate = self._recipe.augmentation.token_dropout
        if rate:
            hidden = (torch.rand(input_ids.shape, generator=generator) < rate) & mask.bool()
            input_ids = torch.where(hidden, self._unk, input_ids)
        tensors = {"input_ids": input_ids, "attention_mask": mask, "targets": self._targets(self._splits.train, batch)}
        if self._types is not None:
            tensors["token_type_ids"] = pad([self._types[i] for i in batch], 0)
        return TrainingBatch(tensors=tensors, num_units=int(mask.sum()))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, C)."""
        types = (tensors["token_type_ids"],) if "token_type_ids" in tensors else ()
        logits: Tensor = model(tensors["input_ids"], tensors["attention_mask"], *types)
        return logits

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

    def _encode(self, examples: Texts) -> tuple[list[list[int]], list[list[int]] | None]:
        """The ids of each input; and the types of its tokens, where texts come in pairs and the model tells them."""
        if examples.text_pairs is None:
            return encode_texts(self.tokenizer, examples.texts, self._max_length), None
        ids, types = encode_pairs(self.tokenizer, examples.texts, examples.text_pairs, self._max_length)
        return ids, types if self._has_types else None

    def _evaluation_logits(self, model: nn.Module, examples: Texts) -> NDArray[np.float32]:
        """(N, C)."""
        ids, types = self._encode(examples)
        return text_logits(model, ids, self._pad, types)

    def _classification(self) -> Classification:
        return Classification(temperature=self._temperature)

    def _targets(self, examples: Texts, batch: Batch) -> Tensor:
        """What the loss compares with, rows first."""
        raise NotImplementedError

    def _label(self, label: Any) -> dict[str, Any]:
        """The part of an evaluation's object that says what is right."""
        raise NotImplementedError


class TextClassificationTask(TextTask[LabeledTexts]):
    """Texts with one label each."""

    metric = "accuracy"

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

    def measure_baseline(self) -> Baseline:
        """Naive Bayes on word counts."""
        return naive_bayes_baseline(self._splits.train, self._splits.test)

    def _targets(self, examples: LabeledTexts, batch: Batch) -> Tensor:
        """(B)."""
        return torch.tensor([examples.labels[i] for i in batch])

    def _label(self, label: Any) -> dict[str, Any]:
        return {"label": label}
