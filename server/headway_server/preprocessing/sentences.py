"""Splitting of texts into sentences, and joining with the original spacing.

sentencex finds the boundaries (docs/translation.md has the reasons). It keeps every character of a text, and does not
split in doubt, which suits translation: two sentences together translate well, half a sentence does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import sentencex

from headway_server.errors import no_panics

_PARAGRAPH = re.compile(r"(\n[^\S\n]*\n\s*)")
"""A blank line, which always ends a sentence. The pattern begins with a line break: beginning with any space, it would
backtrack over long runs of spaces."""
_SPACE = re.compile(r"\s")
_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")
_WINDOW_LENGTH = 2**14
"""Window of the library in characters, and the longest sentence. Its time grows with the square of the quotation marks
in a text, while it holds the GIL."""
_LINE_BREAK = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_FULL_WIDTH_ENDS = frozenset("\u3002\uff01\uff1f\uff0e\uff61\u2026")
"""Ends of sentences in scripts without a space after them: the ideographic full stop, full-width exclamation and
question marks, the full-width and the half-width full stop, the ellipsis."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence without surrounding white space."""

    text: str
    """Text of the sentence, of the original length; line breaks are replaced by spaces."""
    start: int
    """Position of its first character in the whole text, in Unicode code points."""

    @property
    def end(self) -> int:
        """Position after its last character."""
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class SplitText:
    """A text as sentences and the spacing between them."""

    sentences: tuple[Sentence, ...]
    gaps: tuple[str, ...]
    """White space before each sentence and after the last: one more than the sentences."""

    def join(self, translations: Sequence[str]) -> tuple[str, list[int]]:
        """Joins translations of the sentences with the spacing of the text.

        Between sentences without spacing, as in Chinese, their translations get a space, unless the first one ends with
        such a script's mark.

        Returns:
            The text, and where in it each translation begins.
        """
        assert len(translations) == len(self.sentences), "one translation for each sentence"
        gaps = list(self.gaps)
        for index, sentence in enumerate(self.sentences[:-1]):
            translated = translations[index]
            if not gaps[index + 1] and sentence.text[-1] in _FULL_WIDTH_ENDS and translated:
                gaps[index + 1] = "" if translated[-1] in _FULL_WIDTH_ENDS else " "
        parts = [gaps[0]]
        for translated, gap in zip(translations, gaps[1:], strict=True):
            parts += [translated, gap]
        starts = list(accumulate((len(part) for part in parts), initial=0))
        return "".join(parts), starts[1:-1:2]


def split_sentences(text: str, language: str) -> SplitText:
    """Splits a text into sentences.

    Args:
        text: Any text.
        language: BCP 47 code; an unknown language gets rules common to most languages.
    """
    sentences: list[Sentence] = []
    gaps = [""]
    start = 0
    for part in _parts(text, language.partition("-")[0].lower()):
        stripped = part.strip()
        if not stripped:
            gaps[-1] += part
        else:
            before = part.index(stripped)
            gaps[-1] += part[:before]
            sentences.append(Sentence(_LINE_BREAK.sub(" ", stripped), start + before))
            gaps.append(part[before + len(stripped) :])
        start += len(part)
    assert start == len(text), "splitting loses nothing"
    return SplitText(tuple(sentences), tuple(gaps))


def _parts(text: str, language: str) -> Iterator[str]:
    """Yields sentences with surrounding white space; joined, they are the text."""
    for paragraph in _PARAGRAPH.split(text):
        yield from _windowed_parts(paragraph, language)


def _windowed_parts(paragraph: str, language: str) -> Iterator[str]:
    """Yields the sentences of a paragraph by windows.

    The last sentence of a window starts the next, since it may continue.
    """
    start = 0
    while start < len(paragraph):
        window = paragraph[start : start + _WINDOW_LENGTH]
        parts = _segment(window, language)
        if start + len(window) < len(paragraph):
            parts = parts[:-1] or [_to_last_space(window)]
        yield from parts
        start += sum(map(len, parts))


def _segment(window: str, language: str) -> list[str]:
    """Splits a window at the library's boundaries; if it fails, the window is one sentence.

    Non-ASCII spaces are replaced by plain ones for the library: it slices the letter before a full stop by bytes, and
    panics on such a space (sentencex 1.0.32).
    """
    shown = _WIDE_SPACE.sub(" ", window)
    try:
        with no_panics():
            lengths = [len(part) for part in sentencex.segment(language, shown)]
    except RuntimeError:
        return [window]
    if sum(lengths) != len(window):  # guaranteed by the library; a whole window is better than one with a gap
        return [window]
    ends = list(accumulate(lengths))
    return [window[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _to_last_space(text: str) -> str:
    """Returns a text up to its last white space, or the whole text."""
    *_, end = (0, *(match.end() for match in _SPACE.finditer(text)))
    return text[: end or None]
