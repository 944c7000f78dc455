"""Token classification: predict the spans of a text, such as words with their parts of speech, or names.

N examples, B rows, T tokens, C tags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from torch import Tensor, nn

from headway_training.baselines import known_words_baseline, seen_spans_baseline
from headway_training.batches import Batch, bucketed_batches, count_bucketed
from headway_training.checkpoint import Baseline, SpecialTokens
from headway_training.data.conll import read_span_labeled_texts
from headway_training.data.examples import SpanLabeledTexts, Splits
from headway_training.data.public import Dataset
from headway_training.data.sources import OwnData
from headway_training.evaluation import pad, text_logits, token_mask
from headway_training.kinds import SMOOTHING, TOKENS, FileSettings, FolderKind, Labels, augmentation, register
from headway_training.metrics import accuracy, span_scores
from headway_training.recipes import Recipe
from headway_training.tagging import (
    TagScheme,
    find_subwords,
    labels_of_words,
    predict_spans,
    split_tags,
    subword_tags,
)
from headway_training.tasks.base import (
    IGNORED,
    EvaluationData,
    Frame,
    Metrics,
    Part,
    TextTask,
    TrainingBatch,
    check_head,
    hide_tokens,
)
from headway_training.tokenizers import SubwordSplitter, encode_spans

Row = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ids and tags of a text, (T,) each, without the special tokens around it."""


