"""Metrics against numbers worked out by hand, and baselines on data whose answer is known."""

import math

import pytest

from headway_training.baselines import character_ngram_baseline, copy_baseline, naive_bayes_baseline
from headway_training.data import LabeledTexts, ParallelTexts
from headway_training.metrics import accuracy, corpus_bleu, macro_f1


def test_accuracy_is_a_percentage():
    assert accuracy([0, 1, 2, 1], [0, 1, 1, 1]) == 75.0


def test_macro_f1_is_the_mean_over_classes():
    # Class 0: 1 right of 2 predicted and 1 actual: 2/3. Class 1: 1 of 1 and 2: 2/3. Class 2: 1 of 1 and 1: 1.
    assert macro_f1([0, 0, 1, 2], [0, 1, 1, 2], 3) == pytest.approx(100 * (2 / 3 + 2 / 3 + 1) / 3)


def test_a_class_that_is_never_seen_does_not_count_and_one_that_is_always_missed_does():
    assert macro_f1([0, 0], [0, 0], 3) == 100.0
    assert macro_f1([0, 0], [0, 1], 2) == pytest.approx(100 * (2 / 3 + 0) / 2)


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
    value = character_ngram_baseline("aab", "ac", order=1).value
    assert value == pytest.approx(-(math.log(8 / 15) + math.log(2 / 15)) / 2)


def test_a_longer_context_predicts_a_regular_text_better():
    one, five = (character_ngram_baseline("abcde" * 50, "abcde" * 5, order=order).value for order in (1, 5))
    assert one == pytest.approx(math.log(5), rel=0.05)
    assert five < 0.3
