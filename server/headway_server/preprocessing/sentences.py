"""Texts to sentences and back; the spacing between sentences is kept.

sentencex finds the borders (docs/translation.md says why). It keeps every character of a text, and does not split where
it is in doubt, which suits translation: two sentences together are translated well, half a sentence is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import sentencex

from headway_server.errors import no_panics

_PARAGRAPH = re.compile(r"(\n[^\S\n]*\n\s*)")
"""A blank line, which ends a sentence whatever stands before it. The pattern begins with a line break, so that other
white space is passed once: one that began with any space would try each of many spaces again."""
_SPACE = re.compile(r"\s")
_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")
_WINDOW_LENGTH = 2**14
"""Characters that are looked at together, and the most of a sentence. The library's time grows with the square of the
quotation marks in a text, and it holds the interpreter's lock meanwhile."""
_LINE_BREAK = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_FULL_WIDTH_ENDS = frozenset("\u3002\uff01\uff1f\uff0e\uff61\u2026")
"""Ends of sentences in scripts that put no space after them: the full-width stop, exclamation and question marks, the
full-width and the half-width full stop, the ellipsis."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence, without the white space around it."""

    text: str
    """As long as in the whole text; a line break within the sentence has become a space."""
    start: int
    """Its first character in the whole text, in Unicode code points."""

    @property
    def end(self) -> int:
        """After its last character."""
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class SplitText:
    """A text as sentences and what stands between them."""

    sentences: tuple[Sentence, ...]
    gaps: tuple[str, ...]
    """White space before each sentence and after the last one: one more than there are sentences."""

    def join(self, translations: Sequence[str]) -> tuple[str, list[int]]:
        """Joins translations of the sentences with the spacing of the text.

        Where nothing separates a sentence from the next one, as in Chinese, a space is put between their translations
        unless the first ends as such sentences do.

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
        language: BCP 47 code of its language; for one that is not known, rules that most languages share.
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
    """Yields sentences with the white space around them; joined, they are the text."""
    for paragraph in _PARAGRAPH.split(text):
        yield from _windowed_parts(paragraph, language)


def _windowed_parts(paragraph: str, language: str) -> Iterator[str]:
    """Yields the sentences of a paragraph, window by window; the last of a window begins the next, as it may go on."""
    start = 0
    while start < len(paragraph):
        window = paragraph[start : start + _WINDOW_LENGTH]
        parts = _segment(window, language)
        if start + len(window) < len(paragraph):
            parts = parts[:-1] or [_to_last_space(window)]
        yield from parts
        start += sum(map(len, parts))


def _segment(window: str, language: str) -> list[str]:
    """Cuts a window at the borders of sentences that the library finds; if it fails, the window is one sentence.

    The library is shown a plain space for each that is not ASCII: it takes the letter before a full stop apart by
    bytes, and panics if such a space stands between them (sentencex 1.0.32).
    """
    shown = _WIDE_SPACE.sub(" ", window)
    try:
        with no_panics():
            lengths = [len(part) for part in sentencex.segment(language, shown)]
    except RuntimeError:
        return [window]
    if sum(lengths) != len(window):  # the library promises it; a window as a whole is better than one with a hole
        return [window]
    ends = list(accumulate(lengths))
    return [window[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _to_last_space(text: str) -> str:
    """Returns a text up to its last white space, or all of it."""
    *_, end = (0, *(match.end() for match in _SPACE.finditer(text)))
    return text[: end or None]