@register
class TokenClassificationTask(TextTask):
    """Texts in batches of similar length; a tag for every subword (`headway_training.tagging`).

    An example is a text, or, with `augmentation.join_texts`, a few neighbouring ones joined by spaces: a caller's text
    has any number of sentences, a treebank's has one. Example `i + N * (k - 1)` is `k` texts from text `i` on.
    """

    name = "token_classification"
    unit = "tokens"
    metric = "span_f1"
    higher_is_better = True
    settings = (
        *(TOKENS, SMOOTHING, "tokenizer", "attention"),
        *augmentation("token_dropout", "subword_splitting", "join_texts"),
    )
    described = ("labels", "special_tokens")
    own_data = "CoNLL-U, or a word and its tag on each line"
    sentence = "Finds the parts of a text with one of {count} labels ({labels})"
    folder = FolderKind(
        auto_class="AutoModelForTokenClassification",
        model_types="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        inputs=("input_ids", "attention_mask"),
        noun="a text model",
    )
    takes_modules = True

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        """The head is that of tokens."""
        super().check_recipe(recipe)
        check_head(recipe, "token")

    @classmethod
    def unread(cls, recipe: Recipe, own: OwnData | None, dataset: Dataset | None) -> Iterator[tuple[str, str]]:
        """Nothing is pooled."""
        yield "model.pooling", "is not read by a model that classifies every token"

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[SpanLabeledTexts, Labels]:
        """Reads tagged words."""
        return read_span_labeled_texts(Path(file), labels)

    @classmethod
    def training_texts(cls, train: SpanLabeledTexts) -> list[str]:
        """The texts."""
        return train.texts

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits[SpanLabeledTexts],
        tokenizer: Tokenizer,
        special: SpecialTokens | None = None,
    ) -> None:
        super().__init__(recipe, splits)
        self.tokenizer = tokenizer
        self._scheme = TagScheme(splits.labels, splits.train.covering)
        self._special = Frame(tokenizer, special, recipe.augmentation.token_dropout)
        self._num_framing = len(self._special.before) + len(self._special.after)
        self._max_length = int(recipe.model["max_length"])
        self._splitter = SubwordSplitter(tokenizer) if recipe.augmentation.subword_splitting else None
        train = splits.train
        self._rows = self._encode(train.texts, train.spans)
        spaced = [" " + text for text in train.texts]
        moved = [tuple(span._replace(start=span.start + 1, end=span.end + 1) for span in row) for row in train.spans]
        self._spaced_rows = self._encode(spaced, moved)
        self._lengths = np.array([len(ids) for ids, _ in self._rows])
        self._spaced_ends = np.cumsum([0, *(len(ids) for ids, _ in self._spaced_rows)])

    @property
    def num_train_examples(self) -> int:
        """Texts of the training part."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """The vocabulary and the tags."""
        return {"vocabulary_size": self.tokenizer.get_vocab_size(), "num_classes": len(self._scheme.names)}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens and tags."""
        return {"special_tokens": self._special.tokens, "labels": self._scheme.names}

    def num_batches(self, seed: int, epoch: int) -> int:
        """Counted anew for each epoch, whose texts are joined otherwise."""
        _, lengths = self._join(seed, epoch)
        return count_bucketed(lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of examples of similar length; every text is in one example."""
        examples, lengths = self._join(seed, epoch)
        batches = bucketed_batches(lengths, self._recipe.optimization.batch_tokens, seed=seed, epoch=epoch)
        return [examples[batch] for batch in batches]

    def _join(self, seed: int, epoch: int) -> tuple[Batch, NDArray[np.int64]]:
        """The examples of an epoch, and how many tokens each has."""
        count, most = len(self._rows), self._recipe.augmentation.join_texts
        generator = np.random.default_rng((seed, epoch, 1))
        sizes = generator.integers(1, most + 1, size=count)
        firsts = np.concatenate([[0], np.cumsum(sizes)])
        firsts = firsts[firsts < count]
        sizes = np.minimum(sizes[: len(firsts)], count - firsts)
        joined = self._spaced_ends[firsts + sizes] - self._spaced_ends[firsts + 1]
        return firsts + count * (sizes - 1), self._lengths[firsts] + joined + self._num_framing

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Ids, their mask and targets, (B, T); some subwords are split, some tokens hidden."""
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        rows = [self._frame(self._parts(int(example)), random) for example in batch]
        ids, tags = [ids.tolist() for ids, _ in rows], [tags.tolist() for _, tags in rows]
        mask, rate = token_mask(ids), self._recipe.augmentation.token_dropout
        tensors = {
            "input_ids": hide_tokens(pad(ids, self._special.pad), mask, rate, self._special.unk, generator),
            "attention_mask": mask,
            "targets": pad(tags, IGNORED),
        }
        return TrainingBatch(tensors=tensors, num_units=int(mask.sum()))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, T, C)."""
        logits: Tensor = model(tensors["input_ids"], tensors["attention_mask"])
        return logits

    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """F1, precision and recall of spans; if spans cover, the accuracy on given words too: all in percent.

        The spans are those that the model finds in the raw text. On given words it only predicts their labels, which
        is what the literature calls tagging accuracy.
        """
        examples = self._splits.valid if part == "valid" else self._splits.test
        encodings = encode_spans(self.tokenizer, examples.texts, self._max_length)
        logits = text_logits(model, [encoding.ids for encoding in encodings], self._special.pad)
        scores = [torch.from_numpy(row).log_softmax(dim=-1).numpy() for row in logits]  # (T, C) each
        subwords = [find_subwords(text, row.offsets) for text, row in zip(examples.texts, encodings, strict=True)]
        rows = zip(scores, subwords, examples.texts, strict=True)
        found = [predict_spans(row, own, self._scheme, text) for row, own, text in rows]
        predicted = [[(span.start, span.end, span.label) for span in spans] for spans in found]
        precision, recall, f1 = span_scores(predicted, examples.spans)
        metrics: Metrics = {"span_f1": f1, "span_precision": precision, "span_recall": recall}
        if examples.covering:
            labels = [
                label
                for row, own, words in zip(scores, subwords, examples.spans, strict=True)
                for label in labels_of_words(row, own, words, self._scheme)
            ]
            metrics["word_accuracy"] = accuracy(labels, [word.label for words in examples.spans for word in words])
        return metrics

    def measure_baseline(self) -> Baseline:
        """Each word's most frequent label if spans cover, else the spans that were seen in training."""
        baseline = known_words_baseline if self._scheme.covering else seen_spans_baseline
        return baseline(self._splits.train, self._splits.test)

    def evaluation_data(self) -> EvaluationData:
        """The test texts with start, end and label of their spans."""
        test, labels = self._splits.test, self._splits.labels
        return EvaluationData(
            texts=[
                {"text": text, "spans": [[span.start, span.end, labels[span.label]] for span in spans]}
                for text, spans in zip(test.texts, test.spans, strict=True)
            ]
        )

    def _encode(self, texts: Sequence[str], spans: Sequence[Sequence[Any]]) -> list[Row]:
        """Ids and tags of texts."""
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [self._row(*example) for example in zip(texts, encodings, spans, strict=True)]

    def _row(self, text: str, encoding: Encoding, spans: Sequence[Any]) -> Row:
        tags = np.full(len(encoding.ids), IGNORED, np.int64)
        subwords = find_subwords(text, encoding.offsets)
        tags[[subword.token for subword in subwords]] = subword_tags(subwords, spans, self._scheme)
        return np.asarray(encoding.ids, np.int64), tags

    def _parts(self, example: int) -> list[Row]:
        """The texts that an example is made of."""
        more, first = divmod(example, len(self._rows))
        return [self._rows[first], *self._spaced_rows[first + 1 : first + 1 + more]]

    def _frame(self, parts: Sequence[Row], random: np.random.Generator) -> Row:
        """Joins texts, splits some of their subwords, and puts the special tokens around them."""
        ids, tags = (np.concatenate(side) for side in zip(*parts, strict=True))
        if self._splitter is not None:
            ids, origins = self._splitter.split(ids, self._recipe.augmentation.subword_splitting, random)
            tags = split_tags(tags, origins, self._splitter.is_blank[ids], self._scheme)
        room = self._max_length - self._num_framing
        before, after = (np.array(part, np.int64) for part in (self._special.before, self._special.after))
        ignored_before, ignored_after = np.full_like(before, IGNORED), np.full_like(after, IGNORED)
        return (
            np.concatenate([before, ids[:room], after]),
            np.concatenate([ignored_before, tags[:room], ignored_after]),
        )
