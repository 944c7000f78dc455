"""Assembles the text of a sequence: detokenized token by token, cut at a stop string, in deltas or at once.

A token may be only part of a character (byte-level tokenizers), and its text may depend on the token before it (a
word's leading space). So tokens are not decoded alone: a short window of the last tokens is decoded with each new one,
and what its text has grown by is the delta. `tokenizers.decoders.DecodeStream` does the same and is faster, but raises
on token ids that do not make valid text ("Invalid prefix encountered"), which a model may produce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway_server.preprocessing.text import REPLACEMENT

_MAX_UNFINISHED = 3
"""Maximum bytes of an incomplete character, and so of U+FFFD at the end that may still change."""
_CONTEXT_TOKENS = 4
"""Context tokens before new ones. A character has at most four bytes, so one of the last few tokens begins one."""
_MAX_CONTEXT_TOKENS = 10
_MAX_WINDOW_TOKENS = 16
"""Maximum tokens of a window, without an unfinished character at its end: decoding takes time in proportion to it."""


class Decode(Protocol):
    """Makes text of tokens; a `TokenDecoder`."""

    def __call__(self, token_ids: Sequence[int], /) -> str:
        """Returns the text of tokens, without special tokens."""

    def ends_with_replacement(self, token_ids: Sequence[int], /) -> bool:
        """Returns True if the tokens' last bytes are the encoding of U+FFFD."""


