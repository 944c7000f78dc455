"""Token ids to text, a token at a time, in pieces that are whole characters.

A token may hold a part of a character (byte-level tokenizers), and what a token reads as may depend on the token
before it (a word's leading space), so tokens are not decoded alone: a short window of the last tokens is decoded anew
with each token, and what its text has grown by is the piece. `tokenizers.decoders.DecodeStream` does the same and is
faster, but raises on token ids that do not make valid text ("Invalid prefix encountered"), which a model may produce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 4
"""Tokens kept before new ones: a character has at most four bytes, so a cut among the last few is at its border."""
_MAX_CONTEXT_TOKENS = 10
_MAX_WINDOW_TOKENS = 16
"""The window is cut when it is longer: decoding it costs in proportion."""


class Detokenizer:
    """Decodes one sequence.

    The pieces joined are the text of all tokens decoded at once after the context, less U+FFFD at its end: a character
    that the last tokens have begun and not finished is not text. (With a byte-fallback vocabulary, bytes that form no
    character turn earlier ones that did into U+FFFD when decoded at once; a piece that was handed out stays.)
    """

    def __init__(self, decode: Decode, context_ids: Sequence[int] = ()) -> None:
        """Starts after `context_ids`, the tokens that the text continues; they are not part of it."""
        self._decode = decode
        self._window = _context(decode, context_ids)
        self._num_decoded = len(decode(self._window)) if self._window else 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the characters that are certain now, possibly none."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):  # perhaps the beginning of a character: wait for its end
            piece = text.rstrip(REPLACEMENT)[self._num_decoded :]
        else:
            piece = text[self._num_decoded :]
            if len(self._window) > _MAX_WINDOW_TOKENS:
                self._window = _context(self._decode, self._window)
                self._num_decoded = len(self._decode(self._window))
                return piece
        self._num_decoded += len(piece)
        return piece

    def __repr__(self) -> str:
        return f"Detokenizer({len(self._window)} tokens in the window)"


def _context(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """Returns the shortest tail of `token_ids` that reads as whole characters, of at least `_CONTEXT_TOKENS`."""
    for length in range(_CONTEXT_TOKENS, _MAX_CONTEXT_TOKENS + 1):
        tail = list(token_ids[-length:])
        text = decode(tail)
        if (text and REPLACEMENT not in text) or length >= len(token_ids):
            return tail
    return list(token_ids[-_CONTEXT_TOKENS:])  # U+FFFD is part of the text itself
