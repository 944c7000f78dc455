"""Tools in chat templates, and the form of a model's tool calls.

Each template has its own form of calls, the form that its model was trained on. It is found by rendering known calls
(`find_form`). The grammar of answers (`decoding/constraints/grammar.py`) and the parser of calls (`CallReader`) follow
from it, for any template whose calls are text and special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, Final, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may ask its caller to call."""

    name: str
    """Letters, digits, `_` and `-`."""
    description: str = ""
    parameters: str
    """JSON Schema of its arguments, an object, as JSON text."""
    is_strict: bool = True
    """True: a schema that cannot be enforced completely is refused. False: its unsupported keywords are left to the
    model."""

    def shown(self, disguise: Callable[[Any], Any]) -> dict[str, Any]:
        """Returns the tool as templates expect it, with the caller's text disguised."""
        described = {"description": disguise(self.description)} if self.description else {}
        function = {"name": disguise(self.name), **described, "parameters": disguise(json.loads(self.parameters))}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool, in a turn of the assistant."""

    call_id: str = ""
    name: str
    arguments: str
    """A JSON object, as JSON text."""

    def shown(self, disguise: Callable[[Any], Any]) -> dict[str, Any]:
        """Returns the call as templates expect it, with the caller's text disguised."""
        function = {"name": disguise(self.name), "arguments": disguise(json.loads(self.arguments))}
        return {"type": "function", "id": disguise(self.call_id), "function": function}


CALL_ID: Final = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Placeholder of a call's id in a form."""
CALL_ID_PATTERN: Final = "[a-zA-Z0-9]{9}"
"""Pattern of ids, here and in templates that state one."""


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """The form of calls: `head` NAME `middle` ARGUMENTS (`between` NAME `middle` ARGUMENTS)* `end`."""

    head: str
    """Without leading white space."""
    middle: str
    between: str | None
    """None if a turn has at most one call."""
    end: str
    special_tokens: tuple[tuple[str, int], ...] = ()
    """Special tokens in the form, with their ids. The text of an answer with calls includes them."""

    @cached_property
    def trigger(self) -> str:
        """The beginning of `head`, absent from texts without calls: a special token, or the text up to white space."""
        return next(self.pieces(self.head.split(maxsplit=1)[0]))[0]

    def pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yields the parts of a text of the form: special tokens with ids, `CALL_ID`, and text between them."""
        ids = dict(self.special_tokens)
        apart = "|".join(map(re.escape, sorted((*ids, CALL_ID), key=len, reverse=True)))
        for piece in re.split(f"({apart})", text):
            if piece:
                yield piece, ids.get(piece)

    @staticmethod
    def pattern(text: str) -> re.Pattern[str]:
        """Returns a pattern of a text of the form in an answer."""
        return re.compile(re.escape(text).replace(re.escape(CALL_ID), CALL_ID_PATTERN))


class NoToolsError(ValueError):
    """A template has no tools, or a form of calls that cannot be parsed."""


class _Turn(Protocol):
    """Creates a turn of a conversation; the names are those of `ChatTurn`."""

    def __call__(
        self, *, role: Any, content: str, tool_calls: tuple[ToolCall, ...] = (), tool_call_id: str = ""
    ) -> Any: ...


_NAME: Final = "tool_of_a_probe"
_CONTENT: Final = "A probing answer."
_RESULT: Final = "A probing result."
_TOOL: Final = Tool(name=_NAME, description="A probe.", parameters='{"type": "object", "properties": {}}')
_CALL: Final = ToolCall(call_id="probe0001", name=_NAME, arguments='{"argument": "value"}')
_WRITTEN_CALL: Final = rf'{_NAME}(?P<middle>.{{1,200}}?)\{{\s*"argument"\s*:\s*"value"\s*\}}'
_FIRST: Final = re.compile(rf"(?P<head>.*?){_WRITTEN_CALL}", re.DOTALL)
_SECOND: Final = re.compile(rf"(?P<between>.*?){_WRITTEN_CALL}", re.DOTALL)


def find_form(
    write: Callable[[Sequence[Any], Sequence[Tool], bool], str],
    turn: _Turn,
    special: Mapping[str, int],
    ends: Collection[int],
) -> CallForm:
    """Finds a template's form of calls by rendering known calls.

    Args:
        write: Renders turns with tools; True: with the generation prompt. May raise anything.
        turn: Creates a turn.
        special: Special tokens and their ids.
        ends: Ids of tokens that end an answer.

    Raises:
        NoToolsError: There is none.
    """
    asked = turn(role="user", content="Hello there.")
    called = turn(role="assistant", content="", tool_calls=(_CALL,))

    def written(*turns: Any, goes_on: bool = False) -> str:
        try:
            return write((asked, *turns), (_TOOL,), goes_on)
        except Exception:  # a template may fail with turns it was not written for
            return ""

    if _NAME not in written(goes_on=True):
        raise NoToolsError("shows no tools to it")
    if _RESULT not in written(called, turn(role="tool", content=_RESULT, tool_call_id=_CALL.call_id), goes_on=True):
        raise NoToolsError("shows it no results of tools")
    before, _, after = written(turn(role="assistant", content=_CONTENT)).rpartition(_CONTENT)
    before = before.rstrip()  # some templates put a space before content, but none before calls
    once = written(called)
    first = _FIRST.match(once, len(before))
    if not before or not once.startswith(before) or first is None or not first["head"].strip():
        raise NoToolsError("writes no calls with their arguments in JSON")
    twice = written(turn(role="assistant", content="", tool_calls=(_CALL, _CALL)))
    second = _SECOND.match(twice, first.end()) if twice.startswith(first[0], len(before)) else None
    several = second is not None and second["middle"] == first["middle"]
    end = once[first.end() :].removesuffix(after)
    for token in special:
        end = end.partition(token)[0]
    head, middle, between, end = (
        text.replace(_CALL.call_id, CALL_ID)
        for text in (
            first["head"].lstrip(),
            first["middle"],
            second["between"] if second is not None and several else "",
            end.rstrip(),
        )
    )
    parts = tuple((token, index) for token, index in special.items() if token in head + middle + between)
    if any(index in ends for _, index in parts):
        raise NoToolsError("writes calls with the token that ends an answer")
    return CallForm(head=head, middle=middle, between=between or None, end=end, special_tokens=parts)


@dataclass(frozen=True, slots=True)
class Said:
    """Text beside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a call."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """A further part of the current call's arguments."""

    text: str


