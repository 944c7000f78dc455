"""Span scores and baselines on cases that can be counted by hand."""

import pytest

from headway_training.data.examples import Span, SpanLabeledTexts
from headway_training.metrics import span_scores
from headway_training.span_baselines import known_words_baseline, seen_spans_baseline


def test_a_span_is_right_with_start_end_and_label():
    expected = [[(0, 3, 0), (5, 9, 1)], [(2, 4, 0)], []]
    predicted = [[(0, 3, 0), (5, 8, 1)], [(2, 4, 1)], [(0, 1, 0)]]
    precision, recall, f1 = span_scores(predicted, expected)
    assert (precision, recall) == (25.0, pytest.approx(100 / 3))
    assert f1 == pytest.approx(200 / 7)


def test_all_right_is_a_hundred_and_nothing_is_nothing():
    spans = [[(0, 3, 0)], [(1, 2, 1)]]
    assert span_scores(spans, spans) == (100, 100, 100)
    assert span_scores([[], []], spans) == (0, 0, 0)
    assert span_scores([[]], [[]]) == (0, 0, 0)


def texts(*rows: tuple[str, list[tuple[str, int]]], covering: bool) -> SpanLabeledTexts:
    spans = []
    for text, named in rows:
        spans.append(tuple(Span(text.index(part), text.index(part) + len(part), label) for part, label in named))
    return SpanLabeledTexts(texts=[text for text, _ in rows], spans=spans, covering=covering)


def test_known_words_have_their_most_frequent_label_and_others_that_of_rare_words():
    train = texts(
        ("a run", [("a", 0), ("run", 1)]), ("I run", [("I", 2), ("run", 1)]), ("run", [("run", 2)]), covering=True
    )
    test = texts(("Run a mile", [("Run", 1), ("a", 0), ("mile", 2)]), ("I", [("I", 2)]), covering=True)
    baseline = known_words_baseline(train, test)
    assert (baseline.metric, baseline.value) == ("word_accuracy", 75.0)  # "mile" gets label 0, the first of equals


def test_spans_seen_in_training_are_found_the_longest_first():
    train = texts(
        ("to New York", [("New York", 0)]), ("York", [("York", 1)]), ("so old", []), ("in York", [("York", 1)]),
        covering=False,
    )  # fmt: skip
    test = texts(("New York, York and Oslo", [("New York", 0), ("Oslo", 0)]), ("York!", [("York", 1)]), covering=False)
    baseline = seen_spans_baseline(train, test)
    assert baseline.metric == "span_f1"
    assert baseline.value == pytest.approx(200 * 2 / (3 + 3))
