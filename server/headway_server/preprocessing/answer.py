"""Parts of an answer: reasoning, text and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from headway_server.preprocessing.reasoning import ReasoningForm, ReasoningReader, Thought
from headway_server.preprocessing.tools import Argued, CallBegun, CallForm, CallReader, Said, ToolCall

AnswerPart: TypeAlias = Thought | Said | CallBegun | Argued

_ID_LENGTH: Final = 9


class AnswerReader:
    """Reads the parts of one answer, as its text comes."""

    def __init__(self, *, reasoning: ReasoningForm | None, calls: CallForm | None) -> None:
        """Reads the text of an answer.

        Args:
            reasoning: The model's reasoning delimiters; None: it has none, or the text includes them.
            calls: How the model calls tools; None: it is offered none.
        """
        self._reasoning = None if reasoning is None else ReasoningReader(reasoning)
        self._calls = None if calls is None else CallReader(calls)

    def feed(self, text: str) -> Iterator[AnswerPart]:
        """Takes a further part of the text; yields the complete parts."""
        yield from self._read([Said(text)] if self._reasoning is None else self._reasoning.feed(text))

    def end(self) -> Iterator[AnswerPart]:
        """Yields the pending rest, which might have begun a delimiter or a call."""
        if self._reasoning is not None:
            yield from self._read(self._reasoning.end())
        if self._calls is not None:
            yield from self._calls.end()

    def _read(self, parts: Iterable[Thought | Said]) -> Iterator[AnswerPart]:
        for part in parts:
            if self._calls is None or isinstance(part, Thought):
                yield part
            else:
                yield from self._calls.feed(part.text)

    def __repr__(self) -> str:
        return f"AnswerReader({self._reasoning}, {self._calls})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """A complete answer, or the joined content of several parts."""

    reasoning: str
    text: str
    calls: tuple[ToolCall, ...]
    """In order; each with an id of its own."""

    @classmethod
    def of(cls, parts: Iterable[AnswerPart]) -> ReadAnswer:
        """Joins the parts of a whole answer."""
        reasoning, text, calls = "", "", list[tuple[str, str]]()
        for part in parts:
            match part:
                case Thought(thought):
                    reasoning += thought
                case Said(said):
                    text += said
                case CallBegun(name):
                    calls.append((name, ""))
                case Argued(argued):
                    calls[-1] = (calls[-1][0], calls[-1][1] + argued)
        made = tuple(ToolCall(call_id=new_call_id(), name=name, arguments=arguments) for name, arguments in calls)
        return cls(reasoning=reasoning, text=text, calls=made)


def read_answer(text: str, *, reasoning: ReasoningForm | None, calls: CallForm | None) -> ReadAnswer:
    """Reads a complete answer; args are those of `AnswerReader`."""
    reader = AnswerReader(reasoning=reasoning, calls=calls)
    return ReadAnswer.of(part for parts in (reader.feed(text), reader.end()) for part in parts)


def new_call_id() -> str:
    """Returns an id that every chat template takes: some demand one of this form (`CALL_ID_PATTERN`)."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))
