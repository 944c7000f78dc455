"""Measures how well a token classifier finds the spans of raw text, with what the server makes of its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding

from headway_export.candidate import NUM_SLOTS, Candidate
from headway_export.source import EvaluationData
from headway_server.batching.spans import END, LABEL, START
from headway_server.batching.token_classifier import TextToTag, TokenClassifierGraph
from headway_server.bundles.tags import TagSet
from headway_server.preprocessing import EncodedText
from headway_training.metrics import span_scores

Spans = list[tuple[int, int, int]]
"""Start, end and number of the label."""


def span_f1(candidate: Candidate, data: EvaluationData) -> float:
    """F1 in percent of the spans that a variant finds in the texts as they stand (`headway_training.metrics`)."""
    labels = TagSet.parse(candidate.source.labels).labels
    numbers = {label: number for number, label in enumerate(labels)}
    # A label that the model does not have is never right, whatever its number.
    expected = [[(start, end, numbers.get(label, -1)) for start, end, label in spans] for spans in data.spans]
    _, _, f1 = span_scores(find_spans(candidate, data.texts), expected)
    return f1


def find_spans(candidate: Candidate, texts: Sequence[str]) -> list[Spans]:
    """Finds the spans of texts, in batches of texts of similar length; a text is cut at the model's limit."""
    source = candidate.source
    special = source.special_tokens
    session = candidate.runtime.open(candidate.bundle, candidate.variant.graphs["model"])
    tags = TagSet.parse(source.labels)
    graph = TokenClassifierGraph(session, pad_id=(special.pad if special else None) or 0, tags=tags)
    encodings = _encode(candidate, texts)
    order = sorted(range(len(texts)), key=lambda index: len(encodings[index]))
    found: list[Spans] = [[] for _ in texts]
    for first in range(0, len(order), NUM_SLOTS):
        batch = order[first : first + NUM_SLOTS]
        items = [TextToTag(texts[index], _encoded(encodings[index])) for index in batch]
        for index, spans in zip(batch, graph.finish(graph.run(graph.collate(items))), strict=True):
            found[index] = [(int(span[START]), int(span[END]), int(span[LABEL])) for span in spans]
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


def _encoded(encoding: Encoding) -> EncodedText:
    return EncodedText(input_ids=np.asarray(encoding.ids, np.int64), offsets=tuple(encoding.offsets))
