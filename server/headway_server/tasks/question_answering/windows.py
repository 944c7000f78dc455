"""Windows of a question and a part of its context, as a model reads them, and the answers in them.

N tokens of a context, P tokens of it in a window, T tokens of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headway_server.errors import no_panics
from headway_server.preprocessing import EncodedText
from headway_server.preprocessing.subwords import Subwords, grapheme_ends

DEFAULT_ANSWER_TOKENS: Final = 15
DEFAULT_WINDOW_TOKENS: Final = 384
DEFAULT_OVERLAP_TOKENS: Final = 128
"""Defaults of the field: those of the question-answering pipeline of transformers."""
_MORE: Final = 4
"""Pairs of tokens that are looked at for each answer: several pairs may be one answer, of the same words."""


@dataclass(frozen=True, slots=True)
class PairFrame:
    """The special tokens that a tokenizer puts before, between and after the two texts of a pair."""

    before: NDArray[np.int64]
    between: NDArray[np.int64]
    after: NDArray[np.int64]
    types: tuple[NDArray[np.int64], ...]
    """Types of the tokens before, of a token of the first text, of those between, of one of the second, and after."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Reads them from a pair of letters.

        Raises:
            ValueError: The tokenizer makes no tokens of a letter.
        """
        with no_panics():
            [encoding] = tokenizer.encode_batch([("a", "a")])
        sources = np.array([-1 if source is None else source for source in encoding.sequence_ids])
        firsts, seconds = np.flatnonzero(sources == 0), np.flatnonzero(sources == 1)
        if not len(firsts) or not len(seconds):
            raise ValueError("the tokenizer makes no tokens of a letter")
        (first, first_end), (second, second_end) = ((run[0], run[-1] + 1) for run in (firsts, seconds))
        ids, types = np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64)
        parts = (slice(first), slice(first, first + 1), slice(first_end, second), slice(second, second + 1))
        after = slice(second_end, None)
        return cls(ids[parts[0]], ids[parts[2]], ids[after], tuple(types[part] for part in (*parts, after)))

    def __len__(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def join(
        self, question: NDArray[np.int64], context: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns ids and types of a window, (T,) each, of a question's tokens and (P,) tokens of a context."""
        ids = np.concatenate([self.before, question, self.between, context, self.after])
        before, of_question, between, of_context, after = self.types
        types = [before, of_question.repeat(len(question)), between, of_context.repeat(len(context)), after]
        return ids, np.concatenate(types)


class Window(NamedTuple):
    """A part of a context: tokens `start` to `end`, `end` excluded."""

    start: int
    end: int


