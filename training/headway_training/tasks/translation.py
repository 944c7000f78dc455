"""Translation: predict the next token of the target from the source and the target so far.

B rows, S source tokens, T target tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_training.baselines import copy_baseline
from headway_training.batches import Batch, bucketed_batches, count_bucketed
from headway_training.checkpoint import Baseline
from headway_training.data.examples import ParallelTexts, Splits
from headway_training.data.texts import read_parallel_texts
from headway_training.evaluation import pad, token_mask, translate
from headway_training.kinds import SMOOTHING, TOKENS, FileSettings, Labels, augmentation, register
from headway_training.metrics import corpus_bleu
from headway_training.models import RecurrentTranslator, Transformer
from headway_training.models.parts.attention import Kernel
from headway_training.models.protocols import is_recurrent
from headway_training.models.recurrent import recur_packed
from headway_training.models.writer import target_states
from headway_training.recipes import Recipe
from headway_training.tasks.base import IGNORED, EvaluationData, Metrics, Part, SpecialIds, TextTask, TrainingBatch
from headway_training.tokenizers import SubwordSplitter, encode_texts


@register
class TranslationTask(TextTask):
    """Pairs of sentences in batches of similar length."""

    name = "translation"
    unit = "tokens"
    metric = "sacrebleu"
    higher_is_better = True
    settings = (TOKENS, SMOOTHING, "tokenizer", "languages", "attention", *augmentation("subword_splitting"))
    sections = ("languages",)
    described = ("special_tokens", "languages")
    own_data = "lines of a sentence, a tab and its translation; or two files of lines, `a.en,a.de`"
    sentence = "Translates text"
    frame = "$A <eos>"
    takes_modules = True
    in_order = "target_ids"

    @classmethod
    def run_module(cls, module: nn.Module, kernel: Kernel, *inputs: Tensor) -> Tensor:
        """Reads sources and their mask, (B, S), and targets so far, (B, T), with a state or with attention."""
        source_ids, source_mask, target_ids = inputs
        translator: Any = module
        if is_recurrent(module):
            cross, firsts = translator.encode_source(source_ids, source_mask, recur_packed)
            states, steps = tuple(one[:, None] for one in firsts), []
            for place in range(target_ids.shape[1]):
                answer, states, _ = translator.step(target_ids[:, place : place + 1], states, cross, source_mask)
                steps.append(answer)
            return torch.cat(steps, dim=1)
        keys_values = translator.cross_keys_values(translator.encode(source_ids, source_mask))
        logits: Tensor = translator.logits(target_states(translator, kernel, target_ids, keys_values, source_mask))
        return logits

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[ParallelTexts, Labels]:
        """Reads pairs of sentences, of one file or of two."""
        return read_parallel_texts(file), ()

    @classmethod
    def training_texts(cls, train: ParallelTexts) -> list[str]:
        """Both sides of all pairs."""
        return [*train.sources, *train.targets]

    def __init__(self, recipe: Recipe, splits: Splits[ParallelTexts], tokenizer: Tokenizer) -> None:
        super().__init__(recipe, splits)
        self.tokenizer = tokenizer
        self._special = SpecialIds(tokenizer)
        self._max_source = int(recipe.model["max_source_length"])
        self._sources = encode_texts(tokenizer, splits.train.sources, self._max_source)
        # A target has one token more than its text: `bos` before it as input, `eos` after it as target.
        self._max_target = int(recipe.model["max_target_length"]) - 1
        self._targets = encode_texts(tokenizer, splits.train.targets, self._max_target, special=False)
        self._splitter = SubwordSplitter(tokenizer) if recipe.augmentation.subword_splitting else None
        self._lengths = [max(len(s), len(t) + 1) for s, t in zip(self._sources, self._targets, strict=True)]

    @property
    def num_train_examples(self) -> int:
        """Pairs of the training part."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """The vocabulary."""
        return {"vocabulary_size": self.tokenizer.get_vocab_size()}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens and languages."""
        return {"special_tokens": self._special.tokens, "languages": self._recipe.languages}

    def num_batches(self, seed: int, epoch: int) -> int:
        """Counted anew for each epoch, whose lengths come together otherwise."""
        return count_bucketed(self._lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of pairs whose longer side is of similar length."""
        return bucketed_batches(self._lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Sources and their mask (B, S), targets shifted right and targets (B, T); some subwords are split."""
        sources = [self._sources[i] for i in batch]
        targets = [self._targets[i] for i in batch]
        if self._splitter is not None:
            random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
            sources = self._split(self._splitter, sources, self._max_source, random)
            targets = self._split(self._splitter, targets, self._max_target, random)
        special = self._special
        tensors = {
            "source_ids": pad(sources, special.pad),
            "source_mask": token_mask(sources),
            "target_ids": pad([[special.bos, *target] for target in targets], special.pad),
            "targets": pad([[*target, special.eos] for target in targets], IGNORED),
        }
        num_units = sum(map(len, sources)) + sum(map(len, targets)) + len(targets)
        return TrainingBatch(tensors=tensors, num_units=num_units)

    def _split(
        self, splitter: SubwordSplitter, rows: list[list[int]], max_length: int, random: np.random.Generator
    ) -> list[list[int]]:
        """Rows with some subwords split; a row that becomes too long stays as it is."""
        rate = self._recipe.augmentation.subword_splitting
        split = (splitter.split(row, rate, random)[0].tolist() for row in rows)
        return [new if len(new) <= max_length else row for new, row in zip(split, rows, strict=True)]

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, T, V)."""
        logits: Tensor = model(tensors["source_ids"], tensors["source_mask"], tensors["target_ids"])
        return logits

    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Corpus BLEU of greedy translations, with sacreBLEU's signature."""
        pairs = self._splits.valid if part == "valid" else self._splits.test
        sources = encode_texts(self.tokenizer, pairs.sources, self._max_source)
        translator = cast("Transformer | RecurrentTranslator", model)
        special = self._special
        hypotheses = translate(
            translator, self.tokenizer, sources, pad_id=special.pad, bos=special.bos, eos=special.eos
        )
        score, signature = corpus_bleu(hypotheses, pairs.targets)
        return {"sacrebleu": score, "sacrebleu_signature": signature}

    def measure_baseline(self) -> Baseline:
        """The source, untranslated."""
        return copy_baseline(self._splits.test)

    def evaluation_data(self) -> EvaluationData:
        """The test pairs."""
        test = self._splits.test
        pairs = zip(test.sources, test.targets, strict=True)
        return EvaluationData(texts=[{"source": source, "target": target} for source, target in pairs])
