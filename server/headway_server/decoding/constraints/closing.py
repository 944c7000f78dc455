"""How a JSON text is ended within its maximum of tokens.

A model may open brackets, or write a string, until its tokens are used up. When no more are left than it takes to close
what is open, only the tokens of that end may follow. The end is found by a walk through the grammar with a preference
for tokens that close something. It is short, and not always the shortest.

Shapes: V logits of the model, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from headway_server.decoding.constraints.grammar import ConstraintRequest
from headway_server.decoding.constraints.vocabulary import Vocabulary
from headway_server.decoding.rules import WORD_BITS, Mask, unpack

MAX_END = 128
"""Maximum tokens of an end that is looked for."""
_MAX_LOOK_S = 0.01
"""Processor time of a look for an end, which the step's other sequences wait for."""
_SPARE = 8
"""Tokens that an end is begun early, at least: one token may open several things at once."""


class ClosingTokens:
    """Tokens of a vocabulary by what they close."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Sorts the tokens of a vocabulary (V,)."""
        by_text: dict[bytes, int] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            by_text.setdefault(token, token_id)
        brackets = [text for text in by_text if text and not text.strip(b"}]")]
        self._brackets = [by_text[text] for text in sorted(brackets, key=len, reverse=True)]
        self._brace, self._quote, self._colon, self._comma = (
            [by_text[text]] if text in by_text else [] for text in (b"}", b'"', b":", b",")
        )
        self._sizes = [len(token) for token in vocabulary.tokens]
        self._digits = [by_text[text] for digit in range(10) if (text := str(digit).encode()) in by_text]
        self._openers = [by_text[text] for text in (b"[", b"{") if text in by_text]
        # Of tokens that close nothing the longest, with white space and what opens something last.
        self._lengths = np.array([_length(token) for token in vocabulary.tokens], np.int32)

    def choose(self, words: Mask) -> int | None:
        """Returns the allowed token (W,) that leads to an end soonest; None if none is allowed."""
        brace, colon = (self._first(ids, words) for ids in (self._brace, self._colon))
        # Where both may follow, they are characters of a string.
        kinds = (
            (self._quote,)
            if brace is not None and colon is not None
            else (self._brackets, self._colon, self._comma, self._digits, self._quote, self._openers)
        )
        for ids in kinds:
            if (found := self._first(ids, words)) is not None:
                return found
        lengths = self._lengths * unpack(words)[: len(self._lengths)]
        longest = int(lengths.argmax())
        return longest if lengths[longest] else None

    @staticmethod
    def _first(ids: Iterable[int], words: Mask) -> int | None:
        """Returns the first of some tokens that is allowed (W,)."""
        return next((index for index in ids if int(words[index // WORD_BITS]) >> index % WORD_BITS & 1), None)

    def num_tokens(self, num_bytes: int, text: list[int]) -> int:
        """Estimates the tokens of some bytes of JSON by those of a text."""
        return math.ceil(num_bytes * len(text) / sum(self._sizes[token_id] for token_id in text))

    def end(self, matcher: LLMatcher, words: Mask, allowed: Mask, most: int) -> list[int] | None:
        """Finds an end of a text that is not complete.

        Args:
            matcher: The text's state, which is left as it is.
            words: (W,) tokens that may follow the text.
            allowed: (W,) tokens that may be part of it at all.
            most: Maximum tokens of the end.

        Returns:
            The tokens of the end; None if none was found.
        """
        matcher, found, began = matcher.deep_copy(), list[int](), time.thread_time()
        library_words: NDArray[np.int32] = np.zeros(len(allowed) + 1, np.int32)
        while len(found) < most and time.thread_time() - began < _MAX_LOOK_S:
            token_id = self.choose(words)
            if token_id is None or not matcher.consume_token(token_id):
                return None
            found.append(token_id)
            if matcher.is_stopped() or matcher.is_accepting():
                return found
            size = -(-(len(self._lengths) + 1) // WORD_BITS)  # the library has one token more
            matcher.unsafe_compute_mask_ptr(library_words.ctypes.data, 4 * size)
            if matcher.is_error():
                return None
            words = library_words[: len(allowed)] & allowed
        return None

    def __repr__(self) -> str:
        return f"ClosingTokens({len(self._brackets)} of brackets)"


def _length(token: bytes) -> int:
    opens = not token.strip() or b"{" in token or b"[" in token
    return min(1, len(token)) if opens else 1 + len(token)


class Closing:
    """The end of one text within its maximum of tokens."""

    __slots__ = ("_growth", "_look_at", "_path", "_tokens", "num_left")

    def __init__(self, tokens: ClosingTokens, num_left: int, growth: int) -> None:
        """Begins a text.

        Args:
            tokens: Those of the vocabulary.
            num_left: Maximum tokens of the text.
            growth: Most bytes by which a token makes the end longer (`growth_of`).
        """
        self._tokens = tokens
        self._growth = growth
        self._path: list[int] = []
        self._look_at = min(num_left, MAX_END)
        self.num_left = num_left

    def next_token(self, matcher: LLMatcher, words: Mask, allowed: Mask) -> int | None:
        """Returns the token that has to follow a text; None if others may too. See `ClosingTokens.end`."""
        if not self._path and self.num_left <= self._look_at:
            end = self._tokens.end(matcher, words, allowed, min(self.num_left, MAX_END))
            if end is None:
                self._look_at = self.num_left * 3 // 4
                return None
            spare = max(_SPARE, self._tokens.num_tokens(self._growth, end))
            if len(end) + spare >= self.num_left:
                self._path = end
            else:  # the end becomes longer by a token for each of the text, apart from what `spare` is for
                self._look_at = self.num_left - max(1, (self.num_left - len(end) - spare) // 2)
        return self._path[0] if self._path else None

    def follow(self, token_id: int | None = None) -> None:
        """Takes the next token; None: one that is not part of the constrained text."""
        self.num_left -= 1
        if self._path and self._path.pop(0) != token_id:
            self._path.clear()

    def __repr__(self) -> str:
        return f"Closing({self.num_left} tokens left, {len(self._path)} of an end)"


def growth_of(request: ConstraintRequest) -> int | None:
    """Returns the most bytes by which a token may make the end of a text longer: of an object with what it requires.

    Returns None for a constraint whose texts are no JSON.
    """
    if request.json_schema is not None:
        return _largest(json.loads(request.json_schema))
    if request.calls is None:
        return None
    form = request.calls.form
    around = len(form.between or "") + len(form.middle) + len(form.end)
    sizes = [len(name) + around + _largest(json.loads(schema)) for name, schema in request.calls.tools]
    return min(max(sizes), MAX_END)


def _largest(schema: dict[str, Any]) -> int:
    """Returns the bytes of the shortest text of the part of a schema that has the longest one, at most `MAX_END`."""
    known: dict[int, int] = {}

    def visit(part: Any) -> None:
        if isinstance(part, dict):
            _shortest(part, schema, known)
        for element in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            visit(element)

    try:
        visit(schema)
    except (TypeError, AttributeError, ValueError, RecursionError):  # some constant looks like a schema, and is none
        return MAX_END
    return min(max(known.values(), default=0), MAX_END)


def _shortest(part: Any, schema: dict[str, Any], known: dict[int, int]) -> int:
    """Estimates the bytes of the shortest text of a part of a schema; `known` are those of other parts by their id."""
    if not isinstance(part, dict):
        return 1
    if id(part) in known:
        return known[id(part)]
    known[id(part)] = 0  # of a part within itself, which is optional there

    def size(value: Any) -> int:
        return _shortest(value, schema, known)

    kind, found = part.get("type"), 1
    if "const" in part or part.get("enum"):
        found = min(len(json.dumps(value)) for value in part.get("enum") or [part.get("const")])
    elif isinstance(reference := part.get("$ref"), str):
        found = size(_find(reference, schema))
    elif alternatives := part.get("anyOf") or part.get("oneOf"):
        found = min(map(size, alternatives))
    elif kind == "object" or "properties" in part:
        values = part.get("properties", {})
        found = 2 + sum(len(name) + 4 + size(values.get(name)) for name in part.get("required", ()))
    elif kind == "array":
        found = 2 + min(part.get("minItems", 0), MAX_END) * (1 + size(part.get("items")))
    elif kind == "string":
        found = 2 + min(part.get("minLength", 0), MAX_END)
    known[id(part)] = found + sum(map(size, part.get("allOf", ())))
    return known[id(part)]


def _find(reference: str, schema: dict[str, Any]) -> Any:
    """Returns the part that a JSON pointer refers to; None if there is none."""
    found: Any = schema
    for name in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
