"""Simple methods, fitted and measured on the same data as a model, which has to be better than they are.

N examples, C labels, P pixels and channels of an image, H and W its height and width.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter, defaultdict

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import label as label_components

from headway_training.checkpoint import Baseline
from headway_training.data.examples import (
    LabeledImages,
    LabeledTexts,
    MultiLabeledTexts,
    ParallelTexts,
    PlainText,
    SpanLabeledTexts,
)
from headway_training.metrics import accuracy, corpus_bleu, multi_label_f1, span_scores

_WORD = re.compile(r"\w+|[^\w\s]")
NGRAM_ORDER = 5
NGRAM_CHARACTERS = 5_000_000
"""Most characters that the n-gram is fitted to, from the beginning of the training text."""
REGRESSION_ITERATIONS = 50


def _words(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return _WORD.findall(text.lower())


def naive_bayes_baseline(train: LabeledTexts, test: LabeledTexts) -> Baseline:
    """Naive Bayes on word counts (scikit-learn's multinomial one, its defaults)."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    classifier = make_pipeline(CountVectorizer(analyzer=_words), MultinomialNB())
    predictions = classifier.fit(train.texts, train.labels).predict(test.texts)
    return Baseline(name="Naive Bayes on word counts", metric="accuracy", value=accuracy(predictions, test.labels))


def multi_label_bayes_baseline(train: MultiLabeledTexts, test: MultiLabeledTexts, num_labels: int) -> Baseline:
    """Naive Bayes on word counts, one for each label."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MultiLabelBinarizer

    binarizer = MultiLabelBinarizer(classes=range(num_labels)).fit([()])
    classifier = make_pipeline(CountVectorizer(analyzer=_words), OneVsRestClassifier(MultinomialNB()))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Label .* is present in", UserWarning
        )  # it is then predicted always, or never
        classifier.fit(train.texts, binarizer.transform(train.labels))
    value, _ = multi_label_f1(classifier.predict(test.texts), binarizer.transform(test.labels))  # (N, C) each
    return Baseline(name="Naive Bayes on word counts, one for each label", metric="micro_f1", value=value)


def pixel_regression_baseline(train: LabeledImages, test: LabeledImages) -> Baseline:
    """Logistic regression on standardised pixels, stopped after a fixed number of iterations."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=1e-3, max_iter=REGRESSION_ITERATIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a baseline need not be at its optimum
        classifier.fit(train.images.reshape(len(train), -1).astype(np.float32), train.labels)  # (N, P)
    predictions = classifier.predict(test.images.reshape(len(test), -1).astype(np.float32))
    value = accuracy(predictions, test.labels)
    return Baseline(name="logistic regression on pixels", metric="accuracy", value=value)


def copy_baseline(test: ParallelTexts) -> Baseline:
    """The source sentences as they are."""
    score, _ = corpus_bleu(test.sources, test.targets)
    return Baseline(name="copy of the source", metric="sacrebleu", value=score)


def character_ngram_baseline(train: PlainText, test: str, order: int = NGRAM_ORDER) -> Baseline:
    """A character n-gram interpolated over all shorter contexts (Witten and Bell 1991, method C)."""
    text = next(train.parts(NGRAM_CHARACTERS))
    followers: dict[str, Counter[str]] = defaultdict(Counter)
    for end in range(len(text)):
        for length in range(min(order, end + 1)):
            followers[text[end - length : end]][text[end]] += 1
    counts = {context: (counter, counter.total(), len(counter)) for context, counter in followers.items()}
    uniform = 1 / (len(set(text)) + 1)  # one place for all characters that the training text does not have
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
    if len(text) < len(train):
        name += f" of the first {len(text):,} characters"
    return Baseline(name=name, metric="nats_per_character", value=nats / len(test))


def known_words_baseline(train: SpanLabeledTexts, test: SpanLabeledTexts) -> Baseline:
    """Each word's most frequent label; for an unknown word, the most frequent label of words that occur once."""
    words = _labeled_words(train)
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for word, label in words:
        counts[word][label] += 1
    rare = Counter(label for word, label in words if counts[word].total() == 1)
    fallback = (rare or Counter(label for _, label in words)).most_common(1)[0][0]
    best = {word: counter.most_common(1)[0][0] for word, counter in counts.items()}
    expected = _labeled_words(test)
    predicted = [best.get(word, best.get(word.lower(), fallback)) for word, _ in expected]
    value = accuracy(predicted, [label for _, label in expected])
    return Baseline(name="most frequent label of each given word", metric="word_accuracy", value=value)


def seen_spans_baseline(train: SpanLabeledTexts, test: SpanLabeledTexts) -> Baseline:
    """The longest word sequences that are a span in training, from left to right, with their most frequent label."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for words, label in _labeled_words(train):
        counts[words][label] += 1
    best = {words: counter.most_common(1)[0][0] for words, counter in counts.items()}
    longest = max(len(_WORD.findall(words)) for words in best)
    predicted = [_find_known(text, best, longest) for text in test.texts]
    _, _, f1 = span_scores(predicted, test.spans)
    return Baseline(name="spans seen in training", metric="span_f1", value=f1)


def fill_box(image: NDArray[np.uint8], left: float, top: float, right: float, bottom: float) -> NDArray[np.bool_]:
    """The whole of a box, whose sides are shares of the image, (H, W, 3): (H, W)."""
    height, width = image.shape[:2]
    mask = np.zeros((height, width), bool)
    mask[round(top * height) : round(bottom * height), round(left * width) : round(right * width)] = True
    return mask


def component_under_point(image: NDArray[np.uint8], x: float, y: float) -> NDArray[np.bool_]:
    """What hangs together with a point among the pixels on its side of Otsu's threshold (Otsu 1979): (H, W)."""
    grey = np.asarray(Image.fromarray(image).convert("L"))
    row, column = (min(int(share * side), side - 1) for share, side in zip((y, x), grey.shape, strict=True))
    bright = grey > otsu_threshold(grey)
    components, _ = label_components(bright == bright[row, column])
    mask: NDArray[np.bool_] = components == components[row, column]
    return mask


def otsu_threshold(grey: NDArray[np.uint8]) -> int:
    """The level up to which pixels are dark, so that the variance between dark and bright ones is the largest."""
    counts = np.bincount(grey.ravel(), minlength=256).astype(np.float64)
    below = counts.cumsum()
    sums = (counts * np.arange(256)).cumsum()
    above = below[-1] - below
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (sums / below - (sums[-1] - sums) / above) ** 2
    return int(np.nanargmax(np.where(above > 0, between, -1.0)))


def _labeled_words(examples: SpanLabeledTexts) -> list[tuple[str, int]]:
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
