"""From attention over tokens to characters: which part of a translation attended to which part of its source.

T is the number of tokens of a translation, S that of its source. Characters are Unicode code points.
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
"""First character, and character after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """How much each token of a translation attended to each token of its source, with their characters."""

    source_spans: tuple[Span, ...]
    """(S,); empty where the source is no text."""
    target_spans: tuple[Span, ...]
    """(T,)"""
    attention: NDArray[np.float32]
    """(T, S); rows sum to one."""

    def __post_init__(self) -> None:
        """Checks that the parts fit each other."""
        num_rows, num_columns = self.attention.shape
        assert num_rows == len(self.target_spans), "a row for each token"
        assert not self.source_spans or num_columns == len(self.source_spans), "a column for each token"

    def shifted(self, *, source: int, target: int) -> Alignment:
        """Returns the same for longer texts, in which the sentence and its translation begin at these characters."""
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
        source_spans: Characters of the source's S tokens; none where it is no text.
        target_text: The translation.
        target_ids: Its T tokens.
        attention: (T, S) of each of them over the source's.
        tokenizer: The model's.
    """
    return Alignment(
        source_spans=source_spans,
        target_spans=tuple(target_spans(target_text, target_ids, tokenizer)),
        attention=attention,
    )


def source_spans(text: str, encoded: EncodedText) -> tuple[Span, ...]:
    """Returns the characters of a text that each of its S tokens stands for, without white space at their ends."""
    return tuple(_tidy(encoded.offsets, text))


def target_spans(text: str, token_ids: Sequence[int], tokenizer: TextTokenizer) -> list[Span]:
    """Finds the characters of a text that each of its T tokens stands for.

    A token that is part of a character has the whole character; one without text has an empty span.

    Args:
        text: The text of the tokens, possibly cut at its ends.
        token_ids: The T tokens.
        tokenizer: The model's.
    """
    encoded = tokenizer.encode_now(text, with_offsets=True)
    if encoded.input_ids.tolist() == list(token_ids):  # the usual tokens of this text, whose characters are known
        return _tidy(encoded.offsets, text)
    return _tidy(_spans_by_decoding(text, token_ids, tokenizer), text)


def _spans_by_decoding(text: str, token_ids: Sequence[int], tokenizer: TextTokenizer) -> list[Span]:
    """Finds them by what the text grows by with each token.

    The text of a token may change with the next one: parts of a character, or a punctuation mark that a subword is
    joined to. Such a token has its own certain characters and those of the token that settles the others.
    """
    read = [tokenizer.decode(token_ids[:count]) for count in range(len(token_ids) + 1)]
    settled = [0]  # characters of the text that are certain after so many tokens
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
    """Moves spans; what would be before the first character is cut off."""
    return tuple((max(start + distance, 0), max(end + distance, 0)) for start, end in spans)


def _common_prefix(first: str, second: str) -> int:
    """Returns how many characters two texts have in common at their beginnings."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])


def _tidy(spans: Sequence[Span], text: str) -> list[Span]:
    """Cuts white space off both ends of spans, and places tokens without text behind those before them."""
    tidied: list[Span] = []
    place = 0
    for start, end in spans:
        covered = text[start:end]
        if not covered:
            tidied.append((place, place))
            continue
        if covered.strip():
            start += len(covered) - len(covered.lstrip())  # noqa: PLW2901 (the same span, tidied)
            end -= len(covered) - len(covered.rstrip())  # noqa: PLW2901
        place = max(place, end)
        tidied.append((start, end))
    return tidied
