"""Masked language modelling: tell the tokens of a text that were hidden (Devlin et al. 2019), to begin a training with.

B rows, N texts, T tokens, P tokens to tell, V vocabulary.

Deviation from BERT: the unknown token stands for what is hidden, as tokenizers of this package have no other that text
never has; texts are trained on one by one, and not in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_training.batches import Batch, bucketed_batches, sorted_batches
from headway_training.checkpoint import Baseline
from headway_training.evaluation import EVALUATION_TOKENS, pad, token_mask
from headway_training.models import Encoder
from headway_training.recipes import Recipe
from headway_training.tasks.base import IGNORED, EvaluationData, Metrics, Task, TrainingBatch
from headway_training.tokenizers import encode_texts, special_tokens

_HIDDEN_SHARE = 0.8
_REPLACED_SHARE = 0.1
"""Of the tokens to tell, what becomes another token; the rest stays as it is (section 3.1)."""
_VALID_SEED = 20_261


class MaskedLanguageTask(Task):
    """Texts of which some tokens are hidden."""

    unit = "tokens"
    metric = "accuracy"
    higher_is_better = True

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, train: Sequence[str], valid: Sequence[str], max_length: int
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self._settings = recipe.pretraining
        self._batch_tokens = recipe.optimization.batch_tokens
        special = special_tokens(tokenizer)
        assert special.pad is not None
        assert special.unk is not None
        self._pad, self._unk = special.pad, special.unk
        self._special = torch.tensor(sorted({one for one in special.model_dump().values() if one is not None}))
        self._train, self._valid = (encode_texts(tokenizer, texts, max_length) for texts in (train, valid))

    @property
    def num_train_examples(self) -> int:
        """Texts."""
        return len(self._train)

    def model_fields(self) -> dict[str, Any]:
        """The vocabulary, and the head."""
        size = self.tokenizer.get_vocab_size()
        return {"vocabulary_size": size, "head": "masked_language", "num_classes": 0}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Nothing: what is learned goes on in another model."""
        return {}

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of texts of similar length."""
        return bucketed_batches([len(row) for row in self._train], self._batch_tokens, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Ids with hidden tokens and their mask, (B, T), and the hidden tokens as targets, (B, T)."""
        return self._hide([self._train[i] for i in batch], generator)

    def _hide(self, rows: Sequence[Sequence[int]], generator: torch.Generator) -> TrainingBatch:
        input_ids, mask = pad(rows, self._pad), token_mask(rows)  # (B, T)
        drawn, fate = (torch.rand(input_ids.shape, generator=generator) for _ in range(2))
        others = torch.randint(0, self.tokenizer.get_vocab_size(), input_ids.shape, generator=generator)
        told = (drawn < self._settings.mask_rate) & mask.bool() & ~torch.isin(input_ids, self._special)
        hidden = torch.where(fate < _HIDDEN_SHARE, self._unk, input_ids)
        hidden = torch.where((fate >= _HIDDEN_SHARE) & (fate < _HIDDEN_SHARE + _REPLACED_SHARE), others, hidden)
        tensors = {
            "input_ids": torch.where(told, hidden, input_ids),
            "attention_mask": mask,
            "targets": torch.where(told, input_ids, IGNORED),
        }
        return TrainingBatch(tensors=tensors, num_units=int(mask.sum()))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Of the tokens to tell alone, row by row: (P, V)."""
        assert isinstance(model, Encoder)
        return model.logits_at(tensors["targets"] != IGNORED, tensors["input_ids"], tensors["attention_mask"])

    def loss_of_logits(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy of logits, float (P, V), summed; of the targets, (B, T), P are to be told."""
        return super().loss_of_logits(logits, targets[targets != IGNORED], label_smoothing)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Literal["valid", "test"]) -> Metrics:
        """Share of the hidden tokens that are told, in percent; always the same ones are hidden."""
        assert part == "valid", "pretraining has no test data"
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(_VALID_SEED)
        right = count = 0
        for batch in sorted_batches([len(row) for row in self._valid], EVALUATION_TOKENS):
            tensors = self._hide([self._valid[i] for i in batch], generator).tensors
            targets = tensors["targets"][tensors["targets"] != IGNORED]
            predicted = self.logits(model, {name: one.to(device) for name, one in tensors.items()}).argmax(dim=-1).cpu()
            right += int((predicted == targets).sum())
            count += len(targets)
        return {"accuracy": float(np.divide(100 * right, max(1, count)))}

    def measure_baseline(self) -> Baseline:
        """Never asked for."""
        raise NotImplementedError

    def evaluation_data(self) -> EvaluationData:
        """Never asked for."""
        raise NotImplementedError
