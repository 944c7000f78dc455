"""Prompts of exact lengths for a `RandomModel`, no two of them alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from random_gpt import words
from tokenizers import Tokenizer

PROMPT_SETS = {"128": (128, 128), "32-256": (32, 256)}
"""Of each set: the shortest and the longest prompt, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as text and as the tokens that it is."""

    text: str
    token_ids: tuple[int, ...]


class PromptSource:
    """Draws prompts of random words, each one token.

    Two sources with the same arguments give the same prompts. Lengths spread evenly over their range within any few
    that follow each other (van der Corput's sequence), so that a batch of 8 has about the same work as 8 single ones.
    """

    def __init__(self, tokenizer: Tokenizer, *, shortest: int, longest: int, seed: int) -> None:
        self._words = [(word, only_id(tokenizer, word)) for word in words(tokenizer.get_vocab_size())]
        self._shortest = shortest
        self._longest = longest
        self._generator = np.random.default_rng(seed)
        self._count = 0

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Prompt:
        self._count += 1
        length = self._shortest + round((self._longest - self._shortest) * van_der_corput(self._count))
        drawn = [self._words[index] for index in self._generator.integers(0, len(self._words), length)]
        return Prompt(text="".join(word for word, _ in drawn), token_ids=tuple(token for _, token in drawn))


def only_id(tokenizer: Tokenizer, word: str) -> int:
    """Returns the one token that a word of `random_gpt.words` is."""
    token_id = tokenizer.token_to_id("\u0120" + word[1:])
    assert token_id is not None, "every word is a token"
    return int(token_id)


def van_der_corput(number: int) -> float:
    """The number's binary digits mirrored at the point: 1/2, 1/4, 3/4, 1/8, ..."""
    digits = f"{number:b}"
    return int(digits[::-1], 2) / (1 << len(digits))
