"""Labels of the tokens of a text, which make spans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway_export.candidate import Candidate, run_batch
from headway_export.errors import SourceError
from headway_export.inputs import NUM_ITEMS
from headway_export.quality import NUM_EXAMPLES, Quality, by_length, figure_of
from headway_export.source import EvaluationData, TextRow, read_rows, validated
from headway_export.tasks.task import Metric
from headway_export.tasks.text import TextTask
from headway_server.bundles import Manifest, Tagging
from headway_server.bundles.tags import TagSet
from headway_server.tasks.text.model import text_tensors
from headway_server.tasks.tokens.spans import SpanDecoder
from headway_training.metrics import span_scores
from headway_training.tokenizers import encode_spans

MIN_SPANS = 10
"""Spans of a label from which a card gives the label's F1."""

Spans = list[tuple[int, int, int]]
"""Start, end and number of the label."""


class _SpansRow(TextRow):
    spans: list[tuple[int, int, str]]


class TokenClassification(TextTask):
    """Tags of tokens."""

    optional_flags = ("--tag-scheme",)
    metrics = (Metric(name="span_f1", allowed_loss=0.5),)
    num_items = (NUM_ITEMS[0], NUM_ITEMS[1] // 8)  # a text is many predictions

    def check_labels(self, labels: Sequence[str], tagging: Tagging | None = None) -> None:
        """Checks that they are tags."""
        try:
            TagSet.parse(labels, (tagging or Tagging()).scheme)
        except ValueError as error:
            raise SourceError(f"labels: {error}") from error

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads texts and their spans."""
        tagged = validated(_SpansRow, read_rows(file))
        return {"texts": [row.text for row in tagged], "spans": [row.spans for row in tagged]}

    def names(self, manifest: Manifest) -> Sequence[str]:
        """Returns the labels of spans."""
        return manifest.tags.labels

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says what a model of documents reads."""
        if manifest.word_boxes is None:
            return []
        return ["It reads words with their boxes, which are `pages` of ClassifyTokens, and no texts."]

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Measures F1 of spans."""
        labels = SpanDecoder.of(candidate.source.labels, candidate.source.tagging).labels
        numbers = {label: number for number, label in enumerate(labels)}
        # A label that the model does not have is never right, whatever its number.
        expected = [[(start, end, numbers.get(label, -1)) for start, end, label in spans] for spans in data.spans]
        found = _find_spans(candidate, data.texts)
        _, _, f1 = span_scores(found, expected)
        return Quality(figure=figure_of(data, f1), weak_points=_weak_labels(found, expected, labels))


def _find_spans(candidate: Candidate, texts: Sequence[str]) -> list[Spans]:
    """Finds the spans of texts as a server does; a text is cut at the model's limit."""
    source = candidate.source
    assert source.tokenizer is not None, "a text model has its tokenizer"
    assert source.limits.max_input_tokens is not None, "the source has read the module's length"
    encodings = encode_spans(source.tokenizer, texts, source.limits.max_input_tokens)
    graph, decoder = candidate.open_stateless(), SpanDecoder.of(source.labels, source.tagging)
    items = [text_tensors(np.array(encoding.ids, np.int64)) for encoding in encodings]
    found: list[Spans] = [[] for _ in texts]
    for batch in by_length([item["input_ids"] for item in items]):
        for index, outputs in zip(batch, run_batch(graph, [items[index] for index in batch]), strict=True):
            encoding = encodings[index]
            spans = decoder.decode_text(outputs["logits"], texts[index], encoding.offsets, encoding.word_ids)
            found[index] = [(span.start, span.end, span.label) for span in spans]
    return found


def _weak_labels(found: Sequence[Spans], expected: Sequence[Spans], labels: Sequence[str]) -> tuple[str, ...]:
    """The labels of the lowest F1."""
    lines: list[tuple[float, str]] = []
    for number, label in enumerate(labels):
        own, wanted = ([[span for span in row if span[2] == number] for row in side] for side in (found, expected))
        if (count := sum(map(len, wanted))) >= MIN_SPANS:
            precision, recall, f1 = span_scores(own, wanted)
            scores = f"F1 {f1:.1f}, precision {precision:.0f} %, recall {recall:.0f} % of {count:,}"
            lines.append((f1, f"`{label}`: {scores}"))
    return tuple(line for _, line in sorted(lines)[:NUM_EXAMPLES])
