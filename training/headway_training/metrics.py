"""The field's metrics, on plain sequences.

N examples, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence

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
