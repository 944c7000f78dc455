"""The field's metrics, in percent.

N examples, C labels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sacrebleu.metrics.bleu import BLEU
from sklearn.metrics import accuracy_score, f1_score

_QUERIES_AT_ONCE = 500


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Share of predictions, integer (N,), that equal their labels, integer (N,)."""
    return float(100 * accuracy_score(labels, predictions))


def macro_f1(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Mean of the classes' F1, over the classes that occur among predictions or labels, integer (N,) each."""
    return float(100 * f1_score(labels, predictions, average="macro", zero_division=0.0))


def multi_label_f1(selected: ArrayLike, targets: ArrayLike) -> tuple[float, float]:
    """Micro and macro F1 of several labels; the latter is over the labels that apply or are selected anywhere.

    Args:
        selected: Which labels are selected, bool (N, C).
        targets: 1 where a label applies and 0 elsewhere, (N, C).
    """
    chosen, truth = np.asarray(selected, bool), np.asarray(targets) == 1
    present = np.flatnonzero((chosen | truth).any(axis=0))
    if not len(present):
        return 0.0, 0.0
    micro, macro = (
        float(100 * f1_score(truth, chosen, labels=present, average=average, zero_division=0.0))
        for average in ("micro", "macro")
    )
    return micro, macro


def recall_at(similarity: ArrayLike, right: ArrayLike, k: int) -> float:
    """Share of queries that have a right candidate among their `k` most similar ones.

    Args:
        similarity: float (queries, candidates).
        right: bool (queries, candidates).
        k: At least 1; a query with fewer candidates takes all.
    """
    scores, truth = np.asarray(similarity), np.asarray(right)
    nearest = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # (queries, k)
    return float(100 * np.take_along_axis(truth, nearest, axis=1).any(axis=1).mean())


def nearest_neighbour_labels(
    vectors: NDArray[np.float32],
    labels: NDArray[np.int64],
    queries: NDArray[np.float32],
    *,
    num_neighbours: int = 20,
    temperature: float = 0.07,
) -> NDArray[np.int64]:
    """Labels by weighted nearest neighbours: a neighbour has a vote of exp(cosine / temperature) (Wu et al. 2018, 3.4).

    Args:
        vectors: (N, D), whose labels are known.
        labels: (N), from 0.
        queries: (M, D).
        num_neighbours: How many of the nearest vote.
        temperature: The lower, the more a near one counts.

    Returns:
        (M).
    """
    known, asked = (rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12) for rows in (vectors, queries))
    count = min(num_neighbours, len(known))
    found = []
    for rows in np.array_split(asked, max(1, len(asked) // _QUERIES_AT_ONCE)):
        similarity = rows @ known.T  # (Q, N)
        nearest = np.argpartition(-similarity, count - 1, axis=1)[:, :count]  # (Q, count)
        weights = np.exp((np.take_along_axis(similarity, nearest, axis=1) - 1) / temperature)
        votes = np.zeros((len(rows), int(labels.max()) + 1))
        np.add.at(votes, (np.arange(len(rows))[:, None], labels[nearest]), weights)
        found.append(votes.argmax(axis=1))
    return np.concatenate(found)


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU, case mixed, tokenizer 13a (Post 2018), and sacreBLEU's signature."""
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


def span_scores(
    predictions: Sequence[Collection[tuple[int, int, int]]], references: Sequence[Collection[tuple[int, int, int]]]
) -> tuple[float, float, float]:
    """Precision, recall and F1 of labelled spans, over all texts together (Tjong Kim Sang 2003).

    A span is right if the reference has one of the same start, end and label. 0 / 0 counts as 0.

    Args:
        predictions: Start, end and label of the predicted spans of each text.
        references: Those of the true spans.
    """
    pairs = [(set(predicted), set(expected)) for predicted, expected in zip(predictions, references, strict=True)]
    num_right = sum(len(predicted & expected) for predicted, expected in pairs)
    num_predicted, num_expected = (sum(map(len, side)) for side in zip(*pairs, strict=True))
    return (
        100 * num_right / max(num_predicted, 1),
        100 * num_right / max(num_expected, 1),
        200 * num_right / max(num_predicted + num_expected, 1),
    )
