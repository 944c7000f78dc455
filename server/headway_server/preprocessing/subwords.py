"""The subwords of a text: where its tokens stand in it, so that labels of tokens become labels of characters.

P is the number of subwords of a text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_JOINER = "\u200d"
"""Zero width joiner, which makes one grapheme of two."""
_SKIN_TONES = range(0x1F3FB, 0x1F400)


@dataclass(frozen=True, slots=True)
class Subwords:
    """The tokens of a text that stand for more than white space, each without the white space around it.

    Special tokens are not among them. Positions are in Unicode code points.
    """

    tokens: NDArray[np.int64]
    """(P,), the place of each among the tokens of the text."""
    starts: NDArray[np.int64]
    """(P,), the first character of each."""
    ends: NDArray[np.int64]
    """(P,), the character after the last one of each."""
    joined: NDArray[np.bool_]
    """(P,), True where no span can begin: the subword begins within the characters of the one before (a character
    may be several tokens of bytes), or with a part of the grapheme before it (an accent, a skin tone)."""

    @classmethod
    def find(cls, text: str, offsets: Sequence[tuple[int, int]]) -> Subwords:
        """Finds the subwords of a text by the first character and the one after each of its tokens."""
        rows: list[tuple[int, int, int, bool]] = []
        covered = 0
        for token, (first, after) in enumerate(offsets):
            part = text[first:after]
            trimmed = part.strip()
            if trimmed:
                start = first + part.index(trimmed)
                end = start + len(trimmed)
                rows.append((token, start, end, bool(rows) and (start < covered or _continues_grapheme(text, start))))
                covered = max(covered, end)
        table = np.array(rows, np.int64).reshape(-1, 4)
        return cls(table[:, 0], table[:, 1], table[:, 2], table[:, 3].astype(np.bool_))


def _continues_grapheme(text: str, position: int) -> bool:
    """True if a character belongs to the grapheme before it: it is a mark, or joins, or is joined."""
    if position == 0:
        return False
    character, is_joined = text[position], text[position - 1] == _JOINER
    if is_joined or character.isascii():
        return is_joined
    return unicodedata.category(character).startswith("M") or character == _JOINER or ord(character) in _SKIN_TONES
