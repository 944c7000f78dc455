"""Texts as long as news items are, of random words, and the tokenizer that knows them.

Lengths are those of AG News (3,800 titles with descriptions of its test set) in the WordPiece tokens of the shipped
model's vocabulary, special tokens included, as `LENGTHS` lists them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

PERCENTS = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
LENGTHS = (20, 28, 35, 40, 45, 49, 53, 56, 60, 63, 69, 77, 88, 121, 254)
"""Tokens that so many percent of the texts do not exceed."""
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(vocabulary_size: int) -> list[str]:
    """The words that are a token each: of four letters."""
    combinations = ("".join(letters) for letters in itertools.product(_LETTERS, repeat=4))
    return list(itertools.islice(combinations, vocabulary_size - len(_SPECIAL)))


def make_tokenizer(vocabulary_size: int) -> Tokenizer:
    """Returns a lower-casing WordPiece tokenizer of exactly so many tokens, like BERT's."""
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *words(vocabulary_size)))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def random_lengths(count: int, *, seed: int) -> list[int]:
    """Lengths in tokens, distributed as those of AG News: evenly over its percentiles, in random order."""
    percents = (np.arange(count) + 0.5) * 100 / count
    lengths = np.interp(percents, PERCENTS, LENGTHS).round().astype(int)
    return [int(length) for length in np.random.default_rng(seed).permutation(lengths)]


def random_texts(vocabulary_size: int, count: int, *, seed: int, lengths: Sequence[int] | None = None) -> list[str]:
    """Texts of those lengths."""
    known = words(vocabulary_size)
    generator = np.random.default_rng(seed)
    return [
        " ".join(known[index] for index in generator.integers(0, len(known), max(1, length - 2)))
        for length in lengths or random_lengths(count, seed=seed)
    ]
