"""Splitting pieces anew: the text stays, the spans stay, and the seed decides."""

import numpy as np
import pytest

from headway_training.data.examples import Span
from headway_training.recipes import TokenizerSettings
from headway_training.subwords import PieceSplitter
from headway_training.tagging import IGNORED, TagScheme, find_pieces, piece_tags
from headway_training.tokenizers import train_tokenizer

TEXTS = ["the running dogs weren't running, naïve  dogs ran", "running dogs and the runner's dog 🙂"] * 4
SCHEME = TagScheme(("word",), covering=True)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, TokenizerSettings(vocabulary_size=330, treebank_words=True), "token_classification")


def encoded(tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids and tags, every run of characters without white space a word."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    spans, start = [], 0
    for word in text.split():
        start = text.index(word, start)
        spans.append(Span(start, start + len(word), 0))
        start += len(word)
    tags = np.full(len(encoding.ids), IGNORED)
    pieces = find_pieces(text, encoding.offsets)
    tags[[piece.token for piece in pieces]] = piece_tags(pieces, spans, SCHEME)
    return np.array(encoding.ids), tags


def test_split_pieces_spell_the_same_text_and_begin_as_many_spans(tokenizer):
    splitter = PieceSplitter(tokenizer)
    random = np.random.default_rng(0)
    lengths = set()
    for _ in range(50):
        for text in TEXTS[:2]:
            ids, tags = encoded(tokenizer, text)
            split_ids, split_tags = splitter.split(ids, tags, SCHEME, 0.4, random)
            assert tokenizer.decode(split_ids.tolist()) == text
            assert (split_tags == SCHEME.begin(0)).sum() == (tags == SCHEME.begin(0)).sum()
            assert len(split_ids) == len(split_tags) >= len(ids)
            lengths.add(len(split_ids))
    assert len(lengths) > 5


def test_splitting_everything_leaves_bytes_with_the_tags_of_the_bytes(tokenizer):
    text = TEXTS[0]
    ids, tags = encoded(tokenizer, text)
    split_ids, split_tags = PieceSplitter(tokenizer).split(ids, tags, SCHEME, 1.0, np.random.default_rng(0))
    assert len(split_ids) == len(text.encode())
    blank = [byte in b" " for byte in text.encode()]
    assert [tag == IGNORED for tag in split_tags] == blank
    begins = [tag == SCHEME.begin(0) for tag in split_tags]
    assert begins == [not blank[i] and (i == 0 or blank[i - 1]) for i in range(len(blank))]


def test_the_same_generator_splits_alike_and_a_rate_of_nothing_not_at_all(tokenizer):
    ids, tags = encoded(tokenizer, TEXTS[1])
    splitter = PieceSplitter(tokenizer)
    one, other = (splitter.split(ids, tags, SCHEME, 0.3, np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(splitter.split(ids, tags, SCHEME, 0.0, np.random.default_rng(7))[0], ids)
