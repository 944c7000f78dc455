"""Text generation: predict the next token of a running text.

B rows, L window, N tokens of the text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_training.baselines import character_ngram_baseline
from headway_training.batches import Batch, even_batches
from headway_training.checkpoint import TOKENIZER_FILE, Baseline, SpecialTokens
from headway_training.data.conversations import holds_conversations, read_conversations
from headway_training.data.examples import Conversations, PlainText, Splits
from headway_training.data.public import Dataset
from headway_training.data.sources import OwnData
from headway_training.data.token_file import PART_CHARACTERS, map_tokens
from headway_training.errors import DataError
from headway_training.evaluation import nats_per_character
from headway_training.kinds import ROWS, SMOOTHING, TOKENS, FileSettings, FolderKind, Labels, augmentation, register
from headway_training.models.parts.attention import Kernel, causal_attention
from headway_training.models.protocols import HybridDecoder, StatefulDecoder, decoder_kind
from headway_training.recipes import Recipe
from headway_training.tasks.base import EvaluationData, Metrics, Part, Task, TextTask, TrainingBatch
from headway_training.tasks.conversation import ConversationTask
from headway_training.tokenizers import SubwordSplitter, special_tokens

if TYPE_CHECKING:
    from headway_training.huggingface import ModelFolder

TOKENS_FILE = "tokens.bin"
"""Tokens of a running text, in the run's folder."""
MIN_CHARACTERS = 100
"""Fewest characters of a running text."""


@register
class GenerationTask(TextTask):
    """Windows of a text, each token predicted from those before it in the window."""

    name = "generation"
    unit = "tokens"
    metric = "nats_per_character"
    more_metrics = ("answer_nats_per_character",)
    higher_is_better = False
    settings = (
        *(ROWS, TOKENS, SMOOTHING, "tokenizer", "sampling", "attention"),
        *augmentation("subword_splitting"),
    )
    described = ("special_tokens",)
    own_data = "plain text; or conversations, one a line (`.jsonl`)"
    sentence = "Continues text"
    frame = ""
    takes_modules = True
    in_order = "input_ids"
    folder = FolderKind(
        auto_class="AutoModelForCausalLM",
        model_types="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        inputs=("input_ids",),
        noun="a decoder",
        heads=("ForCausalLM", "LMHeadModel"),
    )

    @classmethod
    def unread(cls, recipe: Recipe, own: OwnData | None, dataset: Dataset | None) -> Iterator[tuple[str, str]]:
        """Batches of conversations are bounded by tokens, those of running text have so many rows."""
        if own is not None and holds_conversations(Path(own.train)):
            yield ROWS, f"is not read on conversations; a batch of them is bounded by {TOKENS}"
            yield "augmentation.subword_splitting", "is not read on conversations"
        else:
            yield TOKENS, f"is not read on running text; a batch of it has {ROWS} windows"

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[PlainText, Labels]:
        """Takes a file as running text."""
        text = PlainText(Path(file))
        if len(text) < MIN_CHARACTERS:
            raise DataError(f"{file} has {len(text)} characters; expected at least {MIN_CHARACTERS}")
        return text, ()

    @classmethod
    def read_own(
        cls, file: str, labels: Labels | None, settings: FileSettings
    ) -> tuple[PlainText | Conversations, Labels]:
        """Reads conversations, or running text."""
        return (
            (read_conversations(Path(file)), ())
            if holds_conversations(Path(file))
            else cls.read(file, labels, settings)
        )

    @classmethod
    def describe_own(cls, file: str, labels: tuple[str, ...], source: str) -> str:
        """Of conversations a model learns to talk."""
        said = super().describe_own(file, labels, source)
        return said.replace(cls.sentence, "Talks", 1) if holds_conversations(Path(file)) else said

    @classmethod
    def variant(cls, train: PlainText | Conversations) -> type[Task]:
        """Conversations are learned otherwise than running text."""
        return ConversationTask if isinstance(train, Conversations) else cls

    @classmethod
    def training_texts(cls, train: PlainText) -> Iterator[str]:
        """The text, part by part."""
        return train.parts(PART_CHARACTERS)

    @classmethod
    def run_module(cls, module: nn.Module, kernel: Kernel, *inputs: Tensor) -> Tensor:
        """Reads texts, int64 (B, L), with states, with causal attention or with both."""
        (input_ids,) = inputs
        decoder: Any = module
        kind, attend = decoder_kind(module), causal_attention(kernel)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if kind is StatefulDecoder:
            hidden_states, _ = decoder.read(input_ids, decoder.first_states(len(input_ids)))
        elif kind is HybridDecoder:
            states = decoder.first_states(len(input_ids))
            hidden_states, _ = decoder.read_attending(input_ids, positions, attend, states)
        else:
            hidden_states = decoder.hidden_states(input_ids, positions, attend)
        logits: Tensor = decoder.logits(hidden_states)
        return logits

    @classmethod
    def make(cls, recipe: Recipe, splits: Splits[Any], folder: Path, source: ModelFolder | None) -> Task:
        """As `Task.make`; the tokens of the text are kept in the folder."""
        tokenizer = cls.make_tokenizer(recipe, splits.train, folder / TOKENIZER_FILE, source)
        special = None if source is None else source.special_tokens
        return cls(recipe, splits, tokenizer, folder / TOKENS_FILE, special)

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits[PlainText],
        tokenizer: Tokenizer,
        tokens_file: Path,
        special: SpecialTokens | None = None,
    ) -> None:
        super().__init__(recipe, splits)
        self.tokenizer = tokenizer
        self._special = special or special_tokens(tokenizer)
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