def shared_tokens(room: int) -> int:
    """Returns the tokens that neighbouring windows share by default, which have room for so many of a context's."""
    return min(DEFAULT_OVERLAP_TOKENS, room // 2)


def split(length: int, room: int, shared: int) -> list[Window]:
    """Returns the windows of a context of `length` tokens, of `room` each, which share some with their neighbours."""
    return [Window(start, min(start + room, length)) for start in range(0, max(length - shared, 1), room - shared)]


class Found(NamedTuple):
    """An answer: characters `start` to `end`, `end` excluded, in Unicode code points."""

    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Context:
    """A context that has been tokenized."""

    ids: NDArray[np.int64]
    """(N,)"""
    starts: NDArray[np.int64]
    """(N,), first character of an answer that begins with a token; -1 for white space with nothing behind it."""
    ends: NDArray[np.int64]
    """(N,), end of an answer that ends with it; -1 for white space with nothing before it."""

    @classmethod
    def of(cls, text: str, encoded: EncodedText, *, splits_words: bool) -> Self:
        """Finds the words of a context, or its graphemes with `splits_words`, between which answers begin and end."""
        subwords = Subwords.find(text, encoded.offsets)
        begins = ~subwords.joined if splits_words else subwords.word_starts(text, encoded.word_ids)
        firsts = np.flatnonzero(begins)
        lengths = np.diff(firsts, append=len(begins))
        numbers = np.arange(len(encoded))
        following = np.searchsorted(subwords.tokens, numbers)  # (N,), the subword of a token, or that after white space
        before = np.searchsorted(subwords.tokens, numbers, side="right")  # (N,), one more than that, or than before it
        starts = np.append(subwords.starts[firsts].repeat(lengths), -1)
        lasts = np.maximum.reduceat(subwords.ends, firsts) if len(firsts) else firsts
        ends = np.append(-1, grapheme_ends(text, lasts.tolist()).repeat(lengths))
        return cls(encoded.input_ids, starts[following], ends[before])

    def read(
        self, logits: NDArray[np.float32], window: Window, *, first: int, has_null: bool, top_k: int, max_tokens: int
    ) -> tuple[list[Found], float]:
        """Returns the best answers of a window, the best first and none twice, and the score of there being none.

        Args:
            logits: Logits of a token being the first and the last of an answer, (2, T).
            window: Its part of the context.
            first: Position in the window of this part's first token.
            has_null: True if the window's first token stands for there being no answer.
            top_k: Most answers.
            max_tokens: Most tokens of an answer.

        Raises:
            FloatingPointError: A logit is not finite.
        """
        count = window.end - window.start
        read = logits[:, first : first + count]
        if has_null:
            read = np.concatenate([logits[:, :1], read], axis=1)  # (2, 1 + P)
        if not np.isfinite(read).all():
            raise FloatingPointError("the model's logits are not finite")
        chances = np.exp(read.astype(np.float64) - read.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        null = float(chances[:, 0].prod()) if has_null else 0.0
        starts, ends = (side[window.start : window.end] for side in (self.starts, self.ends))
        begin, end = chances[0, has_null:] * (starts >= 0), chances[1, has_null:] * (ends >= 0)  # (P,) each
        width = min(max_tokens, count)
        scores = begin[:, None] * sliding_window_view(np.pad(end, (0, width - 1)), width)  # (P, width)
        return _best(scores, starts, ends, top_k), null


def _best(scores: NDArray[np.float64], starts: NDArray[np.int64], ends: NDArray[np.int64], top_k: int) -> list[Found]:
    """Returns the best distinct answers by the scores of their first token and of their length less one."""
    width = scores.shape[1]
    of_pairs = sliding_window_view(np.pad(ends, (0, width - 1), constant_values=-1), width)  # (P, width)
    is_next = np.ones(scores.shape, np.bool_)  # True where a pair ends with another word than the one before it
    is_next[:, 1:] = of_pairs[:, 1:] != of_pairs[:, :-1]
    firsts = np.flatnonzero(is_next)
    best = np.maximum.reduceat(scores.ravel(), firsts)  # (N,), of a first token and a last word
    begins, finishes = starts[firsts // width], of_pairs[is_next]
    count = _MORE * top_k
    while True:
        count = min(count, len(best))
        places = np.argpartition(-best, count - 1)[:count]
        places = places[np.lexsort((places, -best[places]))]
        is_text = (best[places] > 0) & (begins[places] < finishes[places])  # not white space alone
        likely = places[is_text]
        spans = begins[likely] * (int(ends.max()) + 1) + finishes[likely]  # a number for each
        kept = likely[np.sort(np.unique(spans, return_index=True)[1])[:top_k]]
        if len(kept) == top_k or count == len(best) or best[places[-1]] <= 0:
            columns = (best[kept], begins[kept], finishes[kept])
            return [Found(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        count *= _MORE


def merge(windows: list[list[Found]], top_k: int) -> list[Found]:
    """Returns the best answers of all windows of a context; one that several windows have, with its highest score."""
    found: dict[tuple[int, int], Found] = {}
    for one in (one for window in windows for one in window):
        span = (one.start, one.end)
        if span not in found or found[span].score < one.score:
            found[span] = one
    return sorted(found.values(), key=lambda one: (-one.score, one.start, one.end))[:top_k]
