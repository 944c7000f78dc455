"""Simple methods, fitted and measured on the same data as a model: what it must beat to be worth its size.

N examples, P pixels and channels of an image.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter, defaultdict

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from headway_training.checkpoint import Baseline
from headway_training.data.examples import LabeledImages, LabeledTexts, MultiLabeledTexts, ParallelTexts
from headway_training.metrics import accuracy, corpus_bleu, multi_label_f1

_WORDS = re.compile(r"\w+|[^\w\s]")
NGRAM_ORDER = 5
REGRESSION_ITERATIONS = 50


def _words(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return _WORDS.findall(text.lower())


def naive_bayes_baseline(train: LabeledTexts, test: LabeledTexts) -> Baseline:
    """Naive Bayes on word counts (scikit-learn's multinomial one, its defaults)."""
    classifier = make_pipeline(CountVectorizer(analyzer=_words), MultinomialNB())
    predictions = classifier.fit(train.texts, train.labels).predict(test.texts)
    return Baseline(name="Naive Bayes on word counts", metric="accuracy", value=accuracy(predictions, test.labels))


def multi_label_bayes_baseline(train: MultiLabeledTexts, test: MultiLabeledTexts, num_labels: int) -> Baseline:
    """Naive Bayes on word counts, which tells of each label by itself whether it applies."""
    counter = CountVectorizer(analyzer=_words)
    train_counts, test_counts = counter.fit_transform(train.texts), counter.transform(test.texts)
    columns = []
    for label in range(num_labels):
        applies = [label in several for several in train.labels]
        columns.append(MultinomialNB().fit(train_counts, applies).predict(test_counts))
    truth = np.array([[label in several for label in range(num_labels)] for several in test.labels])  # (N, C)
    value, _ = multi_label_f1(np.stack(columns, axis=1), truth)
    return Baseline(name="Naive Bayes on word counts, a label at a time", metric="micro_f1", value=value)


def pixel_regression_baseline(train: LabeledImages, test: LabeledImages) -> Baseline:
    """Logistic regression on standardised pixels, stopped after a fixed number of iterations."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=1e-3, max_iter=REGRESSION_ITERATIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a baseline need not be at its optimum
        classifier.fit(train.images.reshape(len(train), -1).astype(np.float32), train.labels)  # (N, P)
    predictions = classifier.predict(test.images.reshape(len(test), -1).astype(np.float32))
    value = accuracy(predictions, test.labels)
    return Baseline(name="logistic regression on pixels", metric="accuracy", value=value)


def copy_baseline(test: ParallelTexts) -> Baseline:
    """The source sentences handed back as they are."""
    score, _ = corpus_bleu(test.sources, test.targets)
    return Baseline(name="copy of the source", metric="sacrebleu", value=score)


def character_ngram_baseline(train: str, test: str, order: int = NGRAM_ORDER) -> Baseline:
    """A character n-gram interpolated over all shorter contexts (Witten and Bell 1991, method C)."""
    followers: dict[str, Counter[str]] = defaultdict(Counter)
    for end in range(len(train)):
        for length in range(min(order, end + 1)):
            followers[train[end - length : end]][train[end]] += 1
    counts = {context: (counter, counter.total(), len(counter)) for context, counter in followers.items()}
    uniform = 1 / (len(set(train)) + 1)  # one place for whatever the training text does not have
    nats = 0.0
    for end in range(len(test)):
        probability = uniform
        for length in range(min(order, end + 1)):
            found = counts.get(test[end - length : end])
            if found is None:
                break
            counter, total, kinds = found
            probability = (counter[test[end]] + kinds * probability) / (total + kinds)
        nats -= math.log(probability)
    name = f"character {order}-gram (Witten-Bell)"
    return Baseline(name=name, metric="nats_per_character", value=nats / len(test))
