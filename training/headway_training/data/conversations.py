r"""Conversations, from files of JSON lines.

A line is a conversation: its turns, in the form that chat templates take. The roles are those that the template knows;
what a turn has beside `role` and `content` is given to the template as it is.

    {"messages": [{"role": "user", "content": "Who wrote Hamlet?"}, {"role": "assistant", "content": "Shakespeare."}]}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway_training.data.examples import Conversations
from headway_training.data.files import ending_of, read_lines
from headway_training.errors import DataError

_FORM = 'expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def holds_conversations(path: Path) -> bool:
    """True if a file's name says that it holds JSON lines."""
    return ending_of(path) == ".jsonl"


def read_conversations(path: Path) -> Conversations:
    """Reads a file of conversations; `.gz` and `.xz` are unpacked.

    Raises:
        MissingDataError: There is no such file.
        DataError: A line is no conversation, or the assistant says nothing in it: names the line and what is expected.
    """
    turns = [_parse(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path), 1) if line.strip()]
    if not turns:
        raise DataError(f"{path} holds no conversations; {_FORM}")
    return Conversations(turns=turns)


def _parse(line: str, place: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not JSON ({error}); {_FORM}") from error
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not messages or not all(_is_turn(message) for message in messages):
        raise DataError(f"{place}: is no conversation; {_FORM}")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{place}: the assistant says nothing, so there is nothing to learn; remove the line")
    return messages


def _is_turn(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
