"""A text is cut where byte-level tokenizers read both sides as they read the whole."""

import random

import pytest

from headway_training.recipes import TokenizerSettings
from headway_training.served.text_score import cut_before_spaces
from headway_training.tokenizers import train_tokenizer


def some_text(seed: int) -> str:
    generator = random.Random(seed)
    words = ["king", "queen's", "naïve", "12th", "—", "\n\n", "O!", "doth\n", "  speak"]
    return " ".join(generator.choices(words, k=300))


@pytest.mark.parametrize("size", [1, 7, 40, 10_000])
def test_pieces_joined_are_the_text(size):
    text = some_text(0)
    pieces = cut_before_spaces(text, size)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_pieces_have_the_tokens_of_the_whole():
    text = some_text(1)
    tokenizer = train_tokenizer([text], TokenizerSettings(vocabulary_size=320), "generation")
    pieces = cut_before_spaces(text, 60)
    assert len(pieces) > 10
    tokens = [token for piece in pieces for token in tokenizer.encode(piece).ids]
    assert tokens == tokenizer.encode(text).ids


def test_a_text_without_spaces_is_cut_by_length():
    assert cut_before_spaces("abcdefgh", 3) == ["abc", "def", "gh"]
