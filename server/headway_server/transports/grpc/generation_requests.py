"""Reads what a generation request asks for. The model checks ranges."""

from __future__ import annotations

from typing import Any

from headway.v1 import generation_service_pb2 as pb
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.errors import InvalidInputError
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.parameters import LogProbabilityRequest
from headway_server.transports.grpc.messages import set_fields


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
        deadline=deadline,
    )


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
