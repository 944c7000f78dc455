"""Simple methods for labelled spans, fitted and measured on the same data as a model."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from headway_training.checkpoint import Baseline
from headway_training.data.examples import SpanLabeledTexts
from headway_training.metrics import accuracy, span_scores

_WORD = re.compile(r"\w+|[^\w\s]")


def known_words_baseline(train: SpanLabeledTexts, test: SpanLabeledTexts) -> Baseline:
    """Each word's most frequent label; a word that is not known, the most frequent label of words that came once."""
    words = _words(train)
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for word, label in words:
        counts[word][label] += 1
    rare = Counter(label for word, label in words if counts[word].total() == 1)
    fallback = (rare or Counter(label for _, label in words)).most_common(1)[0][0]
    best = {word: counter.most_common(1)[0][0] for word, counter in counts.items()}
    expected = _words(test)
    predicted = [best.get(word, best.get(word.lower(), fallback)) for word, _ in expected]
    value = accuracy(predicted, [label for _, label in expected])
    return Baseline(name="most frequent label of each given word", metric="word_accuracy", value=value)


def seen_spans_baseline(train: SpanLabeledTexts, test: SpanLabeledTexts) -> Baseline:
    """The longest runs of words that were a span in training, from left to right, with their most frequent label."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for word, label in _words(train):
        counts[word][label] += 1
    best = {words: counter.most_common(1)[0][0] for words, counter in counts.items()}
    longest = max(len(_WORD.findall(words)) for words in best)
    predicted = [_find_known(text, best, longest) for text in test.texts]
    _, _, f1 = span_scores(predicted, test.spans)
    return Baseline(name="spans seen in training", metric="span_f1", value=f1)


def _words(examples: SpanLabeledTexts) -> list[tuple[str, int]]:
    """Text and label of every span."""
    return [
        (text[span.start : span.end], span.label)
        for text, spans in zip(examples.texts, examples.spans, strict=True)
        for span in spans
    ]


def _find_known(text: str, best: dict[str, int], longest: int) -> list[tuple[int, int, int]]:
    """The known spans of a text, the longest first at each word."""
    words = [match.span() for match in _WORD.finditer(text)]
    found: list[tuple[int, int, int]] = []
    first = 0
    while first < len(words):
        start = words[first][0]
        for last in range(min(first + longest, len(words)) - 1, first - 1, -1):
            label = best.get(text[start : words[last][1]])
            if label is not None:
                found.append((start, words[last][1], label))
                first = last
                break
        first += 1
    return found
