"""Spans of tags: the fast search against all sequences there are."""

import itertools

import numpy as np
import pytest

from headway_server.bundles.tags import TagSet
from headway_server.preprocessing.subwords import Subwords
from headway_server.tasks.outputs import log_softmax
from headway_server.tasks.tokens.spans import SpanDecoder
from headway_training.tagging import TagScheme, find_subwords, predict_spans

NAMES = ("O", "B-x", "I-x", "B-y", "I-y")
WORDS = ("I-x", "B-y", "B-x", "I-y")
SINGLE = ("B-x", "O", "B-y")
ALONE = ("B-x", "B-y", "B-z")
MIXED = ("B-x", "I-x", "B-y")


def allowed(tags: tuple[str, ...], joined: np.ndarray, names: tuple[str, ...]) -> bool:
    """Whether a sequence of tags is one, by the words of the scheme."""
    before = "O"
    for place, tag in enumerate(tags):
        if joined[place] and (begins(tag, names) or tag[2:] != before[2:]):
            return False
        if tag.startswith("I-") and tag[2:] != before[2:]:
            return False
        before = tag
    return True


def begins(tag: str, names: tuple[str, ...]) -> bool:
    """Whether a tag says at a joined subword that a span begins there: a label that has no other tag does not."""
    return tag.startswith("B-") and f"I-{tag[2:]}" in names


def spans_of(tags: tuple[str, ...], scores: np.ndarray, joined: np.ndarray) -> list[tuple[int, int, str, float]]:
    """First subword, the subword after, label and geometric mean, by the words of the definition."""
    spans: list[list] = []
    for place, tag in enumerate(tags):
        if tag.startswith("B-") and not joined[place]:
            spans.append([place, place + 1, tag[2:], [scores[place]]])
        elif tag != "O":
            spans[-1][1] = place + 1
            spans[-1][3].append(scores[place])
    return [(first, end, label, float(np.exp(np.mean(values)))) for first, end, label, values in spans]


@pytest.mark.parametrize("names", [NAMES, WORDS, SINGLE, ALONE, MIXED])
def test_the_spans_are_those_of_the_likeliest_allowed_sequence_of_all(names):
    generator = np.random.default_rng(11)
    tags = TagSet.parse(names)
    decoder = SpanDecoder(tags)
    searched = 0
    for _ in range(150):
        num_subwords = int(generator.integers(1, 6))
        logits = generator.normal(0, 2, (num_subwords, len(names)))
        scores = np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).astype(np.float32)
        joined = generator.random(num_subwords) < 0.25
        joined[0] = False
        sequences = [s for s in itertools.product(names, repeat=num_subwords) if allowed(s, joined, names)]
        own = [[scores[place, names.index(tag)] for place, tag in enumerate(s)] for s in sequences]
        best = int(np.argmax([sum(values) for values in own]))
        starts = np.arange(num_subwords) * 10
        found = decoder.decode(scores, Subwords(starts, starts, starts + 7, joined))
        expected = spans_of(sequences[best], np.array(own[best]), joined)
        assert [(span.start / 10, (span.end - 7) / 10 + 1, tags.labels[span.label]) for span in found] == [
            row[:3] for row in expected
        ]
        np.testing.assert_allclose([span.probability for span in found], [row[3] for row in expected], rtol=1e-5)
        searched += sequences[best] != tuple(names[column] for column in scores.argmax(-1))
    assert searched > 20


def test_a_text_without_subwords_has_no_spans():
    none = np.empty(0, np.int64)
    decoder = SpanDecoder(TagSet.parse(NAMES))
    assert decoder.decode(np.empty((0, 5), np.float32), Subwords(none, none, none, none.astype(bool))) == []


def test_a_span_reaches_as_far_as_its_furthest_subword():
    scores = np.log(np.array([[0.01, 0.96, 0.01, 0.01, 0.01], [0.01, 0.01, 0.96, 0.01, 0.01]], np.float32))
    decoder = SpanDecoder(TagSet.parse(NAMES))
    places, joined = np.arange(2), np.array([False, True])
    [span] = decoder.decode(scores, Subwords(places, np.array([3, 3]), np.array([8, 4]), joined))
    assert span[:3] == (3, 8, 0)


def test_logits_that_are_not_numbers_are_an_error():
    with pytest.raises(FloatingPointError):
        SpanDecoder(TagSet.parse(NAMES)).decode_text(np.full((1, 5), np.nan, np.float32), "a", [(0, 1)])


@pytest.mark.parametrize("aggregation", ["sequence", "first", "max", "simple"])
def test_a_span_ends_with_an_accent_that_the_tokenizer_drops(aggregation):
    """As BERT's does, which reads "Jose\u0301" as "jose" and gives it the characters of that."""
    text, offsets = "Jose\u0301 x", [(0, 2), (2, 4), (6, 7)]
    tags = TagSet.parse(("O", "B-name", "I-name"))
    scores = np.array([[0, 5, 0], [0, 0, 5], [5, 0, 0]], np.float32)
    [span] = SpanDecoder(tags, aggregation).decode_text(scores, text, offsets, [0, 0, 1])
    assert (span.start, span.end) == (0, 5)
    scheme = TagScheme(("name",), covering=False)
    [trained] = predict_spans(log_softmax(scores), find_subwords(text, offsets), scheme, text)
    assert (trained.start, trained.end) == (0, 5)
