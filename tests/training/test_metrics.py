"""Metrics against numbers worked out by hand, and baselines on data whose answer is known."""

import math

import numpy as np
import pytest

from headway_training.baselines import (
    character_ngram_baseline,
    copy_baseline,
    known_words_baseline,
    naive_bayes_baseline,
    seen_spans_baseline,
)
from headway_training.data import LabeledTexts, ParallelTexts, PlainText, Span, SpanLabeledTexts
from headway_training.metrics import accuracy, answer_scores, corpus_bleu, macro_f1, multi_label_f1, span_scores


def test_accuracy_is_a_percentage():
    assert accuracy([0, 1, 2, 1], [0, 1, 1, 1]) == 75.0


def test_macro_f1_is_the_mean_over_classes():
    # Class 0: 1 right of 2 predicted and 1 actual: 2/3. Class 1: 1 of 1 and 2: 2/3. Class 2: 1 of 1 and 1: 1.
    assert macro_f1([0, 0, 1, 2], [0, 1, 1, 2]) == pytest.approx(100 * (2 / 3 + 2 / 3 + 1) / 3)


def test_a_class_that_is_never_seen_does_not_count_and_one_that_is_always_missed_does():
    assert macro_f1([0, 0], [0, 0]) == 100.0
    assert macro_f1([0, 0], [0, 1]) == pytest.approx(100 * (2 / 3 + 0) / 2)


def test_bleu_of_a_worked_example():
    # One sentence of 6 tokens: n-gram precisions 5/6, 4/5, 3/4, 2/3 and no brevity penalty.
    score, signature = corpus_bleu(["the cat sat on the rug"], ["the cat sat on the mat"])
    assert score == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert "case:mixed" in signature
    assert "tok:13a" in signature


def test_bleu_pays_for_brevity_and_for_case():
    # 4 of 4 tokens are right, of a reference of 5: exp(1 - 5/4).
    assert corpus_bleu(["a b c d"], ["a b c d e"])[0] == pytest.approx(100 * math.exp(-0.25))
    assert corpus_bleu(["A B C D"], ["a b c d"])[0] < 10


def test_copying_the_source_is_a_baseline():
    texts = ParallelTexts(sources=["a b c d e"], targets=["a b c d e"])
    assert copy_baseline(texts).value == pytest.approx(100)


def test_naive_bayes_learns_a_word_that_gives_the_class_away():
    train = LabeledTexts(texts=["Good day", "good film", "bad day", "bad film"], labels=[0, 0, 1, 1])
    test = LabeledTexts(texts=["GOOD night", "bad night"], labels=[0, 1])
    assert naive_bayes_baseline(train, test).value == 100.0


def test_the_ngram_of_a_worked_example():
    # Order 1, "aab": counts a 2, b 1; 2 kinds; the uniform share is 1/3. P(a) = (2 + 2/3) / 5, P(c) = (2/3) / 5.
    value = character_ngram_baseline(PlainText("aab"), "ac", order=1).value
    assert value == pytest.approx(-(math.log(8 / 15) + math.log(2 / 15)) / 2)


def test_a_longer_context_predicts_a_regular_text_better():
    one, five = (character_ngram_baseline(PlainText("abcde" * 50), "abcde" * 5, order=order).value for order in (1, 5))
    assert one == pytest.approx(math.log(5), rel=0.05)
    assert five < 0.3


def test_f1_of_several_labels_is_that_of_counting():
    selected = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
    truth = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0]])
    micro, macro = multi_label_f1(selected, truth)
    assert micro == pytest.approx(100 * 2 * 2 / (3 + 4))
    assert macro == pytest.approx(100 * (2 * 1 / 4 + 2 * 1 / 3) / 2)  # the third label is nowhere
    assert multi_label_f1(np.zeros((2, 3), bool), np.zeros((2, 3))) == (0, 0)


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


@pytest.mark.parametrize(
    ("found", "right", "f1", "exact"),
    [
        ("The  Lighthouse!", ["a lighthouse"], 100, 100),
        ("in 1851", ["1851", "in the year 1851"], 100 * 4 / 5, 0),
        ("1851 1851", ["1851"], 100 * 2 / 3, 0),
        ("anthem", ["an them"], 0, 0),
        ("the", ["an"], 100, 100),
        ("", [], 100, 100),
        ("", ["1851"], 0, 0),
        ("1851", [], 0, 0),
        ("1851", ["", "!"], 0, 0),
    ],
)
def test_answers_are_compared_as_squad_defines_it(found, right, f1, exact):
    np.testing.assert_allclose(answer_scores([found], [right]), (f1, exact))
    np.testing.assert_allclose(answer_scores([found, "x"], [right, ["x"]]), ((f1 + 100) / 2, (exact + 100) / 2))
