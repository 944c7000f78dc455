"""What a model thinks before it answers: how its chat template marks it, and how it is told apart in an answer.

Models write their thinking between two marks, such as `<think>` and `</think>`. The marks may be special tokens. Some
templates end a prompt with the first of them, so that the model's text begins within its thinking.
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


def marks_thinking(token: str) -> bool:
    """Returns True if a token marks thinking, by its name."""
    return _NAME.search(token) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningForm:
    """How a model marks what it thinks: `begin` THOUGHT `end`."""

    begin: str
    end: str
    special_tokens: tuple[tuple[str, int], ...] = ()
    """Those of the two that are special tokens, with their ids."""

    @classmethod
    def find(cls, source: str, tokenizer: Tokenizer) -> ReasoningForm | None:
        """Finds the marks that a chat template names; None if it names none.

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
        tokens = tuple((mark, special[mark]) for mark in (begin, end) if mark in special)
        return cls(begin=begin, end=end, special_tokens=tokens)

    def is_open(self, prompt: str) -> bool:
        """Returns True if a prompt ends where the model is to think."""
        return prompt.rstrip().endswith(self.begin)


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of what the model thinks."""

    text: str


class ReasoningReader:
    """Tells what a model thinks apart from what it says, as its text comes.

    Thinking is what stands between the marks at the beginning of the text; white space around it belongs to neither.
    """

    def __init__(self, form: ReasoningForm) -> None:
        self._form = form
        self._rest = ""
        self._mark: str | None = form.begin  # what ends the part that the text is in; None: nothing does any more
        self._begins = False  # True where white space is left out

    def feed(self, text: str) -> Iterator[Thought | Said]:
        """Takes a further part of the text; yields what is known of it now."""
        self._rest += text
        while (part := self._next()) is not None:
            if part.text:
                yield part

    def end(self) -> Iterator[Thought | Said]:
        """Yields what was held back, since it might have been the beginning of a mark."""
        rest, self._rest = self._rest, ""
        if self._mark == self._form.end:
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
        if self._mark is None:
            said, self._rest = self._rest, ""
            return Said(said)
        if self._mark == self._form.begin:
            return self._find_begin()
        before, found, after = self._rest.partition(self._form.end)
        if found:
            self._rest, self._mark, self._begins = after, None, True
            return Thought(before.rstrip())
        held = next((n for n in range(len(self._mark) - 1, 0, -1) if self._rest.endswith(self._mark[:n])), 0)
        thought = self._rest[: len(self._rest) - held].rstrip()
        self._rest = self._rest[len(thought) :]
        return Thought(thought) if thought else None

    def _find_begin(self) -> Thought | None:
        """Looks for the first mark, before which there is white space at most."""
        text = self._rest.lstrip()
        if text.startswith(self._form.begin):
            self._rest, self._mark, self._begins = text[len(self._form.begin) :], self._form.end, True
            return Thought("")
        if not self._form.begin.startswith(text):
            self._mark = None
            return Thought("")
        return None

    def __repr__(self) -> str:
        return f"ReasoningReader({self._form.begin} to {self._form.end})"
