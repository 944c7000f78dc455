"""Measures how well a token classifier finds the spans of raw text, with what the server makes of its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding

from headway_export.candidate import NUM_SLOTS, Candidate
from headway_export.source import EvaluationData
from headway_server.bundles.tags import TagSet
from headway_server.tasks.outputs import LOGITS
from headway_server.tasks.text.model import text_graph, text_tensors
from headway_server.tasks.tokens.spans import SpanDecoder
from headway_training.metrics import span_scores

Spans = list[tuple[int, int, int]]
"""Start, end and number of the label."""


_WEAK_LABELS = 3
_LEAST_SPANS = 10
"""Spans of a label from which its score says something."""


def span_f1(candidate: Candidate, data: EvaluationData) -> tuple[float, tuple[str, ...]]:
    """How well a variant finds the spans of texts as they stand.

    Returns:
        F1 in percent (`headway_training.metrics`), and what the variant is bad at: Markdown, a line each.
    """
    labels = TagSet.parse(candidate.source.labels).labels
    numbers = {label: number for number, label in enumerate(labels)}
    # A label that the model does not have is never right, whatever its number.
    expected = [[(start, end, numbers.get(label, -1)) for start, end, label in spans] for spans in data.spans]
    found = find_spans(candidate, data.texts)
    _, _, f1 = span_scores(found, expected)
    return f1, _weak_labels(found, expected, labels)


def _weak_labels(found: Sequence[Spans], expected: Sequence[Spans], labels: Sequence[str]) -> tuple[str, ...]:
    """The labels of the lowest F1."""
    lines: list[tuple[float, str]] = []
    for number, label in enumerate(labels):
        own, wanted = ([[span for span in row if span[2] == number] for row in side] for side in (found, expected))
        count = sum(map(len, wanted))
        if count >= _LEAST_SPANS:
            precision, recall, f1 = span_scores(own, wanted)
            share = f"of {count:,} it finds {recall:.0f} %, and {precision:.0f} % of what it names so is"
            line = f"`{label}`: F1 {f1:.1f}; {share}"
            lines.append((f1, line))
    return tuple(line for _, line in sorted(lines)[:_WEAK_LABELS])


def find_spans(candidate: Candidate, texts: Sequence[str]) -> list[Spans]:
    """Finds the spans of texts, in batches of texts of similar length; a text is cut at the model's limit."""
    source = candidate.source
    session = candidate.runtime.open(candidate.bundle, candidate.variant.graphs["model"])
    graph = text_graph(session, source.special_tokens)
    decoder = SpanDecoder(TagSet.parse(source.labels))
    encodings = _encode(candidate, texts)
    order = sorted(range(len(texts)), key=lambda index: len(encodings[index]))
    found: list[Spans] = [[] for _ in texts]
    for first in range(0, len(order), NUM_SLOTS):
        batch = order[first : first + NUM_SLOTS]
        items = [text_tensors(np.asarray(encodings[index].ids, np.int64)) for index in batch]
        rows = graph.split(graph.run(graph.collate(items), (LOGITS,)), items)
        for index, row in zip(batch, rows, strict=True):
            spans = decoder.decode_text(row[LOGITS], texts[index], encodings[index].offsets)
            found[index] = [(span.start, span.end, span.label) for span in spans]
    return found


def _encode(candidate: Candidate, texts: Sequence[str]) -> list[Encoding]:
    tokenizer, limit = candidate.source.tokenizer, candidate.source.limits.max_input_tokens
    assert tokenizer is not None, "a text model has its tokenizer"
    assert limit is not None, "the source has read the module's length"
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit)
    try:
        return list(tokenizer.encode_batch(list(texts)))
    finally:
        tokenizer.no_truncation()
