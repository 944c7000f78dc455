"""How a JSON text is ended within its maximum of tokens.

A model may open brackets, or write a string, until its tokens are used up. When few more are left than it takes to
close what is open, nothing more may be opened. When no more are left, only the tokens of that end may follow. The end
is found by a walk through the grammar with a preference for tokens that close something. It is short, and not always
the shortest.

Shapes: V logits of the model, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import json
import math
import time
from itertools import chain, product
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from headway_server.decoding.constraints.grammar import ConstraintRequest
from headway_server.decoding.constraints.vocabulary import Vocabulary
from headway_server.decoding.rules import WORD_BITS, Mask, has_bit, mask_of, unpack

MAX_END = 128
"""Maximum tokens of an end that is looked for."""
_MAX_LOOK_S = 0.01
"""Processor time of a look for an end, which the step's other sequences wait for."""
_MAX_CHOICES = 16
"""Maximum tokens, of words, that are compared with each other."""
_DENSITY = 0.5
"""Least tokens a byte of JSON, of which the text itself may show more."""
_MAX_DIGITS = 4
"""Digits in a row of an end after which anything else is preferred: fractions may have any number."""
_FORMAT_BYTES = 36
"""Bytes of a string with a format, such as an id or a date."""
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
        self.content = vocabulary.mask(_is_content)
        """(W,) tokens of whole characters after which a string is still open."""
        self.plain = vocabulary.mask(lambda token: not _OPENING.intersection(token))
        """(W,) tokens that open nothing outside of a string."""
        self.numbers = vocabulary.mask(bytes.isdigit)
        """(W,)"""
        self.literals = vocabulary.mask(lambda token: not _STRUCTURE.intersection(token)) & ~self.numbers
        """(W,) parts of words, such as true."""
        self._texts = vocabulary.tokens
        self._digits = [by_text[text] for digit in range(10) if (text := str(digit).encode()) in by_text]
        self._openers = [by_text[text] for text in (b"[", b"{") if text in by_text]
        # One of these follows a number that may end; the last is the library's own end of a text.
        self._after_numbers = [
            *(by_text[text] for text in (b",", b"}", b"]") if text in by_text),
            len(vocabulary.tokens),
        ]
        # Of tokens that close nothing the longest, with white space and what opens something last.
        self._lengths = np.array([_length(token) for token in vocabulary.tokens], np.int32)

    def choose(self, words: Mask) -> int | None:
        """Returns the allowed token (W,) that leads to an end soonest; None if none is allowed."""
        kinds = (
            (self._quote,)
            if self.is_within_string(words)
            else (self._brackets, self._colon, self._comma, self._digits, self._quote, self._openers)
        )
        found: int | None = next((index for index in chain(*kinds) if has_bit(words, index)), None)
        if found is not None:
            return found
        return self._longest(words)

    def _longest(self, words: Mask) -> int | None:
        """Returns the longest allowed token (W,); None if none is allowed."""
        lengths = self._lengths * unpack(words)[: len(self._lengths)]
        longest = int(lengths.argmax())
        return longest if lengths[longest] > 0 else None

    def is_within_string(self, words: Mask) -> bool:
        """Returns True if a brace and a colon may follow (W,): as characters of a string, or of text beside JSON."""
        return all(any(has_bit(words, index) for index in ids) for ids in (self._brace, self._colon))

    def num_bytes(self, text: list[int]) -> int:
        """Returns the bytes of a text."""
        return sum(len(self._texts[token_id]) for token_id in text)

    def longest_of(self, ids: list[int]) -> list[int]:
        """Returns the tokens that do not begin another one of them."""
        texts = [self._texts[index] for index in ids]
        return [
            index
            for index, text in zip(ids, texts, strict=True)
            if not any(other.startswith(text) and other != text for other in texts)
        ]

    def end(
        self,
        matcher: LLMatcher,
        words: Mask,
        allowed: Mask,
        most: int,
        *,
        first: int | None = None,
        until: float | None = None,
    ) -> list[int] | None:
        """Finds an end of a text that is not complete.

        Args:
            matcher: The text's state, which is left as it is.
            words: (W,) tokens that may follow the text.
            allowed: (W,) tokens that may be part of it at all.
            most: Maximum tokens of the end.
            first: Token that it begins with; None: any.
            until: Processor time of the thread, in seconds, at which the look ends; None: `_MAX_LOOK_S` from now.

        Returns:
            The tokens of the end; None if none was found.
        """
        matcher, found, num_digits = matcher.deep_copy(), list[int](), 0
        until = time.thread_time() + _MAX_LOOK_S if until is None else until
        library_words: NDArray[np.int32] = np.zeros(len(allowed) + 1, np.int32)
        while len(found) < most and time.thread_time() < until:
            token_id = self.choose(words) if first is None or found else first
            if token_id in self._digits and (first is None or found):
                token_id = self._choose_digit(matcher, words, token_id, num_digits)
            num_digits = num_digits + 1 if token_id in self._digits else 0
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

    def fitting(self, matcher: LLMatcher, words: Mask, allowed: Mask, most: int, ids: list[int]) -> list[int]:
        """Returns those of some tokens that begin an end of at most `most` tokens, as far as time suffices."""
        until = time.thread_time() + _MAX_LOOK_S
        return [one for one in ids if self.end(matcher, words, allowed, most, first=one, until=until)]

    def digits_of(self, words: Mask) -> list[int]:
        """Returns the allowed digits (W,)."""
        return [index for index in self._digits if has_bit(words, index)]

    def _choose_digit(self, matcher: LLMatcher, words: Mask, found: int, num_digits: int) -> int:
        """Returns the digit that leads to a number's end soonest, or what else may follow many digits.

        Args:
            matcher: The text's state.
            words: (W,) tokens that may follow it.
            found: A digit that may.
            num_digits: Digits before it, of the end.
        """
        digits = self.digits_of(words)
        for count in (1, 2):
            for some in product(digits, *[self._digits] * (count - 1)):
                if any(matcher.validate_tokens([*some, after]) > count for after in self._after_numbers):
                    return some[0]
        if num_digits >= _MAX_DIGITS and (other := self._longest(words & ~self.numbers)) is not None:
            return other
        return digits[3 * num_digits % len(digits)] if num_digits else found  # the same one each time may lead nowhere

    def __repr__(self) -> str:
        return f"ClosingTokens({len(self._brackets)} of brackets)"


