"""Reasoning of a model before its answer: the delimiters in its chat template, and its separation from the answer.

Models write reasoning between two delimiters, such as `<think>` and `</think>`. They may be special tokens. Some
templates end a prompt with the first delimiter, so the model's text begins within the reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

from headway_server.preprocessing.tools import Said

_NAME: Final = re.compile(r"think|thought", re.IGNORECASE)
_END: Final = re.compile(r"(?P<open>[<\[])/(?P<name>[\w:]*(?:think|thought)[\w:]*)(?P<close>[>\]])", re.IGNORECASE)
_LAST: Final = re.compile(r"(?P<before><\|)END(?P<name>_THINKING\|>)")


def is_reasoning_token(token: str) -> bool:
    """Returns True for the name of a token that delimits reasoning."""
    return _NAME.search(token) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningForm:
    """A model's reasoning delimiters: `begin` THOUGHT `end`."""

    begin: str
    end: str
    special_tokens: tuple[tuple[str, int], ...] = ()
    """Delimiters that are special tokens, with their ids."""

    @classmethod
    def find(cls, source: str, tokenizer: Tokenizer) -> ReasoningForm | None:
        """Finds the delimiters in a chat template; None without any.

        Args:
            source: The template.
            tokenizer: The model's.
        """
        if (found := _END.search(source)) is not None:
            begin, end = found["open"] + found["name"] + found["close"], found[0]
        elif (found := _LAST.search(source)) is not None:
            begin, end = f"{found['before']}START{found['name']}", found[0]
        else:
            return None
        special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        tokens = tuple((text, special[text]) for text in (begin, end) if text in special)
        return cls(begin=begin, end=end, special_tokens=tokens)

    def is_open(self, prompt: str) -> bool:
        """Returns True if a prompt ends within reasoning."""
        return prompt.rstrip().endswith(self.begin)


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of the reasoning."""

    text: str


class ReasoningReader:
    """Separates reasoning from the answer in a stream of text.

    Reasoning is the text between the delimiters at the beginning; white space around it is dropped.
    """

    def __init__(self, form: ReasoningForm) -> None:
        self._form = form
        self._rest = ""
        self._delimiter: str | None = form.begin  # delimiter that ends the present part; None: no further delimiter
        self._begins = False  # True while white space is dropped

    def feed(self, text: str) -> Iterator[Thought | Said]:
        """Takes a further part of the text; yields the parts complete so far."""
        self._rest += text
        while (part := self._next()) is not None:
            if part.text:
                yield part

    def end(self) -> Iterator[Thought | Said]:
        """Yields the rest, which might have been the beginning of a delimiter."""
        rest, self._rest = self._rest, ""
        if self._delimiter == self._form.end:
            rest = rest.strip() if self._begins else rest.rstrip()
            if rest:
                yield Thought(rest)
        elif rest and not (self._begins and rest.isspace()):
            yield Said(rest.lstrip() if self._begins else rest)

    def _next(self) -> Thought | Said | None:
        """Returns the next part; None if more of the text is needed."""
        if self._begins:
            self._rest = self._rest.lstrip()
            self._begins = not self._rest
        if not self._rest:
            return None
        if self._delimiter is None:
            said, self._rest = self._rest, ""
            return Said(said)
        if self._delimiter == self._form.begin:
            return self._find_begin()
        before, found, after = self._rest.partition(self._form.end)
        if found:
            self._rest, self._delimiter, self._begins = after, None, True
            return Thought(before.rstrip())
        held = next((n for n in range(len(self._delimiter) - 1, 0, -1) if self._rest.endswith(self._delimiter[:n])), 0)
        thought = self._rest[: len(self._rest) - held].rstrip()
        self._rest = self._rest[len(thought) :]
        return Thought(thought) if thought else None

    def _find_begin(self) -> Thought | None:
        """Looks for the first delimiter, after white space at most."""
        text = self._rest.lstrip()
        if text.startswith(self._form.begin):
            self._rest, self._delimiter, self._begins = text[len(self._form.begin) :], self._form.end, True
            return Thought("")
        if not self._form.begin.startswith(text):
            self._delimiter = None
            return Thought("")
        return None

    def __repr__(self) -> str:
        return f"ReasoningReader({self._form.begin} to {self._form.end})"
