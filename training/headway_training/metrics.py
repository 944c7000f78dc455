"""The field's metrics, in percent.

N examples, C labels.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

_QUERIES_AT_ONCE = 500
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_SPOKEN_WORD = re.compile(r"\w+(?:'\w+)*")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CIDER_ORDER = 4
_CIDER_DEVIATION = 6.0
"""Of the penalty of another length, in words."""
_STEMMERS: Mapping[str, str] = {"en": "english", "de": "german"}
"""Names of the Snowball stemmers, by language."""


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Share of predictions, integer (N,), that equal their labels, integer (N,)."""
    from sklearn.metrics import accuracy_score

    return float(100 * accuracy_score(labels, predictions))


def macro_f1(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Mean of the classes' F1, over the classes that occur among predictions or labels, integer (N,) each."""
    from sklearn.metrics import f1_score

    return float(100 * f1_score(labels, predictions, average="macro", zero_division=0.0))


def answer_scores(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Mean F1 of answers' words, and share of exact answers (Rajpurkar et al. 2016, section 6.1).

    Texts are compared in lower case, without punctuation and articles. Each prediction is held against the right answer
    that is nearest to it; where there is none, only an empty prediction is right (Rajpurkar et al. 2018, section 4).

    Args:
        predictions: The answer to each question; empty: there is none.
        answers: Those that are right, by question.

    Returns:
        F1 and exact match, in percent.
    """
    f1 = exact = 0.0
    for prediction, right in zip(predictions, answers, strict=True):
        found = _answer_words(prediction)
        references = [words for words in map(_answer_words, right) if words] or [[]]
        f1 += max(_word_f1(found, words) for words in references)
        exact += float(found in references)
    return 100 * f1 / len(predictions), 100 * exact / len(predictions)


def _answer_words(text: str) -> list[str]:
    """Returns the words of an answer by which it is compared."""
    return _ARTICLE.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def _word_f1(found: Sequence[str], expected: Sequence[str]) -> float:
    """Returns the F1 of two bags of words, from 0 to 1."""
    if not found or not expected:
        return float(found == expected)
    return 2 * (Counter(found) & Counter(expected)).total() / (len(found) + len(expected))


def multi_label_f1(selected: ArrayLike, targets: ArrayLike) -> tuple[float, float]:
    """Micro and macro F1 of several labels; the latter is over the labels that apply or are selected anywhere.

    Args:
        selected: Which labels are selected, bool (N, C).
        targets: 1 where a label applies and 0 elsewhere, (N, C).
    """
    from sklearn.metrics import f1_score

    chosen, truth = np.asarray(selected, bool), np.asarray(targets) == 1
    present = np.flatnonzero((chosen | truth).any(axis=0))
    if not len(present):
        return 0.0, 0.0
    micro, macro = (
        float(100 * f1_score(truth, chosen, labels=present, average=average, zero_division=0.0))
        for average in ("micro", "macro")
    )
    return micro, macro


def frechet_distance(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """The distance of two sets of features as normal distributions (Heusel et al. 2017, equation 6).

    It is |m - n|^2 + tr(C + D - 2 (C D)^(1/2)) of means m, n and covariances C, D. It depends on the features and on
    the number of rows: compare figures of the same features and of as many rows.

    Args:
        first: (N, D), at least two rows.
        second: (M, D), likewise.
    """
    means = [features.mean(axis=0, dtype=np.float64) for features in (first, second)]
    covariances = [np.atleast_2d(np.cov(features.astype(np.float64), rowvar=False)) for features in (first, second)]
    values, vectors = np.linalg.eigh(covariances[0])
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    # The eigenvalues of C D are those of the symmetric C^(1/2) D C^(1/2).
    shared = np.sqrt(np.linalg.eigvalsh(root @ covariances[1] @ root).clip(min=0)).sum()
    distance = np.square(means[0] - means[1]).sum() + np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * shared
    return max(float(distance), 0.0)


def r_precision(similarity: NDArray[np.floating], candidates: NDArray[np.int64]) -> float:
    """Share of images that are nearest to their own text among those of some others (Xu et al. 2018, section 4.1).

    Args:
        similarity: Of each image with each text, (N, T).
        candidates: The texts that each image is compared with, (N, K); the first is its own.
    """
    nearest = np.take_along_axis(similarity, candidates, axis=1).argmax(axis=1)
    return float(100 * (nearest == 0).mean())


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
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


def caption_words(text: str) -> list[str]:
    """The words of a caption in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def caption_bleu(captions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU with n-grams of up to four words, held to several references; `references` has those of each image.

    Of lower-case words without punctuation, as captions are compared since Chen et al. (2015). All images have as many
    references as the first, or more, of which these are read.
    """
    count = min(map(len, references))
    columns = [[" ".join(caption_words(several[i])) for several in references] for i in range(count)]
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(tokenize="none", force=True)
    return float(metric.corpus_score([" ".join(caption_words(caption)) for caption in captions], columns).score)


def caption_cider(captions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """CIDEr-D (Vedantam et al. 2015, section 5) in percent: what captions and references have in common.

    n-grams of one to four words count the more, the fewer of the images have them in their references. As the authors'
    program has it: words are not stemmed, and a caption of at least four words that is its only reference has 1,000 %.

    Args:
        captions: One of each image.
        references: Those of each image; at least one.
    """
    truths = [[_ngrams(one) for one in several] for several in references]
    documents = Counter(gram for several in truths for gram in set().union(*several))
    log_images = math.log(max(len(references), 2))  # of one image every n-gram would weigh nothing
    scores = []
    for caption, several in zip(captions, truths, strict=True):
        own = _weighted(_ngrams(caption), documents, log_images)
        scores.append(np.mean([_cider_d(own, _weighted(one, documents, log_images)) for one in several]))
    return float(1000 * np.mean(scores))


def _ngrams(text: str) -> Counter[tuple[str, ...]]:
    words = caption_words(text)
    return Counter(
        tuple(words[start : start + order])
        for order in range(1, _CIDER_ORDER + 1)
        for start in range(len(words) - order + 1)
    )


class _Weighted(list[dict[tuple[str, ...], float]]):
    """The weights of a text's n-grams, by their order, with the number of its words."""

    num_words: int = 0


def _weighted(
    counts: Counter[tuple[str, ...]], documents: Mapping[tuple[str, ...], int], log_images: float
) -> _Weighted:
    weights = _Weighted({} for _ in range(_CIDER_ORDER))
    for gram, count in counts.items():
        weights[len(gram) - 1][gram] = count * (log_images - math.log(max(documents.get(gram, 0), 1)))
        if len(gram) == 1:
            weights.num_words += count
    return weights


def _cider_d(own: _Weighted, truth: _Weighted) -> float:
    """Equation 5, without its factor of 10."""
    distance = own.num_words - truth.num_words
    penalty = math.exp(-(distance**2) / (2 * _CIDER_DEVIATION**2))
    similarities = []
    for mine, theirs in zip(own, truth, strict=True):
        common = sum(min(weight, theirs[gram]) * theirs[gram] for gram, weight in mine.items() if gram in theirs)
        norms = math.sqrt(sum(w * w for w in mine.values())) * math.sqrt(sum(w * w for w in theirs.values()))
        similarities.append(common / norms if norms else 0.0)
    return penalty * sum(similarities) / _CIDER_ORDER


def caption_meteor(captions: Sequence[str], references: Sequence[Sequence[str]], language: str) -> float:
    """METEOR (Banerjee and Lavie 2005) in percent, the mean over images, by the words and the stems of words alone.

    NLTK's, with the stemmer of the language, where there is one, and without synonyms: there is no free WordNet of
    every language. The figure of a caption is that of the best of its references.
    """
    from nltk.translate.meteor_score import meteor_score

    options = {"stemmer": _Stemmer(_STEMMERS.get(language)), "wordnet": _NO_SYNONYMS}
    scores = [
        meteor_score([caption_words(one) for one in several], caption_words(caption), **options)
        for caption, several in zip(captions, references, strict=True)
    ]
    return float(100 * np.mean(scores))


class _Stemmer:
    """A Snowball stemmer that remembers; without a name, words are their stems."""

    def __init__(self, name: str | None) -> None:
        from nltk.stem.snowball import SnowballStemmer

        self.stem: Callable[[str], str] = cache(SnowballStemmer(name).stem) if name else str


class _NoSynonyms:
    """A WordNet that knows no word."""

    def synsets(self, _word: str) -> tuple[()]:
        return ()


_NO_SYNONYMS = _NoSynonyms()


def transcript_words(text: str) -> list[str]:
    """The words of a transcript in lower case, without punctuation; a hyphen is between two."""
    return _SPOKEN_WORD.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))


def word_errors(transcript: Sequence[str], reference: Sequence[str]) -> int:
    """Fewest words to substitute, delete and insert that make a transcript the reference (Levenshtein 1966)."""
    row = list(range(len(reference) + 1))  # of an empty transcript
    for number, word in enumerate(transcript, 1):
        before, row = row, [number]
        for place, wanted in enumerate(reference):
            row.append(min(before[place] + (word != wanted), before[place + 1] + 1, row[place] + 1))
    return row[-1]


def word_error_rate(transcripts: Sequence[str], references: Sequence[str]) -> float:
    """Word errors in percent of the references' words, over all transcripts together; the lower the better.

    Of lower-case words without punctuation. It may be above 100, as words may be inserted.
    """
    pairs = [
        (transcript_words(own), transcript_words(truth)) for own, truth in zip(transcripts, references, strict=True)
    ]
    num_words = sum(len(truth) for _, truth in pairs)
    return 100 * sum(word_errors(own, truth) for own, truth in pairs) / max(num_words, 1)


def score_transcripts(
    transcripts: Sequence[str], references: Sequence[str], sources: Sequence[str]
) -> dict[str, float]:
    """`wer` in percent: of all, and where there are several sources of each by its name, as `wer_fsdd`."""
    found = {"wer": word_error_rate(transcripts, references)}
    names = dict.fromkeys(sources)
    for name in names if len(names) > 1 else ():
        rows = [row for row, source in enumerate(sources) if source == name]
        found[f"wer_{name}"] = word_error_rate([transcripts[row] for row in rows], [references[row] for row in rows])
    return found


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundObjects:
    """Objects that a detector has found in an image, K of them."""

    scores: NDArray[np.float32]
    """(K,)."""
    labels: NDArray[np.int64]
    """(K,)."""
    boxes: NDArray[np.float32]
    """(K, 4): left, top, right and bottom, in the unit of the true ones."""


def box_iou(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.float64]:
    """Intersection over union of boxes (N, 4) and (M, 4): left, top, right and bottom -> (N, M)."""
    one, other = np.asarray(first, np.float64)[:, None], np.asarray(second, np.float64)[None]
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    inner = np.clip(sides, 0, None).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (one, other)]
    union: NDArray[np.float64] = inner / np.maximum(areas[0] + areas[1] - inner, np.finfo(np.float64).tiny)
    return union


