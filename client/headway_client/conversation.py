"""Conversations as they are given to `chat`: who said what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Role(StrEnum):
    """Who speaks in a conversation."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class ChatMessage(NamedTuple):
    """One turn of a conversation."""

    role: Role
    content: str


Message: TypeAlias = tuple[str, str] | Mapping[str, str]
"""A `ChatMessage`, another pair of role and content, or a mapping with these two keys."""
Conversation: TypeAlias = str | Sequence[Message]
"""The turns so far; a str is one turn of the user's."""
Conversations: TypeAlias = Conversation | Sequence[Conversation]


def as_conversations(name: str, value: Conversations) -> list[list[ChatMessage]]:
    """Makes a list of one conversation or several, which error messages call `name`.

    Raises:
        TypeError: It is none.
        ValueError: There is no such role, or a mapping has other keys.
    """
    if isinstance(value, str) or _is_turns(value):
        return [as_conversation(name, value)]
    if not _is_list(value):
        raise TypeError(f"{name}: a str, a sequence of messages, or a sequence of these is needed, got {_kind(value)}")
    return [as_conversation(f"{name}[{index}]", conversation) for index, conversation in enumerate(value)]


def as_conversation(name: str, value: object) -> list[ChatMessage]:
    """Makes the turns of one conversation, which error messages call `name`.

    Raises:
        TypeError: It is none.
        ValueError: There is no such role, or a mapping has other keys.
    """
    if isinstance(value, str):
        return [ChatMessage(Role.USER, value)]
    if not isinstance(value, Sequence) or not _is_list(value):
        raise TypeError(f"{name}: a str or a sequence of messages is needed, got {_kind(value)}")
    return [_as_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def _as_message(name: str, value: object) -> ChatMessage:
    if isinstance(value, Mapping):
        if set(value) != {"role", "content"}:
            raise ValueError(f"{name}: has the keys {', '.join(map(repr, value))}; must be 'role' and 'content'")
        value = (value["role"], value["content"])
    if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise TypeError(f"{name}: a pair of role and content is needed, got {_kind(value)}")
    role, content = value
    if role not in set(Role):
        raise ValueError(f"{name}: the role is {role!r}; must be one of {', '.join(Role)}")
    return ChatMessage(Role(role), content)


def _is_turns(value: object) -> bool:
    """Whether `value` is the turns of one conversation, not several conversations: a turn is no str and no list."""
    return isinstance(value, Sequence) and _is_list(value) and bool(value) and isinstance(value[0], tuple | Mapping)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _kind(value: object) -> str:
    return type(value).__name__
