"""Text that knows which of its characters people wrote, through everything a chat template does with it.

A template joins its own words with those of a conversation. Special tokens are only what the template wrote, so it must
stay known who wrote what. What cannot be followed character by character counts as written by people: it can lose the
template a special token, which is noticed when a bundle is loaded, but it can never give one away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self, SupportsIndex

_TEMPLATE = b"\0"
_CONTENT = b"\1"


class MarkedText(str):
    """A string with a mark for each character: whether it is content, that is, not the template's own."""

    __slots__ = ("marks",)

    marks: bytes
    """One byte a character: 1 for content, 0 for the template's own."""

    def __new__(cls, text: str, marks: bytes | None = None) -> Self:
        """Marks `text`; without `marks` all of it is content."""
        self = super().__new__(cls, text)
        self.marks = _CONTENT * len(text) if marks is None else marks
        assert len(self.marks) == len(text), "there is a mark for each character"
        return self

    def runs(self) -> Iterator[tuple[str, bool]]:
        """Yields the longest pieces of one kind, in order, and whether each is content."""
        start = 0
        while start < len(self.marks):
            kind = self.marks[start : start + 1]
            other = _TEMPLATE if kind == _CONTENT else _CONTENT
            end = self.marks.find(other, start)
            end = len(self.marks) if end < 0 else end
            yield str.__getitem__(self, slice(start, end)), kind == _CONTENT
            start = end

    def __str__(self) -> str:
        return self  # str() of it keeps the marks: this is how a template writes a value

    def __add__(self, other: str) -> MarkedText:
        return MarkedText(str.__add__(self, other), self.marks + marks_of(other))

    def __radd__(self, other: str) -> MarkedText:
        return MarkedText(str.__add__(other, self), marks_of(other) + self.marks)

    def __mul__(self, count: SupportsIndex) -> MarkedText:
        return MarkedText(str.__mul__(self, count), self.marks * count)

    __rmul__ = __mul__

    def __getitem__(self, index: SupportsIndex | slice) -> MarkedText:
        marks = self.marks[index] if isinstance(index, slice) else bytes([self.marks[index]])
        return MarkedText(str.__getitem__(self, index), marks)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def lstrip(self, characters: str | None = None, /) -> MarkedText:
        """Does what `str.lstrip` does."""
        return self[len(self) - len(str.lstrip(self, characters)) :]

    def rstrip(self, characters: str | None = None, /) -> MarkedText:
        """Does what `str.rstrip` does."""
        return self[: len(str.rstrip(self, characters))]

    def strip(self, characters: str | None = None, /) -> MarkedText:
        """Does what `str.strip` does."""
        return self.lstrip(characters).rstrip(characters)

    def removeprefix(self, prefix: str, /) -> MarkedText:
        """Does what `str.removeprefix` does."""
        return self[len(prefix) :] if str.startswith(self, prefix) else self

    def removesuffix(self, suffix: str, /) -> MarkedText:
        """Does what `str.removesuffix` does."""
        return self[: len(self) - len(suffix)] if suffix and str.endswith(self, suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:  # a list of str, for mypy
        """Does what `str.split` does."""
        return self._cut(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:  # a list of str, for mypy
        """Does what `str.rsplit` does."""
        return self._cut(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[Any]:  # a list of str, for mypy
        """Does what `str.splitlines` does."""
        whole = self._cut(str.splitlines(self, True), 0)
        if keepends:
            return whole
        return [line[: len(bare)] for line, bare in zip(whole, str.splitlines(self), strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> MarkedText:
        """Does what `str.replace` does."""
        if not old:
            return MarkedText(str.replace(self, old, new, count))
        return join(new, self.split(old, count))

    def lower(self) -> MarkedText:
        """Does what `str.lower` does."""
        return self._rewritten(str.lower(self))

    def upper(self) -> MarkedText:
        """Does what `str.upper` does."""
        return self._rewritten(str.upper(self))

    def capitalize(self) -> MarkedText:
        """Does what `str.capitalize` does."""
        return self._rewritten(str.capitalize(self))

    def title(self) -> MarkedText:
        """Does what `str.title` does."""
        return self._rewritten(str.title(self))

    def _rewritten(self, text: str) -> MarkedText:
        """Marks a text whose case was changed; outside of ASCII its length may change, so all of it is content."""
        return MarkedText(text, self.marks if self.isascii() else None)

    def _cut(self, pieces: list[str], separator_length: int) -> list[MarkedText]:
        """Finds the pieces of a split again: one after the other, separators of a known length between, or spaces."""
        result, cursor = [], 0
        for piece in pieces:
            start = cursor if separator_length else str.find(self, piece, cursor)
            cursor = start + len(piece)
            result.append(self[start:cursor])
            cursor += separator_length
        return result


def marks_of(text: str) -> bytes:
    """Returns the marks of a text; a plain one is the template's own."""
    return text.marks if isinstance(text, MarkedText) else _TEMPLATE * len(text)


def join(separator: str, parts: Iterable[str]) -> MarkedText:
    """Joins texts like `str.join`, and their marks."""
    parts = list(parts)
    return MarkedText(str.join(separator, parts), marks_of(separator).join(map(marks_of, parts)))
