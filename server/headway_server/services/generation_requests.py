"""Reads what a generation request asks for. The model checks ranges."""

from __future__ import annotations

from typing import Any, Final

from headway.v1 import generation_service_pb2 as pb
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ChatTurn
from headway_server.preprocessing.chat import Role
from headway_server.services.messages import set_fields
from headway_server.tasks.generation.request import GenerationRequest, Prompt
from headway_server.tasks.parameters import LogProbabilityRequest

_ROLES: Final[dict[int, Role]] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
}


def read_prompts(request: pb.GenerateTextRequest) -> tuple[list[Prompt], list[str]]:
    """Reads the prompts or the conversations of a call, and the name of each for messages.

    Raises:
        InvalidInputError: There are both, or a turn has no role.
    """
    if request.prompts and request.conversations:
        raise InvalidInputError("conversations", "is given beside prompts; give one of the two")
    field = "conversations" if request.conversations else "prompts"
    fields = [f"{field}[{index}]" for index in range(len(request.conversations or request.prompts))]
    if request.conversations:
        return [_read_conversation(*pair) for pair in zip(fields, request.conversations, strict=True)], fields
    return list(request.prompts), fields


def read_prompt(request: pb.StreamGenerateTextRequest) -> tuple[Prompt, str]:
    """Reads the prompt or the conversation of a stream, and its name for messages.

    Raises:
        InvalidInputError: There are both, or a turn has no role.
    """
    if not request.HasField("conversation"):
        return request.prompt, "prompt"
    if request.prompt:
        raise InvalidInputError("conversation", "is given beside prompt; give one of the two")
    return _read_conversation("conversation", request.conversation), "conversation"


def _read_conversation(field: str, conversation: pb.Conversation) -> tuple[ChatTurn, ...]:
    return tuple(
        _read_turn(f"{field}.messages[{index}]", message) for index, message in enumerate(conversation.messages)
    )


def _read_turn(field: str, message: pb.ChatMessage) -> ChatTurn:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidInputError(
            f"{field}.role", f"is {message.role}; must be ROLE_SYSTEM (1), ROLE_USER (2) or ROLE_ASSISTANT (3)"
        )
    if message.reasoning and role != "assistant":
        raise InvalidInputError(f"{field}.reasoning", f"is set, and the role is {role}; the assistant thinks")
    return ChatTurn(role=role, content=message.content, reasoning=message.reasoning)


def parse_request(
    request: pb.GenerateTextRequest | pb.StreamGenerateTextRequest, *, deadline: float | None, sample_count: int = 1
) -> GenerationRequest:
    """Reads what a request asks for beside its prompts.

    Args:
        request: The request.
        deadline: When the caller stops waiting, by `time.monotonic`.
        sample_count: Of a unary request.

    Raises:
        InvalidInputError: The constraint is of no kind, or a number does not depend on the model and is out of range.
    """
    wanted = None
    if request.HasField("log_probabilities"):
        options = request.log_probabilities
        wanted = LogProbabilityRequest(num_top_tokens=options.top_token_count, include_prompt=options.include_prompt)
    return GenerationRequest(
        parameters=parse_parameters(request.parameters),
        sample_count=sample_count,
        truncate=request.truncate,
        echo=request.echo,
        log_probabilities=wanted,
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline=deadline,
        shows_reasoning=tells_reasoning(request),
    )


def tells_reasoning(request: pb.GenerateTextRequest | pb.StreamGenerateTextRequest) -> bool:
    """Returns True if an answer tells what the model thinks apart: that of a conversation, which is not repeated."""
    if isinstance(request, pb.GenerateTextRequest):
        return bool(request.conversations) and not request.echo
    return request.HasField("conversation") and not request.echo


def parse_parameters(parameters: pb.GenerationParameters) -> dict[str, Any]:
    """Reads the parameters that are set; their names are those of the server's `SamplingParameters`.

    Raises:
        InvalidInputError: The constraint is of no kind.
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
