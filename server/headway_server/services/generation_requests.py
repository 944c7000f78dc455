"""Parsing of generation requests. The model checks ranges."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.v1 import generation_service_pb2 as pb
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ChatTurn, Tool, ToolCall, TurnImage
from headway_server.preprocessing.chat import Role
from headway_server.services.enums import WireEnum
from headway_server.services.messages import set_fields
from headway_server.tasks.generation.request import MAX_PARTS, GenerationRequest, Prompt, ToolUse
from headway_server.tasks.generation.tools import TOOL_NAME, ToolChoice, check_turn, make_tool, read_object, use_tools
from headway_server.tasks.parameters import LogProbabilityRequest

Request: TypeAlias = pb.GenerateTextRequest | pb.StreamGenerateTextRequest

_NAME: Final = re.compile(TOOL_NAME)
_CHOICES: Final = WireEnum(pb.ToolChoice, ToolChoice, unspecified=ToolChoice.AUTO)
_ROLES: Final[Mapping[pb.Role.ValueType, Role]] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}


def read_prompts(request: Request) -> tuple[list[Prompt], list[str]]:
    """Reads the prompts of a call, and the name of each for error messages.

    Raises:
        InvalidInputError: There are several kinds of prompts, or a turn fails `check_turn`.
    """
    kinds = [field.name for field, _ in request.ListFields() if field.name in _KINDS]
    if len(kinds) > 1:
        raise InvalidInputError(kinds[1], f"is given together with {kinds[0]}; give one of the two")
    if isinstance(request, pb.StreamGenerateTextRequest):
        kind = kinds[0] if kinds else "prompt"
        return [_READERS[kind](getattr(request, kind), kind)], [kind + _SUFFIXES.get(kind, "")]
    kind = kinds[0] if kinds else "prompts"
    given = getattr(request, kind)
    names = [f"{kind}[{index}]" for index in range(len(given))]
    prompts = [_READERS[kind](one, name) for one, name in zip(given, names, strict=True)]
    return prompts, [name + _SUFFIXES.get(kind, "") for name in names]


def _read_text(text: str, _: str) -> str:
    return text


def _read_tokens(tokens: pb.TokenIds, field: str) -> NDArray[np.int64]:
    if not tokens.ids:
        raise InvalidInputError(f"{field}.ids", "is empty; give at least one token")
    return np.array(tokens.ids, np.int64)


def _read_conversation(conversation: pb.Conversation, field: str) -> tuple[ChatTurn, ...]:
    return tuple(
        _read_turn(f"{field}.messages[{index}]", message) for index, message in enumerate(conversation.messages)
    )


_READERS: Final[Mapping[str, Callable[[Any, str], Prompt]]] = {
    "prompts": _read_text,
    "prompt": _read_text,
    "conversations": _read_conversation,
    "conversation": _read_conversation,
    "prompt_token_ids": _read_tokens,
}
_KINDS: Final = frozenset(_READERS)
_SUFFIXES: Final = {"prompt_token_ids": ".ids"}
"""Path of a prompt in its message, for error messages."""


def _read_turn(field: str, message: pb.ChatMessage) -> ChatTurn:
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(f"{pb.Role.Name(number)} ({number})" for number in _ROLES)
        raise InvalidInputError(f"{field}.role", f"is {message.role}; must be one of {known}")
    calls = tuple(
        ToolCall(call_id=call.id, name=call.name, arguments=call.arguments_json) for call in message.tool_calls
    )
    parts = _read_parts(field, message)
    turn = ChatTurn(
        role=role,
        content=message.content or "".join(part for part in parts if isinstance(part, str)),
        parts=parts if any(isinstance(part, TurnImage) for part in parts) else (),
        reasoning=message.reasoning,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
    )
    check_turn(turn, field)
    return turn


def _read_parts(field: str, message: pb.ChatMessage) -> tuple[str | TurnImage, ...]:
    """Reads the parts of a turn.

    Raises:
        InvalidInputError: They are set together with `content`, there are too many, or one is empty.
    """
    if message.parts and message.content:
        raise InvalidInputError(f"{field}.parts", "is set together with content; put the text into a part")
    if len(message.parts) > MAX_PARTS:
        raise InvalidInputError(
            f"{field}.parts", f"has {len(message.parts)} elements, the limit is {MAX_PARTS}; join texts"
        )
    parts: list[str | TurnImage] = []
    for index, part in enumerate(message.parts):
        kind, name = part.WhichOneof("part"), f"{field}.parts[{index}]"
        if kind is None:
            raise InvalidInputError(name, "is empty; set one of text, image and image_id")
        if kind == "text":
            parts.append(part.text)
        else:
            parts.append(TurnImage(data=part.image, image_id=part.image_id, field=f"{name}.{kind}"))
    return tuple(parts)


def _read_tools(request: Request) -> ToolUse | None:
    """Reads the tools of a call, and the rules for calling them.

    Raises:
        InvalidInputError: Tools are set without a conversation, or see `use_tools`.
    """
    choice = _CHOICES.read("tool_choice", request.tool_choice)
    if not request.tools:
        for field, _ in request.ListFields():
            if field.name in ("tool_choice", "required_tool_name", "parallel_tool_calls"):
                raise InvalidInputError(field.name, "is set without tools; give some, or leave it out")
        return None
    _check_of_conversation(request, "tools")
    used = use_tools(
        [_read_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools)],
        choice=choice,
        required_name=request.required_tool_name,
        allows_several=request.parallel_tool_calls or not request.HasField("parallel_tool_calls"),
        name_field="required_tool_name",
    )
    if used is not None and request.echo:
        raise InvalidInputError("echo", "is set together with tools; leave one of the two out")
    return used


def _read_tool(field: str, tool: pb.Tool) -> Tool:
    if not _NAME.fullmatch(tool.name):
        raise InvalidInputError(f"{field}.name", "must have 1 to 64 letters, digits, underscores and hyphens")
    path = f"{field}.parameters_json_schema"
    schema = read_object(tool.parameters_json_schema, path) if tool.parameters_json_schema else {}
    return make_tool(tool.name, tool.description, schema, field=path, is_strict=tool.strict)


def _check_of_conversation(request: Request, field: str) -> None:
    if not is_conversation(request):
        raise InvalidInputError(field, "requires a conversation, whose chat template reads it; leave it out")


def is_conversation(request: Request) -> bool:
    """Returns True if a request has conversations instead of prompts."""
    if isinstance(request, pb.GenerateTextRequest):
        return bool(request.conversations)
    return request.HasField("conversation")


def parse_request(request: Request, *, deadline: float | None, sample_count: int = 1) -> GenerationRequest:
    """Parses the parameters of a request.

    Args:
        request: The request.
        deadline: End of the caller's wait, in seconds of `time.monotonic`.
        sample_count: Samples of a unary request.

    Raises:
        InvalidInputError: The constraint has no kind, or a number is outside of its model-independent range.
    """
    wanted = None
    if request.HasField("log_probabilities"):
        options = request.log_probabilities
        wanted = LogProbabilityRequest(num_top_tokens=options.top_token_count, include_prompt=options.include_prompt)
    variables = {}
    if request.chat_template_kwargs_json:
        _check_of_conversation(request, "chat_template_kwargs_json")
        variables = read_object(request.chat_template_kwargs_json, "chat_template_kwargs_json")
    return GenerationRequest(
        parameters=parse_parameters(request.parameters),
        sample_count=sample_count,
        truncate=request.truncate,
        echo=request.echo,
        log_probabilities=wanted,
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline=deadline,
        tools=_read_tools(request),
        variables=variables,
        shows_reasoning=separates_reasoning(request),
    )


def separates_reasoning(request: Request) -> bool:
    """Returns True if the answer has reasoning in a separate field: a conversation without echo."""
    return is_conversation(request) and not request.echo


def parse_parameters(parameters: pb.GenerationParameters) -> dict[str, Any]:
    """Reads the set parameters, by the names of `SamplingParameters`.

    Raises:
        InvalidInputError: The constraint has no kind.
    """
    given = set_fields(parameters) | set_fields(parameters.sampling)
    given.pop("sampling", None)
    if "logit_biases" in given:
        given["logit_biases"] = tuple((bias.token_id, bias.bias) for bias in parameters.logit_biases)
    if "constraint" in given:
        given["constraint"] = _parse_constraint(parameters.constraint)
    return given


def _parse_constraint(constraint: pb.Constraint) -> ConstraintRequest:
    kind = constraint.WhichOneof("kind")
    if kind == "json_schema":
        return ConstraintRequest(json_schema=constraint.json_schema)
    if kind == "regex":
        return ConstraintRequest(regex=constraint.regex)
    if kind == "choices":
        return ConstraintRequest(choices=tuple(constraint.choices.texts))
    raise InvalidInputError("parameters.constraint", "is of no kind; set one of json_schema, regex and choices")
