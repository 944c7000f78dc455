"""Texts, or pairs of them, that a model without state reads.

N examples, C labels, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headway_export.agreement import Kind
from headway_export.candidate import Candidate, run_batch
from headway_export.inputs import (
    FULL_SHARE,
    LENGTHS,
    NUM_CALIBRATED,
    NUM_ITEMS,
    NUM_VECTORS,
    Draw,
    Inputs,
    affordable,
    apart,
    evenly,
    places,
    text_items,
)
from headway_export.parity import Comparison, attention_texts, batches, sample_tokens
from headway_export.quality import by_length
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.stateless import Stateless
from headway_export.tasks.task import Metric
from headway_server.batching import Tensors
from headway_server.tasks.text.model import text_tensors


class TextTask(Stateless):
    """A model of texts."""

    num_items: ClassVar[tuple[int, int]] = NUM_ITEMS
    """The least and the most inputs that judge."""

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares batches of texts, long and short together."""
        source, graph = candidate.source, candidate.open_stateless()
        limit = source.limits.max_input_tokens
        assert limit is not None, "the source has read the module's length"
        assert source.tokenizer is not None, "a text model has its tokenizer"
        texts = sample_tokens(source, source.tokenizer.get_vocab_size(), limit, frame=True)
        for lengths in batches(limit):
            batch = [texts[row % len(texts)][:length] for row, length in enumerate(lengths)]
            items = [text_tensors(text, _halved(text), has_types=source.has_token_types) for text in batch]
            for item, found in zip(items, run_batch(graph, items), strict=True):
                read = [item[name] for name in graph.input_names if name != "attention_mask"]
                expected = reference.outputs(*read)
                comparison.add_outputs(found, expected, f"batch {len(lengths)}, lengths {lengths}")
            comparison.num_shapes += len(set(lengths))

    def attention_items(self, candidate: Candidate) -> Iterator[list[Tensors]]:
        """Yields texts."""
        has_types = candidate.source.has_token_types
        for batch, _ in attention_texts(candidate, frame=True):
            yield [text_tensors(text, _halved(text), has_types=has_types) for text in batch]

    def inputs_of(
        self,
        source: ExportSource,
        data: EvaluationData,
        most: int | None,
        candidate: Candidate | None,  # noqa: ARG002
    ) -> Inputs:
        """Returns texts, or pairs of them."""
        rows = data.take(places(len(data), most or self._num_texts(source)))
        return Inputs(dataset=data.dataset, items=tuple(text_items(source, rows.texts, rows.text_pairs)))

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns texts that are given or drawn, with second ones where the model reads such."""
        source, count = draw.source, self._num_texts(draw.source)
        if source.texts:
            return apart(text_items(source, *_paired(draw, evenly(source.texts, count))))
        items = text_items(source, *_paired(draw, draw.texts(count + NUM_CALIBRATED)))
        return items[:count], items[count:]

    def _num_texts(self, source: ExportSource) -> int:
        limit = source.limits.max_input_tokens or LENGTHS[1]
        return affordable(source, min(limit, 24 + limit / FULL_SHARE), *self.num_items)

    def logits(self, candidate: Candidate, data: EvaluationData) -> NDArray[np.float32]:
        """Logits of the examples, (N, C)."""
        graph, logits = candidate.open_stateless(), np.empty((len(data), len(candidate.source.labels)), np.float32)
        items = text_items(candidate.source, data.texts, data.text_pairs)
        for rows in by_length([item["input_ids"] for item in items]):
            logits[rows] = [found["logits"] for found in run_batch(graph, [items[row] for row in rows])]
        return logits


class TextClassification(TextTask):
    """Labels of texts, one each or several."""

    metrics = (Metric(name="accuracy", allowed_loss=0.5), Metric(name="micro_f1", allowed_loss=0.5))


class TextScoring(TextTask):
    """Numbers of texts, or of pairs."""

    def makes_probabilities(self, source: ExportSource) -> bool:  # noqa: ARG002
        """False: a score is one logit."""
        return False

    def kind(self, source: ExportSource) -> Kind:  # noqa: ARG002
        """A logit."""
        return "score"


class TextEmbedding(TextTask):
    """Vectors of texts."""

    recorded = "embedding"
    num_items = NUM_VECTORS

    def kind(self, source: ExportSource) -> Kind:  # noqa: ARG002
        """A vector."""
        return "vector"


def _halved(text: NDArray[np.int64]) -> NDArray[np.int64]:
    """Types of a text's tokens, (T,), as if it were a pair of two halves."""
    return (np.arange(len(text)) >= len(text) // 2).astype(np.int64)


def _paired(draw: Draw, texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """Adds second texts, if the model reads such: another one, the same, a part of it, or one of both in turn."""
    if draw.source.text_pairs == "never":
        return texts, None
    pairs = []
    for number, text in enumerate(texts):
        words, other = text.split(), texts[(number + 1) % len(texts)]
        half = " ".join(words[: (len(words) + 1) // 2])
        pairs.append((other, text, half, f"{half} {other}")[number % 4] or other)
    return texts, pairs
