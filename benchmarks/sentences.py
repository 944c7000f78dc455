"""Source sentences of random words, as long as those of Multi30k."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from prompts import only_id, van_der_corput
from random_gpt import words
from tokenizers import Tokenizer

_QUANTILES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_LENGTHS = (6, 10, 11, 12, 13, 14, 15, 17, 18, 20, 23, 27, 41)
"""Tokens of the English sentences of Multi30k's test set of 2016 at these quantiles, by the tokenizer of the shipped
English-German model (6,000 tokens). The German ones have 0.7 tokens more on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """A sentence as text and as the tokens that it is. Its translation is to have as many."""

    text: str
    token_ids: tuple[int, ...]


class SentenceSource:
    """Draws sentences of random words, each one token.

    Two sources with the same arguments give the same sentences. Their lengths spread evenly over the distribution
    within any few that follow each other.
    """

    def __init__(self, tokenizer: Tokenizer, *, seed: int) -> None:
        self._words = [(word, only_id(tokenizer, word)) for word in words(tokenizer.get_vocab_size())]
        self._generator = np.random.default_rng(seed)
        self._count = 0

    def take(self, count: int) -> list[Sentence]:
        """Returns the next `count` sentences."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Sentence:
        self._count += 1
        length = round(float(np.interp(van_der_corput(self._count), _QUANTILES, _LENGTHS)))
        drawn = [self._words[index] for index in self._generator.integers(0, len(self._words), length)]
        return Sentence(text="".join(word for word, _ in drawn), token_ids=tuple(token for _, token in drawn))
