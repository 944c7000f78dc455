"""Tags of subwords, and the labelled spans that they stand for.

A text's spans are predicted by one tag for each subword, in the IOB2 scheme (Tjong Kim Sang and Veenstra 1999): `B-x`
begins a span of label x, `I-x` continues it, `O` stands outside of all spans. So a model finds the borders of words and
names itself, in raw text. If spans are all the words, there is no `O`.

**Subwords** here are the tokens that still have characters when white space around them is cut off; special tokens and
tokens of white space have no tag. No span begins or ends between two subwords that share a character (one character may
be several tokens of bytes), or within a grapheme: an extended grapheme cluster (Unicode Standard Annex 29), as the
regular expressions of `tokenizers` find them, with the conjuncts of Indic scripts (rule GB9c).

The spans of a text are those of the likeliest sequence of tags that the scheme allows, by the product of the tags'
probabilities. The probability of a span is the geometric mean of its tags'.

T tokens, C tags.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, pre_tokenizers

from headway_training.data.examples import Span

IGNORED = -100
"""Tag of a token that has none."""
_GRAPHEMES = pre_tokenizers.Split(Regex(r"\X"), "isolated")
_JOINER = "\u200d"
_MOST_MARKS = 64
"""Between two consonants."""
_LINKERS = frozenset(
    "\u094d\u09cd\u0acd\u0b4d\u0c4d\u0d4d\u1039\u17d2\u1a60\u1b44\u1bab\ua9c0\uaaf6"
    "\U00010a3f\U00011133\U000113d0\U0001193e\U00011a47\U00011a99\U00011f42"
)
"""Marks that join the consonants around them (`InCB=Linker` of Unicode 17)."""


class Subword(NamedTuple):
    """A token with characters of its own."""

    token: int
    """Its place among the text's tokens."""
    start: int
    """Its first character that is not white space."""
    end: int
    """The character after its last one that is not white space."""
    joined: bool
    """True if no span can begin here: it shares a character with the subword before, or continues its grapheme."""


class PredictedSpan(NamedTuple):
    """A span that a model has found."""

    start: int
    end: int
    label: int
    probability: float


@dataclass(frozen=True, slots=True)
class TagScheme:
    """The tags of some labels, in the order of a model's outputs: `O` unless spans cover, then `B` and `I` a label."""

    labels: tuple[str, ...]
    covering: bool
    """Whether every subword is in a span, so that there is no `O`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tags."""
        outside = () if self.covering else ("O",)
        return (*outside, *(f"{kind}-{label}" for label in self.labels for kind in "BI"))

    def begin(self, label: int) -> int:
        """The tag that begins a span."""
        return 2 * label + (not self.covering)

    def inside(self, label: int) -> int:
        """The tag that continues a span."""
        return self.begin(label) + 1

    def label(self, tag: int) -> int | None:
        """The label a tag belongs to; None for `O`."""
        index = tag - (not self.covering)
        return None if index < 0 else index // 2

    def begins(self, tag: int) -> bool:
        """Whether a tag begins a span."""
        label = self.label(tag)
        return label is not None and tag == self.begin(label)


def find_subwords(text: str, offsets: Sequence[tuple[int, int]]) -> list[Subword]:
    """Finds the subwords among the tokens of a text.

    Args:
        text: The text.
        offsets: First character and character after each token, in Unicode code points; (0, 0) for a special token.
    """
    subwords: list[Subword] = []
    covered = 0
    for token, (first, after) in enumerate(offsets):
        trimmed = text[first:after].strip()
        if trimmed:
            start = text.index(trimmed, first)
            end = start + len(trimmed)
            joined = bool(subwords) and (start < covered or _continues_grapheme(text, start))
            subwords.append(Subword(token, start, end, joined))
            covered = max(covered, end)
    return subwords


def _continues_grapheme(text: str, position: int) -> bool:
    """True if a character is in the grapheme of the one before; for flags and conjuncts what is before that counts."""
    if position == 0 or text[position - 1 : position + 1].isascii():
        return False
    if unicodedata.category(text[position]) in ("Mn", "Mc", "Me") or text[position - 1] == _JOINER:
        return True
    if _is_flag(text[position]) and _is_flag(text[position - 1]):
        run = next((n for n in range(position) if not _is_flag(text[position - 1 - n])), position)
        return run % 2 == 1
    if unicodedata.category(text[position]) in ("Lo", "Cn"):  # the newest scripts have no category here
        before = reversed(text[max(0, position - _MOST_MARKS) : position])
        marks = takewhile(_extends, before)
        if not _LINKERS.isdisjoint(marks):
            return True
    return len(_GRAPHEMES.pre_tokenize_str(text[position - 1 : position + 1])) == 1


def _extends(mark: str) -> bool:
    """True for a mark that may stand between the consonants of a conjunct."""
    if mark in _LINKERS:
        return True
    return unicodedata.category(mark) != "Mc" and len(_GRAPHEMES.pre_tokenize_str(f"a{mark}")) == 1


