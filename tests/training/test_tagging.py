"""Tags of subwords and back: what is trained on, and what is made of a model's answer."""

import itertools

import numpy as np
import pytest

from headway_training.data.examples import Span
from headway_training.tagging import (
    IGNORED,
    Subword,
    TagScheme,
    find_subwords,
    labels_of_words,
    likeliest_tags,
    predict_spans,
    subword_tags,
)

NAMES = TagScheme(("person", "place"), covering=False)
WORDS = TagScheme(("noun", "verb", "mark"), covering=True)


def certain(tags: list[int], num_tags: int, num_tokens: int, subwords: list[Subword]) -> np.ndarray:
    """Log-probabilities of a model that has no doubt."""
    scores = np.full((num_tokens, num_tags), -20.0, np.float32)
    for subword, tag in zip(subwords, tags, strict=True):
        scores[subword.token, tag] = 0
    return scores


def test_tags_are_named_in_the_order_of_the_outputs():
    assert NAMES.names == ("O", "B-person", "I-person", "B-place", "I-place")
    assert WORDS.names == ("B-noun", "I-noun", "B-verb", "I-verb", "B-mark", "I-mark")
    assert [NAMES.label(tag) for tag in range(5)] == [None, 0, 0, 1, 1]


def test_the_first_subword_of_a_span_begins_it_and_the_others_continue():
    text = "Ada Lovelace saw Oslo"
    offsets = [(0, 0), (0, 3), (3, 8), (8, 12), (12, 16), (16, 18), (18, 21), (0, 0)]
    subwords = find_subwords(text, offsets)
    tags = subword_tags(subwords, [Span(0, 12, 0), Span(17, 21, 1)], NAMES)
    assert [NAMES.names[tag] for tag in tags] == ["B-person", "I-person", "I-person", "O", "B-place", "I-place"]


def test_a_subword_that_holds_two_words_is_the_first():
    subwords = find_subwords("dont go", [(0, 4), (4, 7)])
    tags = subword_tags(subwords, [Span(0, 2, 1), Span(2, 4, 2), Span(5, 7, 1)], WORDS)
    assert [WORDS.names[tag] for tag in tags] == ["B-verb", "B-verb"]


def test_a_span_within_a_subword_begins_there():
    subwords = find_subwords("(Oslo)", [(0, 6)])
    assert subword_tags(subwords, [Span(1, 5, 1)], NAMES) == [NAMES.begin(1)]


def test_what_no_word_covers_is_not_trained_on():
    subwords = find_subwords("go go", [(0, 2), (2, 5)])
    assert subword_tags(subwords, [Span(0, 2, 1)], WORDS) == [WORDS.begin(1), IGNORED]


def test_tokens_that_share_a_character_are_one_in_a_span():
    subwords = find_subwords("🙂 Oslo", [(0, 1), (0, 1), (0, 1), (0, 1), (1, 6)])
    assert [subword.joined for subword in subwords] == [False, True, True, True, False]
    tags = subword_tags(subwords, [Span(0, 1, 0), Span(2, 6, 1)], NAMES)
    assert [NAMES.names[tag] for tag in tags] == ["B-person", *["I-person"] * 3, "B-place"]


@pytest.mark.parametrize("scheme", [NAMES, WORDS])
def test_spans_come_back_from_their_tags(scheme):
    generator = np.random.default_rng(5)
    for _ in range(100):
        ends = np.sort(generator.choice(np.arange(1, 40), generator.integers(2, 9), replace=False)).tolist()
        borders = list(itertools.pairwise([0, *ends]))
        if not scheme.covering:
            borders = [border for border in borders if generator.random() < 0.6]
        spans = [Span(a, b, int(generator.integers(len(scheme.labels)))) for a, b in borders]
        cuts = sorted({0, 40, *(point for span in spans for point in span[:2]), *generator.integers(1, 40, 8).tolist()})
        text = "x" * 40
        subwords = find_subwords(text, list(itertools.pairwise(cuts)))
        tags = subword_tags(subwords, spans, scheme)
        known = [(subword, tag) for subword, tag in zip(subwords, tags, strict=True) if tag != IGNORED]
        subwords, tags = [subword for subword, _ in known], [tag for _, tag in known]
        found = predict_spans(certain(tags, len(scheme.names), len(cuts), subwords), subwords, scheme)
        assert [tuple(span)[:3] for span in found] == [tuple(span) for span in spans]
        assert all(span.probability == 1 for span in found)


def test_the_likeliest_tags_are_the_best_of_all_that_are_allowed():
    generator = np.random.default_rng(6)
    names = NAMES.names
    for _ in range(100):
        scores = np.log(generator.dirichlet(np.ones(5), 4)).astype(np.float32)
        subwords = [
            Subword(place, place, place + 1, joined=bool(place) and generator.random() < 0.3) for place in range(4)
        ]

        def is_allowed(tags: tuple[int, ...], subwords: list[Subword] = subwords) -> bool:
            pairs = zip(["O", *(names[tag] for tag in tags)], (names[tag] for tag in tags), subwords, strict=False)
            return all(
                (not after.startswith("I-") or before[2:] == after[2:])
                and not (subword.joined and (after.startswith("B-") or before[2:] != after[2:]))
                for before, after, subword in pairs
            )

        best = max(
            filter(is_allowed, itertools.product(range(5), repeat=4)),
            key=lambda tags: sum(scores[place, tag] for place, tag in enumerate(tags)),
        )
        assert likeliest_tags(scores, subwords, NAMES) == list(best)


def test_the_probability_of_a_span_is_the_geometric_mean_of_its_tags():
    scores = np.log(np.array([[0.1, 0.8, 0.05, 0.04, 0.01], [0.2, 0.2, 0.5, 0.05, 0.05]], np.float32))
    [span] = predict_spans(scores, find_subwords("Ada L", [(0, 3), (3, 5)]), NAMES)
    assert (span.start, span.end, span.label) == (0, 5, 0)
    assert span.probability == pytest.approx((0.8 * 0.5) ** 0.5)


def test_given_words_are_labelled_whatever_borders_the_model_would_set():
    text = "dogs run"
    subwords = find_subwords(text, [(0, 2), (2, 4), (4, 8)])
    scores = certain([WORDS.begin(0), WORDS.begin(1), WORDS.begin(1)], 6, 3, subwords)
    scores[1, WORDS.inside(0)] = -1
    words = [Span(0, 4, 0), Span(5, 8, 1)]
    assert [tuple(span)[:2] for span in predict_spans(scores, subwords, WORDS)] == [(0, 2), (2, 4), (5, 8)]
    assert labels_of_words(scores, subwords, words, WORDS) == [0, 1]


def test_a_given_word_within_a_subword_has_the_label_of_the_subword():
    subwords = find_subwords("dont", [(0, 4)])
    scores = certain([WORDS.begin(1)], 6, 1, subwords)
    assert labels_of_words(scores, subwords, [Span(0, 2, 1), Span(2, 4, 2)], WORDS) == [1, 1]


def test_a_text_without_subwords_has_no_spans():
    assert predict_spans(np.empty((2, 5), np.float32), find_subwords(" ", [(0, 0), (0, 1)]), NAMES) == []