class Detokenizer:
    """Decodes one sequence.

    The joined deltas are the text of all tokens decoded at once after the context. Up to three U+FFFD at its end are
    left out as an unfinished character, unless the tokens encode the last one. (With a byte-fallback vocabulary, bytes
    that form no character turn characters before them into U+FFFD when decoded at once; sent deltas do not change.)
    """

    def __init__(self, decode: Decode, context_ids: Sequence[int] = ()) -> None:
        """Starts after `context_ids`, tokens that the text continues and that are not part of it."""
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that is context or was handed out
        self._num_after = _MAX_UNFINISHED  # tokens after the last encoded U+FFFD, up to the maximum
        if context_ids:
            self._window, self._shown = _context(decode, context_ids, decode(context_ids), num_unfinished=0)
            if self._shown.endswith(REPLACEMENT) and decode.ends_with_replacement(context_ids):
                self._num_after = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the characters that are certain now, possibly none."""
        window = [*self._window, *token_ids]
        text = self._decode(window)
        num_unfinished = _num_unfinished(text)
        num_after = self._num_after + len(token_ids)
        is_spoilt = not text.startswith(self._shown)
        if num_unfinished and self._decode.ends_with_replacement(window):
            num_unfinished = num_after = 0
        elif num_unfinished and not is_spoilt:
            new = len(text) - len(self._shown)
            num_unfinished = min(num_unfinished, new)  # earlier ones are encoded in the text, and already sent
            is_spoilt = num_after <= _MAX_UNFINISHED and new > len(self._decode(window[-num_after:]))
        if num_unfinished and len(token_ids) > 1:  # broken and unfinished characters differ only token by token
            return "".join([self.push((token_id,)) for token_id in token_ids])
        self._window, self._num_after = window, num_after
        is_too_long = len(window) > _MAX_WINDOW_TOKENS + (_MAX_UNFINISHED if num_unfinished else 0)
        if num_unfinished and not is_too_long and is_spoilt:
            return ""  # byte fallback: an unfinished character spoils those before it until it is complete
        certain = text[: len(text) - num_unfinished]
        delta = certain[len(self._shown) :]
        if delta:
            self._shown = certain
        if is_too_long:
            self._window, self._shown = _context(self._decode, window, text, num_unfinished)
        return delta

    def __repr__(self) -> str:
        return f"Detokenizer({len(self._window)} tokens in the window)"


class TextOffsets:
    """Finds at which character of its text each token of a sequence begins: at the one its first byte is part of."""

    def __init__(self, decode: Decode, context_ids: Sequence[int] = (), *, start: int = 0) -> None:
        """Starts after `context_ids`, as `Detokenizer` does, at the character `start`."""
        self._detokenizer = Detokenizer(decode, context_ids)
        self._offset = start

    def push(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Takes the next tokens and returns their offsets. Takes 10 microseconds a token."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token_id,)))
        return tuple(offsets)

    def __repr__(self) -> str:
        return f"TextOffsets({self._offset})"


def _num_unfinished(text: str) -> int:
    """Returns the number of U+FFFD at the end of `text` that may be part of an unfinished character."""
    num_unfinished = len(text) - len(text.rstrip(REPLACEMENT))
    return min(num_unfinished, _MAX_UNFINISHED)


def _context(decode: Decode, token_ids: Sequence[int], text: str, num_unfinished: int) -> tuple[list[int], str]:
    """Finds the shortest tail of `token_ids`, of at least `_CONTEXT_TOKENS`, whose text is the end of their `text`.

    Returns:
        The tail, and its text without the last `num_unfinished` characters, which are not handed out yet.
    """
    for length in range(_CONTEXT_TOKENS, _MAX_CONTEXT_TOKENS + 1):
        tail = list(token_ids[-length:])
        tail_text = decode(tail)
        is_end = tail_text and len(tail_text) >= num_unfinished and text.endswith(tail_text)
        if is_end and tail_text[0] == REPLACEMENT:  # byte fallback: the tail may begin within a spelled one
            is_end = decode(token_ids[:-length]) + tail_text == text
        if is_end or length >= len(token_ids):
            return tail, tail_text[: len(tail_text) - num_unfinished]
    tail = list(token_ids[-_CONTEXT_TOKENS:])  # every tail begins within a word, or has no text
    tail_text = decode(tail)
    return tail, tail_text[: len(tail_text) - min(num_unfinished, _num_unfinished(tail_text))]


class StopMatcher:
    """Finds stop strings in a text that arrives in deltas, across their borders.

    The string that is complete first ends the text; of several complete at the same character, the longest. So where
    the text ends does not depend on how it was cut into deltas.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        """Takes non-empty `stop_strings`, possibly none."""
        self._stop_strings = stop_strings
        self._pending = ""

    def push(self, delta: str) -> tuple[str, bool]:
        """Takes the next delta of the text.

        Returns:
            The text that can be handed out, and True if a stop string was found. The longest end of the text that may
            begin a stop string stays pending.
        """
        if not self._stop_strings:
            return delta, False
        text = self._pending + delta
        found = [(start + len(stop), start) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
        if found:
            self._pending = ""
            return text[: min(found)[1]], True
        num_pending = max(_overlap(text, stop) for stop in self._stop_strings)
        certain = len(text) - num_pending
        self._pending = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """Returns the pending text at the end."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that `stop` begins with and that is shorter than `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextAssembly:
    """Makes the text of a sequence's tokens; an `OutputAssembler`.

    Without stop strings and stream, tokens are collected and decoded once at the end.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        context_ids: Sequence[int] = (),
        stop_strings: tuple[str, ...] = (),
        eager: bool = False,
    ) -> None:
        """Starts after `context_ids`.

        Args:
            decode: Token ids to text.
            context_ids: Tokens that the text continues.
            stop_strings: Strings that end it.
            eager: True makes deltas as tokens arrive.
        """
        self._decode = decode
        self._context_ids = context_ids
        self._detokenizer = Detokenizer(decode, context_ids)
        self._stop = StopMatcher(stop_strings)
        self._eager = eager or bool(stop_strings)
        self._pending_ids: list[int] = []
        self._deltas: list[str] = []
        self._num_taken = 0

    def push(self, token_id: int) -> bool:
        """Takes the next token; returns True if a stop string is complete with it."""
        if not self._eager:
            self._pending_ids.append(token_id)
            return False
        delta, stopped = self._stop.push(self._detokenizer.push((token_id,)))
        if delta:
            self._deltas.append(delta)
        return stopped

    def take(self) -> str:
        """Returns the text that has appeared since the last call."""
        taken = self._deltas[self._num_taken :]
        self._num_taken = len(self._deltas)
        return "".join(taken)

    def whole(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` after the same context, whatever was pushed; stop strings do not cut it."""
        return Detokenizer(self._decode, self._context_ids).push(token_ids)

    def finish(self) -> str:
        """Returns the whole text: there are no more tokens."""
        if self._pending_ids:
            self._deltas.append(self._detokenizer.push(self._pending_ids))
            self._pending_ids = []
        if rest := self._stop.finish():
            self._deltas.append(rest)
        return "".join(self._deltas)

    def join(self, parts: Sequence[str]) -> str:
        """Joins deltas."""
        return "".join(parts)

    def __repr__(self) -> str:
        return f"TextAssembly({len(self._pending_ids)} tokens pending, {self._detokenizer!r})"
