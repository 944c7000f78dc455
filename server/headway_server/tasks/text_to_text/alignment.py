"""Alignment: attention between the tokens of a translation and of its source, with the characters of both.

T tokens of a translation, S tokens of its source. Characters are Unicode code points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.preprocessing import EncodedText, TextTokenizer

Span: TypeAlias = tuple[int, int]
"""First character and end, which is excluded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Attention of each token of a translation to each token of its source, with their characters."""

    source_spans: tuple[Span, ...]
    """(S,); empty for a source that is not text."""
    target_spans: tuple[Span, ...]
    """(T,)"""
    attention: NDArray[np.float32]
    """(T, S); rows sum to one."""

    def __post_init__(self) -> None:
        """Checks that the sizes of the parts agree."""
        num_rows, num_columns = self.attention.shape
        assert num_rows == len(self.target_spans), "a row for each token"
        assert not self.source_spans or num_columns == len(self.source_spans), "a column for each token"

    def shifted(self, *, source: int, target: int) -> Alignment:
        """Returns the same alignment for texts in which the sentence and its translation begin at these characters."""
        return replace(
            self, source_spans=_shift(self.source_spans, source), target_spans=_shift(self.target_spans, target)
        )


def align(
    *,
    source_spans: tuple[Span, ...],
    target_text: str,
    target_ids: Sequence[int],
    attention: NDArray[np.float32],
    tokenizer: TextTokenizer,
) -> Alignment:
    """Finds the characters of the tokens on both sides.

    Args:
        source_spans: Characters of the source's S tokens; empty for a source that is not text.
        target_text: The translation.
        target_ids: Its T tokens.
        attention: (T, S), attention of its tokens to the source's.
        tokenizer: Tokenizer of the model.
    """
    return Alignment(
        source_spans=source_spans,
        target_spans=tuple(target_spans(target_text, target_ids, tokenizer)),
        attention=attention,
    )


def source_spans(text: str, encoded: EncodedText) -> tuple[Span, ...]:
    """Returns the characters of each of a text's S tokens, without white space at their ends."""
    return tuple(_tidy(encoded.offsets, text))


def target_spans(text: str, token_ids: Sequence[int], tokenizer: TextTokenizer) -> list[Span]:
    """Finds the characters of each of a text's T tokens.

    A token that is part of a character has the whole character; one without text has an empty span.

    Args:
        text: Text of the tokens, possibly cut at its ends.
        token_ids: The T tokens.
        tokenizer: The model's.
    """
    encoded = tokenizer.encode_now(text, with_offsets=True)
    if encoded.input_ids.tolist() == list(token_ids):  # the tokenizer's own tokens, with known characters
        return _tidy(encoded.offsets, text)
    return _tidy(_spans_by_decoding(text, token_ids, tokenizer), text)


def _spans_by_decoding(text: str, token_ids: Sequence[int], tokenizer: TextTokenizer) -> list[Span]:
    """Finds the spans by the growth of the text with each token.

    The text of a token may change with the next one: parts of a character, or a subword joined to punctuation. The
    span of such a token includes the characters of the token that completes it.
    """
    read = [tokenizer.decode(token_ids[:count]) for count in range(len(token_ids) + 1)]
    settled = [0]  # final characters of the text, by number of tokens
    for written in read[1:]:
        settled.append(max(settled[-1], _common_prefix(written, text)))
    spans: list[Span] = []
    unsettled: list[int] = []
    for index, (start, end) in enumerate(pairwise(settled)):
        spans.append((start, end))
        if start != end:
            for earlier in unsettled:
                spans[earlier] = (min(spans[earlier][0], start), end)
            unsettled = []
        if len(read[index + 1]) > end or (start == end and _reads_as_something(tokenizer, token_ids[index])):
            unsettled.append(index)
    return spans


def _reads_as_something(tokenizer: TextTokenizer, token_id: int) -> bool:
    """Returns True if a token has text; special tokens have none."""
    return bool(tokenizer.decode([token_id]))


def _shift(spans: Sequence[Span], distance: int) -> tuple[Span, ...]:
    """Moves spans; parts before the first character are cut off."""
    return tuple((max(start + distance, 0), max(end + distance, 0)) for start, end in spans)


def _common_prefix(first: str, second: str) -> int:
    """Returns the length of the common prefix of two texts."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])


def _tidy(spans: Sequence[Span], text: str) -> list[Span]:
    """Cuts white space off both ends of spans, and puts empty spans at the end of the preceding one."""
    tidied: list[Span] = []
    last_end = 0
    for start, end in spans:
        covered = text[start:end]
        if not covered:
            tidied.append((last_end, last_end))
            continue
        if covered.strip():
            start += len(covered) - len(covered.lstrip())  # noqa: PLW2901 (the same span, tidied)
            end -= len(covered) - len(covered.rstrip())  # noqa: PLW2901
        last_end = max(last_end, end)
        tidied.append((start, end))
    return tidied
