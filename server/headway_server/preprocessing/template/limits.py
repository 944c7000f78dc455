"""What a chat template may take: steps, processor time, and the sizes of texts, numbers and containers."""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError, Undefined

from headway_server.preprocessing.template.marked_text import MarkedText, join

MAX_TEXT_LENGTH = 2**19
"""Characters of a prompt, and of any text on the way to it."""
_MAX_MADE_LENGTH = 2**26
"""Characters of all texts that a run makes, which bounds its memory."""
_MAX_STEPS = 200_000
_MAX_PROCESSOR_S = 1.0
_STEPS_BETWEEN_LOOKS = 64
_MAX_WEIGHT = 2**19
"""Of a container: values in it at any depth, a shared one counted each time, and characters by `_TEXT_UNIT`."""
_MAX_DEPTH = 16
_TEXT_UNIT = 64
_MAX_NUMBER = 2**63


class LimitError(TemplateError):
    """A template takes too much, by itself or for a long conversation."""


class _Meter:
    """What a run has taken."""

    def __init__(self) -> None:
        self._steps = 0
        self._made_length = 0
        self._began_s = time.thread_time()

    def step(self) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise LimitError(f"takes more than {_MAX_STEPS:,} steps")
        if self._steps % _STEPS_BETWEEN_LOOKS == 0 and time.thread_time() - self._began_s > _MAX_PROCESSOR_S:
            raise LimitError(f"takes more than {_MAX_PROCESSOR_S:.0f} s of a processor")

    def make(self, length: int) -> None:
        self._made_length += length
        if self._made_length > _MAX_MADE_LENGTH:
            raise LimitError(f"makes texts of more than {_MAX_MADE_LENGTH:,} characters altogether")


_meter: ContextVar[_Meter] = ContextVar("_meter")


@contextmanager
def metered() -> Iterator[None]:
    """Counts the steps of one run, on the thread it runs on."""
    token = _meter.set(_Meter())
    try:
        yield
    finally:
        _meter.reset(token)


def step() -> None:
    """Counts a step of the run.

    Raises:
        LimitError: It was one too many.
    """
    _meter.get().step()


def check_length(length: int) -> None:
    """Checks the characters of a text that is to be made, and counts them.

    Raises:
        LimitError: They are too many.
    """
    if length > MAX_TEXT_LENGTH:
        raise LimitError(f"makes a text of more than {MAX_TEXT_LENGTH:,} characters")
    _meter.get().make(length)


def check_value(value: object) -> None:
    """Checks the size of a value that was made, and counts the characters of a text.

    Raises:
        LimitError: It is too large.
    """
    if isinstance(value, str):
        check_length(len(value))
    elif isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise LimitError("computes with a number of more than 63 bits")
    elif isinstance(value, list | tuple | dict):
        weigh(value)


def weigh(value: object) -> bool:
    """Checks the size of a container whose parts may be shared, so that little memory holds endless text.

    Returns:
        Whether content is in it.

    Raises:
        LimitError: It holds too much, or is nested too deeply.
    """
    left, has_content = _MAX_WEIGHT, False
    waiting: list[tuple[object, int]] = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        children: Iterable[object] = ()
        if isinstance(part, str):
            left -= len(part) // _TEXT_UNIT
            has_content = has_content or isinstance(part, MarkedText)
        elif isinstance(part, Mapping):
            children = (*part.keys(), *part.values())
        elif isinstance(part, list | tuple | KeysView | ValuesView | ItemsView):
            children = part
        left -= 1
        if left < 0 or depth > _MAX_DEPTH:
            raise LimitError(f"makes a container of more than {_MAX_WEIGHT:,} values, or more than {_MAX_DEPTH} deep")
        waiting.extend((child, depth + 1) for child in children)
    return has_content


def written(value: Any) -> str:
    """Returns a value as the template writes it.

    Raises:
        TemplateError: It is neither a text nor a number: written out, a container might be endless.
    """
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float | Undefined):
        return str(value)
    raise TemplateError(f"writes a {type(value).__name__}; write texts and numbers, and others by tojson")


def join_within_limits(separator: str, parts: Iterable[object]) -> str:
    """Joins texts as `str.join` does; the template's own words alone stay a plain text.

    Raises:
        LimitError: The text is too long.
        TypeError: A part is not a text.
    """
    texts: list[str] = []
    length = 0
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f"joins a {type(part).__name__} as if it were a text")
        length += len(part) + (len(separator) if texts else 0)
        if length > MAX_TEXT_LENGTH:
            break
        texts.append(part)
    check_length(length)
    if any(isinstance(text, MarkedText) for text in (separator, *texts)):
        return join(separator, texts)
    return separator.join(texts)


def replace_within_limits(text: str, old: str, new: str, count: int = -1) -> str:
    """Replaces as `str.replace` does.

    Raises:
        LimitError: The text is too long.
    """
    check_length(len(text) + str.count(text, old) * len(new))
    if isinstance(text, MarkedText):
        return text.replace(old, new, count)
    if isinstance(new, MarkedText) and old:
        return join_within_limits(new, text.split(old, count))
    replaced = text.replace(old, new, count)
    return MarkedText(replaced) if isinstance(new, MarkedText) else replaced
