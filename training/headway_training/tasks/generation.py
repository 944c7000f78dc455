"""Text generation: predict the next token of a running text.

B rows, L window, N tokens of the text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_training.baselines import character_ngram_baseline
from headway_training.batches import Batch, even_batches
from headway_training.checkpoint import Baseline, SpecialTokens
from headway_training.data.examples import PlainText, Splits
from headway_training.data.token_file import map_tokens
from headway_training.errors import DataError
from headway_training.evaluation import nats_per_character
from headway_training.recipes import Recipe
from headway_training.tasks.base import EvaluationData, Metrics, Part, Task, TrainingBatch
from headway_training.tokenizers import SubwordSplitter, special_tokens


class GenerationTask(Task):
    """Windows of a text, each token predicted from those before it in the window."""

    unit = "tokens"
    metric = "nats_per_character"
    higher_is_better = False

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits[PlainText],
        tokenizer: Tokenizer,
        tokens_file: Path,
        special: SpecialTokens | None = None,
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self._recipe = recipe
        self._special = special or special_tokens(tokenizer)
        self._splits = splits
        self._splitter = SubwordSplitter(tokenizer) if recipe.augmentation.subword_splitting else None
        self._ids = map_tokens(splits.train, tokenizer, tokens_file)  # (N)
        if len(self._ids) < 3:
            raise DataError(f"the training text has {len(self._ids)} tokens; at least 3 are needed")
        window = int(recipe.model.get("window") or recipe.model["max_length"])
        self._window = min(window, (len(self._ids) - 1) // 2)

    @property
    def num_train_examples(self) -> int:
        """Characters of the training text."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """The vocabulary."""
        return {"vocabulary_size": self.tokenizer.get_vocab_size()}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens, and defaults of sampling."""
        return {"special_tokens": self._special, "sampling_defaults": self._recipe.sampling}

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of window starts: windows lie side by side from an offset that differs from epoch to epoch."""
        offset = int(np.random.default_rng((seed, epoch, 1)).integers(self._window))
        count = (len(self._ids) - 1) // self._window - 1
        batches = even_batches(count, self._recipe.optimization.batch_size, seed=seed, epoch=epoch)
        return [offset + batch * self._window for batch in batches]

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Inputs and targets (B, L): the targets are one token further on. Half of the rows are split anew.

        The other half stays as the tokenizer cuts it, since that is how text is served.
        """
        rows = self._ids[batch[:, None] + np.arange(self._window + 1)].astype(np.int64)  # (B, L + 1)
        if self._splitter is not None:
            random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
            for row in rows[: (len(rows) + 1) // 2]:
                parts, _ = self._splitter.split(row, self._recipe.augmentation.subword_splitting, random)
                row[:] = parts[: len(row)]
        tokens = torch.from_numpy(rows)
        tensors = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}
        return TrainingBatch(tensors=tensors, num_units=tensors["targets"].numel())

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, L, V)."""
        logits: Tensor = model(tensors["input_ids"])
        return logits

    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Nats per character."""
        text = (self._splits.valid if part == "valid" else self._splits.test).text
        return {"nats_per_character": nats_per_character(model, self.tokenizer, text)}

    def measure_baseline(self) -> Baseline:
        """An interpolated character n-gram."""
        return character_ngram_baseline(self._splits.train, self._splits.test.text)

    def evaluation_data(self) -> EvaluationData:
        """The test text, whole."""
        return EvaluationData(texts=[{"text": self._splits.test.text}])
