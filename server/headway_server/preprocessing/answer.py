"""Content of an answer: reasoning, text and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, TypeAlias

from headway_server.preprocessing.reasoning import ReasoningForm, ReasoningReader, Thought
from headway_server.preprocessing.tools import Argued, CallBegun, CallForm, CallReader, Said

_Part: TypeAlias = Thought | Said | CallBegun | Argued

_ID_LENGTH: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """New content of a tool call."""

    index: int
    """Number of the call in its answer, from 0."""
    call_id: str
    """Id that every chat template accepts; empty unless the call begins here."""
    name: str
    """Name of the tool; empty unless the call begins here."""
    arguments: str
    """Further text of the arguments, a JSON object once complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """New content of an answer, or all of it."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        """Returns True if there is any content."""
        return bool(self.reasoning or self.text or self.calls)


class AnswerReader:
    """Reads the content of one answer, as its text comes."""

    def __init__(self, *, reasoning: ReasoningForm | None, calls: CallForm | None) -> None:
        """Reads the text of an answer.

        Args:
            reasoning: The model's reasoning delimiters; None: it has none, or the text includes them.
            calls: How the model calls tools; None: it is offered none.
        """
        self._reasoning = None if reasoning is None else ReasoningReader(reasoning)
        self._calls = None if calls is None else CallReader(calls)
        self.call_ids: list[str] = []
        """Ids of the calls so far, in order."""

    def feed(self, text: str) -> AnswerDelta:
        """Takes a further part of the text; returns the content that is known now."""
        return self._join(self._feed(text))

    def end(self) -> AnswerDelta:
        """Returns the pending rest, which might have begun a delimiter or a call."""
        return self._join(self._end())

    def read(self, text: str) -> AnswerDelta:
        """Returns the content of a complete answer."""
        return self._join(chain(self._feed(text), self._end()))

    def _feed(self, text: str) -> Iterator[_Part]:
        yield from self._split([Said(text)] if self._reasoning is None else self._reasoning.feed(text))

    def _end(self) -> Iterator[_Part]:
        if self._reasoning is not None:
            yield from self._split(self._reasoning.end())
        if self._calls is not None:
            yield from self._calls.end()

    def _split(self, parts: Iterable[Thought | Said]) -> Iterator[_Part]:
        for part in parts:
            if self._calls is None or isinstance(part, Thought):
                yield part
            else:
                yield from self._calls.feed(part.text)

    def _join(self, parts: Iterable[_Part]) -> AnswerDelta:
        reasoning, text, calls = "", "", dict[int, CallDelta]()
        for part in parts:
            match part:
                case Thought(thought):
                    reasoning += thought
                case Said(said):
                    text += said
                case CallBegun(name):
                    self.call_ids.append(_new_call_id())
                    index = len(self.call_ids) - 1
                    calls[index] = CallDelta(index=index, call_id=self.call_ids[-1], name=name, arguments="")
                case Argued(argued):
                    index = len(self.call_ids) - 1
                    begun = calls.get(index, CallDelta(index=index, call_id="", name="", arguments=""))
                    calls[index] = replace(begun, arguments=begun.arguments + argued)
        return AnswerDelta(reasoning=reasoning, text=text, calls=tuple(calls.values()))

    def __repr__(self) -> str:
        return f"AnswerReader({self._reasoning}, {self._calls})"


def _new_call_id() -> str:
    """Returns an id that every chat template accepts: some require this form (`CALL_ID_PATTERN`)."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))