def mean_average_precision(
    found: Sequence[FoundObjects],
    truth: Sequence[tuple[NDArray[np.floating], NDArray[np.integer]]],
    *,
    overlap: float = 0.5,
) -> float:
    """Mean over labels of the area under precision by recall, of all points (Everingham et al. 2010, section 4.2).

    An object is right if it is the one of the highest score whose intersection over union with a true object of its
    label is at least `overlap`. Labels without true objects are left out.

    Args:
        found: Objects of each image.
        truth: True boxes (N, 4) and labels (N,) of each image.
        overlap: Least intersection over union.
    """
    everything = np.concatenate([labels for _, labels in truth])
    precisions = []
    for label in np.unique(everything):
        hits: list[tuple[float, bool]] = []
        for objects, (boxes, labels) in zip(found, truth, strict=True):
            chosen = np.flatnonzero(objects.labels == label)
            chosen = chosen[np.argsort(-objects.scores[chosen], kind="stable")]
            of_label = boxes[labels == label]
            ious = box_iou(objects.boxes[chosen], of_label)  # (K, N)
            is_free = np.ones(len(of_label), bool)
            for row, ious_of_row in zip(chosen, ious, strict=True):
                best = int(ious_of_row.argmax()) if len(of_label) else -1
                is_hit = best >= 0 and ious_of_row[best] >= overlap and bool(is_free[best])
                if is_hit:
                    is_free[best] = False
                hits.append((float(objects.scores[row]), is_hit))
        hits.sort(key=lambda one: -one[0])
        right = np.cumsum([is_hit for _, is_hit in hits])
        precision = right / np.arange(1, len(hits) + 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]  # no higher recall has a higher precision
        steps = np.diff(right, prepend=0)
        precisions.append(float((precision * steps).sum() / (everything == label).sum()) if hits else 0.0)
    return 100 * float(np.mean(precisions))
