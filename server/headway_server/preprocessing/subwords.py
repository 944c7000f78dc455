"""Subwords: positions of tokens in a text, to map labels of tokens to characters.

No label begins within a grapheme: an extended grapheme cluster (Unicode Standard Annex 29), by the regular expressions
of `tokenizers`, with conjuncts of Indic scripts, which they lack (rule GB9c).

P is the number of subwords of a text.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, pre_tokenizers

_JOINER = "\u200d"
"""Zero width joiner, which joins two graphemes."""
_FLAGS = re.compile("[\U0001f1e6-\U0001f1ff]+")
"""Regional indicators; each pair is a flag."""
_CONJOINERS = frozenset(
    "\u094d\u09cd\u0acd\u0b4d\u0c4d\u0d4d\u1039\u17d2\u1a60\u1b44\u1bab\ua9c0\uaaf6\U00010a3f\U00011133\U000113d0"
    "\U0001193e\U00011a47\U00011a99\U00011f42"
)
"""Marks that join consonants into a conjunct (`InCB=Linker` of Unicode 17)."""
_GRAPHEMES = pre_tokenizers.Split(Regex(r"\X"), "isolated")


@dataclass(frozen=True, slots=True)
class Subwords:
    """The tokens of a text without surrounding white space; tokens of white space alone are left out.

    Special tokens are not among them. Positions are in Unicode code points.
    """

    tokens: NDArray[np.int64]
    """(P,), index of each among the tokens of the text."""
    starts: NDArray[np.int64]
    """(P,), position of the first character."""
    ends: NDArray[np.int64]
    """(P,), position after the last character."""
    joined: NDArray[np.bool_]
    """(P,), True if no span can begin: the subword starts within a character (which may be several byte tokens), or
    within a grapheme (at an accent, a skin tone, the second half of a flag)."""

    @classmethod
    def find(cls, text: str, offsets: Sequence[tuple[int, int]]) -> Subwords:
        """Finds the subwords of a text by the start and end positions of its tokens."""
        rows: list[tuple[int, int, int, bool]] = []
        flags = _flags(text)
        covered = 0
        for token, (first, after) in enumerate(offsets):
            part = text[first:after]
            trimmed = part.strip()
            if trimmed:
                start = first + part.index(trimmed)
                end = start + len(trimmed)
                joined = bool(rows) and (start < covered or _continues_grapheme(text, start, flags))
                rows.append((token, start, end, joined))
                covered = max(covered, end)
        table = np.array(rows, np.int64).reshape(-1, 4)
        return cls(table[:, 0], table[:, 1], table[:, 2], table[:, 3].astype(np.bool_))

    def word_starts(self, text: str, word_ids: Sequence[int | None]) -> NDArray[np.bool_]:
        """Returns which subwords begin a word, (P,): one of the tokenizer's, or punctuation, or what follows it.

        Args:
            text: The text.
            word_ids: The tokenizer's word of each token of the text.
        """
        words = np.array([word_ids[token] for token in self.tokens.tolist()], np.float64)  # NaN without one
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        apart = np.array([all(map(_is_punctuation, text[start:end])) for start, end in spans], np.bool_)
        starts = np.ones(len(words), np.bool_)
        starts[1:] = (words[1:] != words[:-1]) | apart[1:] | apart[:-1]
        return starts & ~self.joined


def grapheme_ends(text: str, ends: Iterable[int]) -> NDArray[np.int64]:
    """Returns positions in a text, each moved to the end of its grapheme: an accent may have no token.

    Args:
        text: The text.
        ends: The positions, at most one in a grapheme, whose characters are gone through for each.
    """
    flags, found = _flags(text), list[int]()
    for position in ends:
        end = position
        while end < len(text) and _continues_grapheme(text, end, flags):
            end += 1
        found.append(end)
    return np.array(found, np.int64)


def _flags(text: str) -> list[int]:
    """Returns the start positions of runs of regional indicators, in order."""
    return [] if text.isascii() else [run.start() for run in _FLAGS.finditer(text)]


def _is_punctuation(character: str) -> bool:
    """Returns True for what BERT's tokenizer takes as punctuation: that of Unicode, and all signs of ASCII."""
    if character.isascii():
        return not character.isalnum() and not character.isspace()
    return unicodedata.category(character).startswith("P")


def _continues_grapheme(text: str, position: int, flags: Sequence[int]) -> bool:
    """Returns True if a character continues the grapheme before it.

    Args:
        text: The text.
        position: Position of the character.
        flags: Start positions of runs of regional indicators, in order.
    """
    pair = text[max(0, position - 1) : position + 1]
    if len(pair) < 2 or pair.isascii():
        return False
    before, character = pair[0], pair[1]
    if before == _JOINER or unicodedata.category(character).startswith("M"):
        return True
    if _FLAGS.fullmatch(pair):
        return (position - flags[bisect_right(flags, position) - 1]) % 2 == 1
    return _is_grapheme(pair) or _is_conjunct(text, position)


def _is_conjunct(text: str, position: int) -> bool:
    """Returns True if a mark joins a letter to the consonant before it."""
    if unicodedata.category(text[position]) not in ("Lo", "Cn"):  # the newest scripts are missing from the category
        return False
    while position and (mark := text[position - 1]) not in _CONJOINERS:
        if unicodedata.category(mark) == "Mc" or not _is_grapheme(f"a{mark}"):
            return False
        position -= 1
    return position > 0


@lru_cache(maxsize=4096)
def _is_grapheme(pair: str) -> bool:
    """Returns True if two characters are one grapheme in any context."""
    return len(_GRAPHEMES.pre_tokenize_str(pair)) == 1