_OPENING = frozenset(b'{["\\,')
_STRUCTURE = _OPENING.union(b"]}:")


def _is_content(token: bytes) -> bool:
    try:
        return token.decode().isprintable() and b'"' not in token and b"\\" not in token
    except UnicodeDecodeError:
        return False


def _length(token: bytes) -> int:
    opens = not token.strip() or b"{" in token or b"[" in token
    return min(1, len(token)) if opens else 1 + len(token)


class Closing:
    """The end of one text within its maximum of tokens."""

    __slots__ = ("_density", "_end", "_growth", "_is_string", "_look_at", "_spare", "_tokens", "num_left")

    def __init__(self, tokens: ClosingTokens, num_left: int, growth: int) -> None:
        """Begins a text.

        Args:
            tokens: Those of the vocabulary.
            num_left: Maximum tokens of the text, the end of the sequence included.
            growth: Most bytes by which a token makes the end longer (`growth_of`).
        """
        self._tokens = tokens
        self._growth = growth
        self._density = _DENSITY
        self._spare = max(_SPARE, growth)  # at first, as if each byte were a token
        self._end: list[int] = []  # of the text so far, if it is near
        self._is_string = False
        self.num_left = num_left - 1  # without the end of the sequence
        self._look_at = min(self.num_left, MAX_END)

    def restrict(self, matcher: LLMatcher, words: Mask, allowed: Mask) -> Mask | None:
        """Returns the tokens (W,) after which a text still ends within its maximum; None while all do.

        Args:
            matcher: State of the text, which may not end here.
            words: (W,) tokens that may follow it.
            allowed: (W,) tokens that may be part of it at all.
        """
        if self.num_left > self._look_at or not (self._end or self._look(matcher, words, allowed)):
            return None
        first, is_exact = mask_of(self._end[:1], len(words)), self.num_left <= len(self._end)
        self._is_string = self._tokens.is_within_string(words)
        if self._is_string:
            return first if is_exact else first | words & self._tokens.content
        ids = np.flatnonzero(unpack(words & self._tokens.literals)).tolist()
        if has_bit(self._tokens.literals, self._end[0]) and len(ids) <= _MAX_CHOICES:
            whole = self._tokens.longest_of(ids)
            if is_exact:
                whole = self._tokens.fitting(matcher, words, allowed, self.num_left, whole)
            return first | mask_of(whole, len(words))
        if self.num_left > len(self._end) + _MAX_DIGITS:
            return first | words & self._tokens.plain
        # A number may need further digits, as a multiple does.
        digits = self._tokens.fitting(matcher, words, allowed, self.num_left, self._tokens.digits_of(words))
        others = 0 if is_exact else words & self._tokens.plain & ~self._tokens.numbers
        return first | mask_of(digits, len(words)) | others

    def restrict_complete(self, matcher: LLMatcher, words: Mask, allowed: Mask) -> Mask | None:
        """Returns the tokens (W,) beside those that end it which may follow a text that may end; None: all.

        Arguments are those of `restrict`.
        """
        if self.num_left > self._spare or self._tokens.is_within_string(words):
            return None
        if self.num_left > _MAX_DIGITS:
            return words & self._tokens.numbers
        digits = self._tokens.digits_of(words)
        return mask_of(self._tokens.fitting(matcher, words, allowed, self.num_left, digits), len(words))

    def _look(self, matcher: LLMatcher, words: Mask, allowed: Mask) -> bool:
        """Looks for the end; returns True if it is near."""
        end = self._tokens.end(matcher, words, allowed, min(self.num_left, MAX_END))
        if end is None:
            self._look_at = self.num_left * 3 // 4
            return False
        self._density = max(self._density, len(end) / self._tokens.num_bytes(end))
        self._spare = max(_SPARE, math.ceil(self._growth * self._density))
        if len(end) + self._spare >= self.num_left:
            self._end = end
            return True
        # The end becomes longer by a token for each of the text, apart from what `_spare` is for.
        self._look_at = self.num_left - max(1, (self.num_left - len(end) - self._spare) // 2)
        return False

    def follow(self, token_id: int | None = None) -> None:
        """Takes the next token; None: one that is not part of the constrained text."""
        self.num_left -= 1
        if not self._end:
            return
        if token_id == self._end[0]:
            del self._end[0]
        elif token_id is None or not self._is_string or not has_bit(self._tokens.content, token_id):
            self._end.clear()

    def __repr__(self) -> str:
        return f"Closing({self.num_left} tokens left, {len(self._end)} of an end)"


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
        form = len(part.get("pattern", "")) or ("format" in part) * _FORMAT_BYTES  # about as long as its shortest text
        found = 2 + min(max(part.get("minLength", 0), form), MAX_END)
    known[id(part)] = found + sum(map(size, part.get("allOf", ())))
    return known[id(part)]


def _find(reference: str, schema: dict[str, Any]) -> Any:
    """Returns the part that a JSON pointer refers to; None if there is none."""
    found: Any = schema
    for name in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
