"""Reads the parameters of a generation request. The model checks their ranges."""

from __future__ import annotations

from headway.v1 import generation_service_pb2 as pb
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.errors import InvalidInputError
from headway_server.tasks.parameters import LogProbabilityRequest, SamplingRequest


def parse_parameters(parameters: pb.GenerationParameters) -> SamplingRequest:
    """Reads the parameters; a field that is not set becomes None.

    Raises:
        InvalidInputError: The constraint is of no kind.
    """
    sampling = parameters.sampling
    return SamplingRequest(
        max_new_tokens=parameters.max_new_tokens if parameters.HasField("max_new_tokens") else None,
        min_new_tokens=parameters.min_new_tokens if parameters.HasField("min_new_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        repetition_penalty=parameters.repetition_penalty if parameters.HasField("repetition_penalty") else None,
        presence_penalty=parameters.presence_penalty if parameters.HasField("presence_penalty") else None,
        frequency_penalty=parameters.frequency_penalty if parameters.HasField("frequency_penalty") else None,
        logit_biases=tuple((bias.token_id, bias.bias) for bias in parameters.logit_biases),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_strings=tuple(parameters.stop_strings),
        stop_token_ids=tuple(parameters.stop_token_ids),
        constraint=_parse_constraint(parameters.constraint) if parameters.HasField("constraint") else None,
    )


def _parse_constraint(constraint: pb.Constraint) -> ConstraintRequest:
    kind = constraint.WhichOneof("kind")
    if kind == "json_schema":
        return ConstraintRequest(json_schema=constraint.json_schema)
    if kind == "regex":
        return ConstraintRequest(regex=constraint.regex)
    if kind == "choices":
        return ConstraintRequest(choices=tuple(constraint.choices.texts))
    raise InvalidInputError("parameters.constraint", "is of no kind; set one of json_schema, regex and choices")


def parse_log_probabilities(
    request: pb.GenerateTextRequest | pb.StreamGenerateTextRequest,
) -> LogProbabilityRequest | None:
    """Reads which log-probabilities are wanted; None where the request does not ask for any."""
    if not request.HasField("log_probabilities"):
        return None
    options = request.log_probabilities
    return LogProbabilityRequest(num_top_tokens=options.top_token_count, include_prompt=options.include_prompt)
