"""Texts with labelled spans, from the column formats of the CoNLL shared tasks.

CoNLL-U (a file whose name ends in `.conllu`; universaldependencies.org/format.html): ten columns a word; every word is
a span, labelled by its universal part of speech. The text is the sentence's `# text`. If the words of a contraction
spell it ("do" and "n't"), each word has its own part of it.

    # text = I don't know.
    1	I	I	PRON	...
    2-3	don't	_	_	...
    2	do	do	AUX	...
    3	n't	not	PART	...

CoNLL with IOB tags (any other file): a word and its tag on each line, separated by a tab or a space, and an empty line
after each sentence. `B-x` begins a span of label x; `I-x` continues it, or begins one if there is none to continue.

    Empire	B-location
    State	I-location
    .	O

Such a file does not say where spaces were between its words; `join_words` puts them where English has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway_training.data.examples import Span, SpanLabeledTexts
from headway_training.data.files import ending_of, read_lines
from headway_training.errors import DataError

_NO_SPACE_BEFORE = re.compile(r"[,;:%)\]}]|[.!?…]+|n['\u2019]t|['\u2019](s|m|d|re|ve|ll)", re.IGNORECASE)
_NO_SPACE_AFTER = re.compile(r"[(\[{$£€]")
_CONLLU_COLUMNS = 10
_OUTSIDE = "O"

Words = list[tuple[int, int, str]]
"""Start and end in the text, and label."""


def read_span_labeled_texts(
    path: Path, labels: Sequence[str] | None = None
) -> tuple[SpanLabeledTexts, tuple[str, ...]]:
    """Reads a file of either format.

    Args:
        path: The file; `.gz` and `.xz` are unpacked.
        labels: Known labels in the order of their indices; None: those of the file, sorted.

    Returns:
        The examples and the labels.

    Raises:
        MissingDataError: There is no such file.
        DataError: A line is malformed, a label is not known, or there is none.
    """
    covering = ending_of(path) == ".conllu"
    read = _read_conllu if covering else _read_iob
    sentences = list(read(path))
    found = {label for _, words in sentences for _, _, label in words}
    if not found:
        raise DataError(f"{path} holds no labelled words; expected CoNLL-U, or a word and its tag on each line")
    names = tuple(sorted(found) if labels is None else labels)
    if unknown := found - set(names):
        raise DataError(f"{path}: the label {min(unknown)!r} is not among those of the model: {', '.join(names)}")
    index = {name: i for i, name in enumerate(names)}
    spans = [tuple(Span(start, end, index[label]) for start, end, label in words) for _, words in sentences]
    return SpanLabeledTexts(texts=[text for text, _ in sentences], spans=spans, covering=covering), names


def join_words(words: Sequence[str]) -> tuple[str, list[int]]:
    """Joins words to a text, without a space before most punctuation and clitics, or after an opening bracket.

    Returns:
        The text, and the start of each word in it.
    """
    text, starts = "", []
    for previous, word in zip(["", *words], words, strict=False):
        if text and not _NO_SPACE_BEFORE.fullmatch(word) and not _NO_SPACE_AFTER.fullmatch(previous):
            text += " "
        starts.append(len(text))
        text += word
    return text, starts


@dataclass(slots=True)
class _Sentence:
    """A sentence of CoNLL-U, line by line."""

    text: str | None = None
    surface: list[tuple[str, int, int]] = field(default_factory=list)
    """What the text is made of, words and contractions: form, number of its words in `words`, line."""
    words: list[tuple[str, str]] = field(default_factory=list)
    """Form and label."""
    contracted: int = 0
    """Following words that belong to the last contraction."""


def _read_conllu(path: Path) -> Iterator[tuple[str, Words]]:
    """Yields texts with all their words."""
    sentence = _Sentence()
    for number, line in enumerate([*read_lines(path), ""], start=1):
        if not line.strip():
            if sentence.words:
                yield _place_words(sentence, path)
            sentence = _Sentence()
        elif line.startswith("#"):
            key, _, value = line[1:].partition("=")
            if key.strip() == "text":
                sentence.text = value.strip()
        else:
            _add_word(sentence, line, number, path)


def _add_word(sentence: _Sentence, line: str, number: int, path: Path) -> None:
    columns = line.split("\t")
    if len(columns) != _CONLLU_COLUMNS:
        raise DataError(
            f"{path}, line {number}: {len(columns)} columns; CoNLL-U has {_CONLLU_COLUMNS}, with tabs between"
        )
    index, form, label = columns[0], columns[1], columns[3]
    if "." in index:  # an empty node stands for a word that is not written
        return
    if "-" in index:
        first, last = (int(end) for end in index.split("-"))
        sentence.contracted = last - first + 1
        sentence.surface.append((form, sentence.contracted, number))
        return
    sentence.words.append((form, label))
    if sentence.contracted:
        sentence.contracted -= 1
    else:
        sentence.surface.append((form, 1, number))


def _place_words(sentence: _Sentence, path: Path) -> tuple[str, Words]:
    """Finds a sentence's words in its text."""
    text = sentence.text if sentence.text is not None else " ".join(form for form, _, _ in sentence.surface)
    words: Words = []
    position, next_word = 0, 0
    for form, count, number in sentence.surface:
        while position < len(text) and text[position].isspace():
            position += 1
        if not text.startswith(form, position):
            raise DataError(
                f"{path}, line {number}: the text goes on with {text[position : position + len(form) + 5]!r}, "
                f"where {form!r} is expected"
            )
        parts = sentence.words[next_word : next_word + count]
        words += _place_parts(form, parts, position)
        position += len(form)
        next_word += count
    return text, words


def _place_parts(form: str, parts: Sequence[tuple[str, str]], start: int) -> Words:
    """Places the words of a contraction; if they do not spell it, its first word stands for the whole."""
    if "".join(part for part, _ in parts) != form:
        return [(start, start + len(form), parts[0][1])]
    placed: Words = []
    for part, label in parts:
        placed.append((start, start + len(part), label))
        start += len(part)
    return placed


def _read_iob(path: Path) -> Iterator[tuple[str, Words]]:
    """Yields texts with the spans that their words' tags make up."""
    words: list[tuple[str, str]] = []
    for number, line in enumerate([*read_lines(path), ""], start=1):
        columns = (line.split("\t") if "\t" in line else line.split()) if line.strip() else []
        if columns:
            if len(columns) < 2 or not _is_tag(columns[-1]):
                raise DataError(f"{path}, line {number}: expected a word and its tag (O, B-x or I-x), found {line!r}")
            words.append((columns[0], columns[-1]))
        elif words:
            yield _spans_of_tags(words)
            words = []


def _is_tag(tag: str) -> bool:
    return tag == _OUTSIDE or (tag[:2] in ("B-", "I-") and len(tag) > 2)


def _spans_of_tags(words: Sequence[tuple[str, str]]) -> tuple[str, Words]:
    text, starts = join_words([word for word, _ in words])
    spans: Words = []
    previous = _OUTSIDE
    for (word, tag), start in zip(words, starts, strict=True):
        kind, label, end = tag[:2], tag[2:], start + len(word)
        if tag != _OUTSIDE:
            continues = kind == "I-" and previous != _OUTSIDE and previous[2:] == label
            spans.append((spans.pop()[0] if continues else start, end, label))
        previous = tag
    return text, spans
