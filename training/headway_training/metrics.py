"""The field's metrics, on plain sequences.

N examples, C labels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import ArrayLike
from sacrebleu.metrics.bleu import BLEU


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Percentage of predictions, integer (N,), that equal their labels, integer (N,)."""
    return float(np.mean(np.asarray(predictions) == np.asarray(labels)) * 100)


def macro_f1(predictions: ArrayLike, labels: ArrayLike, num_classes: int) -> float:
    """Mean over the classes of F1, in percent; a class that is neither there nor predicted is left out."""
    predicted, actual = np.asarray(predictions), np.asarray(labels)
    scores = []
    for index in range(num_classes):
        num_actual, num_predicted = np.sum(actual == index), np.sum(predicted == index)
        if num_actual + num_predicted:
            num_right = np.sum((actual == index) & (predicted == index))
            scores.append(2 * num_right / (num_actual + num_predicted))
    return float(np.mean(scores) * 100)


def multi_label_f1(selected: ArrayLike, targets: ArrayLike) -> tuple[float, float]:
    """Micro and macro F1 of several labels, in percent; a label that is neither there nor selected is left out.

    Args:
        selected: Which labels were said to apply, bool (N, C).
        targets: 1 where a label applies and 0 elsewhere, (N, C).
    """
    chosen, truth = np.asarray(selected, bool), np.asarray(targets) == 1
    hits, total = (chosen & truth).sum(axis=0), chosen.sum(axis=0) + truth.sum(axis=0)  # (C)
    micro = 2 * hits.sum() / max(1, int(total.sum()))
    present = total > 0
    macro = np.mean(2 * hits[present] / total[present]) if present.any() else 0.0
    return float(micro * 100), float(macro * 100)


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU, case mixed, tokenizer 13a (Post 2018), and sacreBLEU's signature."""
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


def span_scores(
    predictions: Sequence[Collection[tuple[int, int, int]]], references: Sequence[Collection[tuple[int, int, int]]]
) -> tuple[float, float, float]:
    """Precision, recall and F1 of labelled spans, in percent, over all texts together (Tjong Kim Sang 2003).

    A span is right if the reference has one of the same start, end and label. Where nothing is predicted, or nothing is
    to be found, what would be 0 / 0 is 0.

    Args:
        predictions: Start, end and label of the spans of each text.
        references: The same, as they should be.
    """
    pairs = [(set(predicted), set(expected)) for predicted, expected in zip(predictions, references, strict=True)]
    num_right = sum(len(predicted & expected) for predicted, expected in pairs)
    num_predicted, num_expected = (sum(map(len, side)) for side in zip(*pairs, strict=True))
    return (
        100 * num_right / max(num_predicted, 1),
        100 * num_right / max(num_expected, 1),
        200 * num_right / max(num_predicted + num_expected, 1),
    )
