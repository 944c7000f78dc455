"""Conversations: predict what the assistant says, from all that stands before it.

N conversations, B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.batches import Batch, bucketed_batches, count_bucketed, sorted_batches
from headway_training.data.examples import Conversations, Splits
from headway_training.errors import DataError
from headway_training.evaluation import EVALUATION_TOKENS, pad
from headway_training.recipes import Recipe
from headway_training.tasks.base import IGNORED, EvaluationData, Metrics, Part, Task, TrainingBatch

if TYPE_CHECKING:
    from headway_training.huggingface import ModelFolder

Row = tuple[list[int], list[int]]
"""Inputs and targets of a conversation, (T,) each: the targets are one token further on, and `IGNORED` where the
assistant does not write."""


class ConversationTask(Task):
    """Conversations as a folder's chat template writes them, with loss on the assistant's turns alone.

    Raises:
        CheckpointError: The folder has no chat template.
        DataError: The template refuses a conversation, or all are too long.
    """

    unit = "tokens"
    metric = "answer_nats_per_character"
    evaluation_metric = "nats_per_character"  # the text's, which an exporter can measure without a template
    higher_is_better = False
    in_order = "input_ids"

    def __init__(self, recipe: Recipe, splits: Splits[Conversations], source: ModelFolder) -> None:
        super().__init__(recipe, splits)
        self.tokenizer: Tokenizer = source.tokenizer
        self._source = source
        self._chat = source.chat_format()
        self._rows = self._encode(splits.train, "training")
        self._lengths = [len(ids) for ids, _ in self._rows]
        self._measured: dict[Part, list[Row]] = {}

    @classmethod
    def make(cls, recipe: Recipe, splits: Splits[Any], folder: Path, source: ModelFolder | None) -> Task:
        """As `Task.make`."""
        if source is None:
            raise DataError("conversations are written by the chat template of a model folder: give it with --init")
        return cls(recipe, splits, source)

    @property
    def num_train_examples(self) -> int:
        """Conversations of the training part."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """Nothing: the folder has its vocabulary."""
        return {}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens, and defaults of sampling."""
        return {"special_tokens": self._source.special_tokens, "sampling_defaults": self._recipe.sampling}

    def num_batches(self, seed: int, epoch: int) -> int:
        """Counted anew for each epoch, whose lengths come together otherwise."""
        return count_bucketed(self._lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of conversations of similar length."""
        return bucketed_batches(self._lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Inputs and targets, (B, T)."""
        tensors = _to_tensors([self._rows[i] for i in batch])
        return TrainingBatch(tensors=tensors, num_units=sum(self._lengths[i] for i in batch))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, T, V)."""
        logits: Tensor = model(tensors["input_ids"])
        return logits

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Nats per character of what the assistant says, and the share of turns that greedy decoding repeats exactly.

        A turn is repeated if each of its tokens is the likeliest after those before it.
        """
        if part not in self._measured:
            self._measured[part] = self._encode(self._splits.valid if part == "valid" else self._splits.test, part)
        rows = self._measured[part]
        device = next(model.parameters()).device
        total, num_turns, num_exact = 0.0, 0, 0
        for batch in sorted_batches([len(ids) for ids, _ in rows], EVALUATION_TOKENS):
            tensors = {name: tensor.to(device) for name, tensor in _to_tensors([rows[i] for i in batch]).items()}
            logits, targets = self.logits(model, tensors).float(), tensors["targets"]
            losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")  # (B, T)
            total += float(losses.double().sum())
            for right, own in zip((logits.argmax(dim=-1) == targets).cpu().numpy(), targets.cpu().numpy(), strict=True):
                starts = np.flatnonzero((own != IGNORED) & (np.concatenate([[IGNORED], own[:-1]]) == IGNORED))
                wrong = np.cumsum((own != IGNORED) & ~right)
                ends = [*starts[1:], len(own)]
                before = [int(wrong[start - 1]) if start else 0 for start in starts]
                num_exact += sum(int(wrong[end - 1]) == count for end, count in zip(ends, before, strict=True))
                num_turns += len(starts)
        characters = sum(len(self.tokenizer.decode([t for t in targets if t != IGNORED])) for _, targets in rows)
        return {
            "answer_nats_per_character": total / max(1, characters),
            "exact_answers": 100.0 * num_exact / max(1, num_turns),
        }

    def measure_baseline(self) -> None:
        """There is none: the model before fine-tuning is what a run is compared with."""

    def evaluation_data(self) -> EvaluationData:
        """The test conversations, as the template writes them."""
        return EvaluationData(texts=[{"text": self._chat.render(turns)} for turns in self._splits.test.turns])

    def _encode(self, examples: Conversations, part: str) -> list[Row]:
        """Encodes conversations; what is past the model's positions is cut, and one without an answer is left out."""
        limit, rows, num_cut = self._source.max_length, [], 0
        for turns in examples.turns:
            ids, mask = self._chat.encode(turns)
            targets = [token if own else IGNORED for token, own in zip(ids[1:], mask[1:], strict=True)][:limit]
            num_cut += len(ids) - 1 > limit
            if any(target != IGNORED for target in targets):
                rows.append((ids[:-1][:limit], targets))
        if not rows:
            raise DataError(f"no {part} conversation has words of the assistant within its first {limit} tokens")
        if num_cut:
            self.notes += (
                f"{num_cut} of {len(examples)} {part} conversations are longer than {limit} tokens and are cut there",
            )
        return rows


def _to_tensors(rows: Sequence[Row]) -> dict[str, Tensor]:
    return {"input_ids": pad([ids for ids, _ in rows], 0), "targets": pad([targets for _, targets in rows], IGNORED)}