def _is_flag(character: str) -> bool:
    """True for a letter of those that make a flag two by two."""
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def subword_tags(subwords: Sequence[Subword], spans: Sequence[Span], scheme: TagScheme) -> list[int]:
    """The tag of each subword: of the span that holds its first character, or else the first that begins within it.

    A span that begins within a subword of an earlier span cannot be expressed by tags and is lost.
    """
    tags: list[int] = []
    next_span, begun = 0, -1
    for subword in subwords:
        while next_span < len(spans) and spans[next_span].end <= subword.start:
            next_span += 1
        if next_span == len(spans) or spans[next_span].start >= subword.end:
            tags.append(IGNORED if scheme.covering else 0)
            continue
        label = spans[next_span].label
        tags.append(scheme.inside(label) if begun == next_span else scheme.begin(label))
        begun = next_span
    return tags


def split_tags(
    tags: NDArray[np.int64], origins: NDArray[np.int64], is_blank: NDArray[np.bool_], scheme: TagScheme
) -> NDArray[np.int64]:
    """The tags of the parts of split subwords.

    The first part that is not white space takes the tag, white space before it has none, and what follows continues.

    Args:
        tags: Of the subwords, `IGNORED` if there is none.
        origins: The subword that each part comes from, ascending, (T,).
        is_blank: Which parts are white space alone, (T,).
        scheme: The tags.
    """
    before: NDArray[np.int64] = np.cumsum(~is_blank) - ~is_blank  # parts with characters before each part
    before = before - before[np.searchsorted(origins, origins)]  # of its own subword
    begins = [tag for tag in range(len(scheme.names)) if scheme.begins(tag)]
    own = tags[origins]
    following = own + np.isin(own, begins)  # `I` comes after the `B` of a label
    return np.where(before > 0, following, np.where(is_blank, IGNORED, own))


def likeliest_tags(log_probabilities: NDArray[np.float32], subwords: Sequence[Subword], scheme: TagScheme) -> list[int]:
    """The likeliest sequence of tags that the scheme allows (Viterbi 1967).

    Args:
        log_probabilities: (T, C).
        subwords: The subwords among the tokens.
        scheme: The tags.
    """
    if not subwords:
        return []
    num_tags = len(scheme.names)
    allowed = np.array([[_may_follow(scheme, b, a) for b in range(num_tags)] for a in range(num_tags)])
    starts = np.array([_may_follow(scheme, tag, None) for tag in range(num_tags)])
    joined = np.array([[_may_join(scheme, b, a) for b in range(num_tags)] for a in range(num_tags)])
    scores = np.where(starts, log_probabilities[subwords[0].token], -np.inf)  # (C)
    back: list[NDArray[np.int64]] = []
    for subword in subwords[1:]:
        steps = np.where(joined if subword.joined else allowed, scores[:, None], -np.inf)  # (C before, C)
        back.append(steps.argmax(axis=0))
        scores = steps.max(axis=0) + log_probabilities[subword.token]
    tags = [int(scores.argmax())]
    for step in reversed(back):
        tags.append(int(step[tags[-1]]))
    return tags[::-1]


def _may_follow(scheme: TagScheme, tag: int, before: int | None) -> bool:
    label = scheme.label(tag)
    if label is None or scheme.begins(tag):
        return True
    return before is not None and scheme.label(before) == label


def _may_join(scheme: TagScheme, tag: int, before: int) -> bool:
    return not scheme.begins(tag) and scheme.label(tag) == scheme.label(before)


def predict_spans(
    log_probabilities: NDArray[np.float32], subwords: Sequence[Subword], scheme: TagScheme, text: str = ""
) -> list[PredictedSpan]:
    """The spans of a text.

    Args:
        log_probabilities: (T, C).
        subwords: The subwords among the tokens.
        scheme: The tags.
        text: The text, in which a span ends with a grapheme, whose accent may have no token; empty: with a token.
    """
    groups: list[list[int]] = []
    tags = likeliest_tags(log_probabilities, subwords, scheme)
    for index, tag in enumerate(tags):
        if scheme.begins(tag):
            groups.append([index])
        elif scheme.label(tag) is not None:
            groups[-1].append(index)
    spans = []
    for group in groups:
        label = scheme.label(tags[group[0]])
        assert label is not None, "a group begins with a tag that begins a span"
        mean = np.mean([log_probabilities[subwords[i].token, tags[i]] for i in group])
        start, end = subwords[group[0]].start, max(subwords[i].end for i in group)
        while end < len(text) and _continues_grapheme(text, end):
            end += 1
        spans.append(PredictedSpan(start, end, label, float(np.exp(mean))))
    return spans


def labels_of_words(
    log_probabilities: NDArray[np.float32], subwords: Sequence[Subword], words: Sequence[Span], scheme: TagScheme
) -> list[int]:
    """The likeliest label of each word if the borders of words are given.

    A word's subwords are those that begin in it, or else the one that holds its first character. The first of them
    begins a span and the others continue it.

    Args:
        log_probabilities: (T, C).
        subwords: The subwords among the tokens.
        words: The words, in order; their labels are not read.
        scheme: The tags.
    """
    begins = np.array([scheme.begin(label) for label in range(len(scheme.labels))])  # (labels)
    labels = []
    for word in words:
        own = [subword for subword in subwords if word.start <= subword.start < word.end]
        own = own or [subword for subword in subwords if subword.start <= word.start < subword.end][:1]
        scores = np.zeros(len(begins), np.float32)
        for number, subword in enumerate(own):
            scores += log_probabilities[subword.token, begins + (number > 0)]
        labels.append(int(scores.argmax()))
    return labels
