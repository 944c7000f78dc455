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
_MAX_HELD = 3
"""Bytes of a character that is not complete, so U+FFFD that may yet become something else."""
_CONTEXT_TOKENS = 4
"""Tokens kept before new ones: a character has at most four bytes, so a cut among the last few is at its border."""
_MAX_CONTEXT_TOKENS = 10
_MAX_WINDOW_TOKENS = 16
"""The window is cut when it is longer, by `_MAX_HELD` where it ends in an unfinished character: decoding it costs in
proportion."""


class Detokenizer:
    """Decodes one sequence.

    The pieces joined are the text of all tokens decoded at once after the context, less at most three U+FFFD at its
    end: a character that the last tokens have begun and not finished is not text. (With a byte-fallback vocabulary,
    bytes that form no character turn earlier ones that did into U+FFFD when decoded at once; a piece that was handed
    out stays.)
    """

    def __init__(self, decode: Decode, context_ids: Sequence[int] = ()) -> None:
        """Starts after `context_ids`, the tokens that the text continues; they are not part of it."""
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""  # what the window reads as, as far as it was handed out or is context
        if context_ids:
            self._window, self._shown = _context(decode, context_ids, decode(context_ids), num_held=0)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the characters that are certain now, possibly none."""
        window = [*self._window, *token_ids]
        text = self._decode(window)
        num_held = _num_held(text)
        if num_held and len(token_ids) > 1:  # how a broken end is told from a begun one needs them one by one
            return "".join([self.push((token_id,)) for token_id in token_ids])
        self._window = window
        is_too_long = len(window) > _MAX_WINDOW_TOKENS + (_MAX_HELD if num_held else 0)
        if num_held and not is_too_long and not text.startswith(self._shown):
            return ""  # byte fallback: a character that was begun has spoilt those before it, until it is complete
        certain = text[: len(text) - num_held]
        piece = certain[len(self._shown) :]
        if piece:
            self._shown = certain
        if is_too_long:
            self._window, self._shown = _context(self._decode, window, text, num_held)
        return piece

    def __repr__(self) -> str:
        return f"Detokenizer({len(self._window)} tokens in the window)"


def _num_held(text: str) -> int:
    """Returns how many U+FFFD at the end of `text` may be the beginning of a character."""
    num_held = len(text) - len(text.rstrip(REPLACEMENT))
    return min(num_held, _MAX_HELD)


def _context(decode: Decode, token_ids: Sequence[int], text: str, num_held: int) -> tuple[list[int], str]:
    """Finds the shortest tail of `token_ids`, of at least `_CONTEXT_TOKENS`, that reads as the end of their `text`.

    Returns:
        The tail, and what it reads as less the last `num_held` characters, which are not handed out yet.
    """
    for length in range(_CONTEXT_TOKENS, _MAX_CONTEXT_TOKENS + 1):
        tail = list(token_ids[-length:])
        tail_text = decode(tail)
        if (tail_text and len(tail_text) >= num_held and text.endswith(tail_text)) or length >= len(token_ids):
            return tail, tail_text[: len(tail_text) - num_held]
    tail = list(token_ids[-_CONTEXT_TOKENS:])  # it begins within a word, or nothing of it can be read
    tail_text = decode(tail)
    return tail, tail_text[: len(tail_text) - min(num_held, _num_held(tail_text))]
