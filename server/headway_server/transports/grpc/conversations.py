"""Reads the conversations of a generation request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headway.v1 import generation_service_pb2 as pb
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ChatTurn
from headway_server.preprocessing.chat import Role
from headway_server.serving.limits import check_count, check_size_of_call, check_text, num_bytes

MAX_CONVERSATIONS: Final = 256
MAX_TURNS: Final = 1024

_ROLES: Final[dict[int, Role]] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
}


def read_conversations(
    field: str, conversations: Sequence[pb.Conversation], max_bytes: int
) -> tuple[list[tuple[ChatTurn, ...]], list[str]]:
    """Reads the conversations of a request, and returns with them what to call each in messages.

    Raises:
        InvalidInputError: There are too many; one is not right, as `read_conversation` says; or together they have
            more bytes than a call may.
    """
    check_count(field, len(conversations), MAX_CONVERSATIONS)
    names = [f"{field}[{index}]" for index in range(len(conversations))]
    read = [
        read_conversation(name, conversation, max_bytes)
        for name, conversation in zip(names, conversations, strict=True)
    ]
    check_size_of_call(field, [turn.content for turns in read for turn in turns], max_bytes)
    return read, names


def read_conversation(field: str, conversation: pb.Conversation, max_bytes: int) -> tuple[ChatTurn, ...]:
    """Reads one conversation, which the request calls `field`.

    Raises:
        InvalidInputError: It has no turns or too many, a turn has no role or says nothing, or what is said has more
            than `max_bytes` in UTF-8 in all.
    """
    check_count(f"{field}.messages", len(conversation.messages), MAX_TURNS, "leave out the first ones")
    turns = tuple(
        _read_turn(f"{field}.messages[{index}]", message, max_bytes)
        for index, message in enumerate(conversation.messages)
    )
    if (size := sum(num_bytes(turn.content) for turn in turns)) > max_bytes:
        raise InvalidInputError(
            field, f"has {size} bytes in all, the limit is {max_bytes}; leave out the first messages"
        )
    return turns


def _read_turn(field: str, message: pb.ChatMessage, max_bytes: int) -> ChatTurn:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidInputError(
            f"{field}.role", f"is {message.role}; must be ROLE_SYSTEM (1), ROLE_USER (2) or ROLE_ASSISTANT (3)"
        )
    if message.content or role != "assistant":  # a model may have said nothing
        check_text(f"{field}.content", message.content, max_bytes)
    return ChatTurn(role=role, content=message.content)