class _State(Enum):
    TEXT = auto()
    HEAD = auto()
    NAME = auto()
    ARGUMENTS = auto()
    AFTER = auto()


class CallReader:
    """Parses calls from a stream of text, which the grammar constrains to the form."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        texts = {_State.HEAD: form.head, _State.NAME: form.middle, _State.AFTER: form.between}
        self._patterns = {state: form.pattern(text) for state, text in texts.items() if text is not None}
        self._state = _State.TEXT
        self._rest = ""
        self._depth, self._is_quoted, self._is_escaped = 0, False, False

    def feed(self, text: str) -> Iterator[Said | CallBegun | Argued]:
        """Takes a further part of the answer; yields the parts complete so far."""
        self._rest += text
        while (found := self._next()) is not None:
            if not isinstance(found, Said | Argued) or found.text:
                yield found

    def end(self) -> Iterator[Said]:
        """Yields the rest, which might have been the beginning of a call."""
        if self._state is _State.TEXT and self._rest:
            yield Said(self._rest)
        self._rest = ""

    def _next(self) -> Said | CallBegun | Argued | None:
        """Returns the next part; None if more of the answer is needed."""
        match self._state:
            case _State.TEXT:
                return self._read_text()
            case _State.HEAD | _State.AFTER:
                pattern = self._patterns.get(self._state)
                if pattern is None or (found := pattern.match(self._rest)) is None:
                    return None
                self._rest, self._state = self._rest[found.end() :], _State.NAME
                return Said("")
            case _State.NAME:
                if (found := self._patterns[_State.NAME].search(self._rest)) is None:
                    return None
                name, self._rest, self._state = self._rest[: found.start()], self._rest[found.end() :], _State.ARGUMENTS
                return CallBegun(name)
            case _State.ARGUMENTS:
                return self._read_arguments()

    def _read_text(self) -> Said | None:
        """Reads up to a call; retains its possible beginning and the white space before it."""
        before, found, _ = self._rest.partition(self._form.trigger)
        if found:
            self._rest, self._state = self._rest[len(before) :], _State.HEAD
            return Said(before.rstrip())
        trigger = self._form.trigger
        held = next((n for n in range(len(trigger) - 1, 0, -1) if self._rest.endswith(trigger[:n])), 0)
        said = self._rest[: len(self._rest) - held].rstrip()
        self._rest = self._rest[len(said) :]
        return Said(said) if said else None

    def _read_arguments(self) -> Argued | None:
        """Reads the available part of a JSON object."""
        for position, character in enumerate(self._rest):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped, self._is_quoted = character == "\\", character != '"'
            elif character == '"':
                self._is_quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    text, self._rest = self._rest[: position + 1], self._rest[position + 1 :]
                    self._state = _State.AFTER
                    return Argued(text)
        text, self._rest = self._rest, ""
        return Argued(text) if text else None

    def __repr__(self) -> str:
        return f"CallReader({self._state.name})"
