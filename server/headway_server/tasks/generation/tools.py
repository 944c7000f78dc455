"""Validation of the tools of a call, and of the turns of a conversation that call them.

Fields are named as in headway's own protocol.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_elements
from headway_server.preprocessing import ChatTurn, Tool
from headway_server.serving.limits import check_count
from headway_server.tasks.generation.request import ToolUse

MAX_TOOLS: Final = most_elements("GenerateTextRequest.tools")
"""Maximum tools of a call, and maximum tool calls of a turn."""
TOOL_NAME: Final = r"^[a-zA-Z0-9_-]{1,64}$"
"""Pattern of a tool's name."""


class ToolChoice(Enum):
    """Whether the model calls tools."""

    AUTO = "auto"
    """It decides."""
    NONE = "none"
    """The model sees no tools."""
    REQUIRED = "required"
    """The answer is a tool call."""


def check_turn(turn: ChatTurn, field: str) -> None:
    """Checks that the fields of a turn fit its role.

    Args:
        turn: The turn.
        field: Its name in error messages.

    Raises:
        InvalidInputError: A role other than assistant has reasoning or tool calls, a turn has too many calls, or a
        role other than tool has a call id.
    """
    if turn.reasoning and turn.role != "assistant":
        raise InvalidInputError(f"{field}.reasoning", f"is set, and the role is {turn.role}; the assistant thinks")
    if turn.tool_calls and turn.role != "assistant":
        raise InvalidInputError(f"{field}.tool_calls", f"is set, and the role is {turn.role}; the assistant calls")
    if turn.tool_calls:
        check_count(f"{field}.tool_calls", len(turn.tool_calls), MAX_TOOLS, "split the turn")
    if bool(turn.tool_call_id) != (turn.role == "tool"):
        raise InvalidInputError(f"{field}.tool_call_id", "belongs to role tool: the id of the call that it answers")
    for index, call in enumerate(turn.tool_calls):
        read_object(call.arguments, f"{field}.tool_calls[{index}].arguments_json")


def read_object(text: str, field: str) -> dict[str, Any]:
    """Reads a JSON object; `field` is its name in error messages.

    Raises:
        InvalidInputError: The text is not a JSON object.
    """
    try:
        found = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(field, f"is not JSON ({str(error)[:100]}); send a JSON object") from None
    if not isinstance(found, dict):
        raise InvalidInputError(field, "is not a JSON object; send one")
    return found


def _finite(text: str) -> float:
    """Reads a number of JSON, which has no infinities or NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:32]} is no number of JSON")
    return value


def make_tool(name: str, description: str, schema: Mapping[str, Any], field: str, *, is_strict: bool = True) -> Tool:
    """Makes a tool from the JSON Schema of its arguments; `field` is the schema's name in error messages.

    See `Tool.is_strict`.

    Raises:
        InvalidInputError: The schema is not one of an object.
    """
    whole = {"type": "object", **(schema or {"properties": {}, "additionalProperties": False})}
    if whole["type"] != "object":
        raise InvalidInputError(field, "must be the schema of an object")
    return Tool(name=name, description=description, parameters=json.dumps(whole), is_strict=is_strict)


def use_tools(
    tools: Sequence[Tool], *, choice: ToolChoice, required_name: str, allows_several: bool, name_field: str
) -> ToolUse | None:
    """Returns the tools of a call with the rules for calling them; None for `ToolChoice.NONE`.

    Args:
        tools: Offered tools, at least one.
        choice: Whether the model calls them.
        required_name: Name of the tool to call; empty: any.
        allows_several: False: at most one call in an answer.
        name_field: Name of `required_name` in error messages.

    Raises:
        InvalidInputError: There are too many tools, two share a name, or none has the required name.
    """
    check_count("tools", len(tools), MAX_TOOLS, "offer fewer")
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidInputError("tools", f"have the name {min(twice)} twice; give each once")
    if required_name and required_name not in names:
        raise InvalidInputError(name_field, f"is none of the tools {', '.join(names)[:200]}")
    if choice is ToolChoice.NONE:
        return None
    return ToolUse(
        tools=tuple(tools),
        callable_names=(required_name,) if required_name else tuple(names),
        is_required=choice is ToolChoice.REQUIRED or bool(required_name),
        allows_several=allows_several and not required_name,
    )
