"""Text classification: tell the class of a text.

B rows, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_training.baselines import naive_bayes_baseline
from headway_training.batches import Batch, bucketed_batches
from headway_training.checkpoint import Baseline
from headway_training.data.examples import LabeledTexts, Splits
from headway_training.evaluation import classify_texts, pad, token_mask
from headway_training.metrics import accuracy, macro_f1
from headway_training.recipes.settings import Recipe
from headway_training.tasks.base import EvaluationData, Metrics, Task, TrainingBatch
from headway_training.tokenizers import encode_texts, special_tokens


class TextClassificationTask(Task):
    """Texts in batches of similar length."""

    unit = "tokens"
    metric = "accuracy"
    higher_is_better = True

    def __init__(self, recipe: Recipe, splits: Splits[LabeledTexts], tokenizer: Tokenizer) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self._recipe = recipe
        self._splits = splits
        self._special = special_tokens(tokenizer)
        assert self._special.pad is not None
        assert self._special.unk is not None
        self._pad, self._unk = self._special.pad, self._special.unk
        self._max_length = int(recipe.model["max_length"])
        self._ids = encode_texts(tokenizer, splits.train.texts, self._max_length)
        self._lengths = [len(row) for row in self._ids]

    @property
    def num_train_examples(self) -> int:
        """Texts of the training part."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """The vocabulary and the classes."""
        return {"vocabulary_size": self.tokenizer.get_vocab_size(), "num_classes": len(self._splits.labels)}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens and labels."""
        return {"special_tokens": self._special, "labels": self._splits.labels}

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of texts of similar length."""
        return bucketed_batches(self._lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Ids and their mask (B, T), of which some tokens are hidden, and targets (B)."""
        rows = [self._ids[i] for i in batch]
        input_ids, mask = pad(rows, self._pad), token_mask(rows)
        rate = self._recipe.augmentation.token_dropout
        if rate:
            hidden = (torch.rand(input_ids.shape, generator=generator) < rate) & mask.bool()
            input_ids = torch.where(hidden, self._unk, input_ids)
        targets = torch.tensor([self._splits.train.labels[i] for i in batch])
        tensors = {"input_ids": input_ids, "attention_mask": mask, "targets": targets}
        return TrainingBatch(tensors=tensors, num_units=int(mask.sum()))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, C)."""
        logits: Tensor = model(tensors["input_ids"], tensors["attention_mask"])
        return logits

    def evaluate(self, model: nn.Module, part: Literal["valid", "test"]) -> Metrics:
        """Accuracy and macro F1, in percent."""
        examples = self._splits.valid if part == "valid" else self._splits.test
        ids = encode_texts(self.tokenizer, examples.texts, self._max_length)
        predictions = classify_texts(model, ids, self._pad)
        return {
            "accuracy": accuracy(predictions, examples.labels),
            "macro_f1": macro_f1(predictions, examples.labels, len(self._splits.labels)),
        }

    def measure_baseline(self) -> Baseline:
        """Naive Bayes on word counts."""
        return naive_bayes_baseline(self._splits.train, self._splits.test)

    def evaluation_data(self) -> EvaluationData:
        """The test texts with the indices of their labels."""
        test = self._splits.test
        pairs = zip(test.texts, test.labels, strict=True)
        return EvaluationData(texts=[{"text": text, "label": label} for text, label in pairs])
