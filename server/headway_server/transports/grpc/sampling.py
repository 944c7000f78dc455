"""Reads what a generation request says of how to choose tokens. Ranges are checked by the model."""

from __future__ import annotations

from headway.v1 import generation_service_pb2 as pb
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.errors import InvalidInputError
from headway_server.tasks.parameters import LogProbabilityRequest, SamplingRequest


def parse_sampling(sampling: pb.SamplingParameters) -> SamplingRequest:
    """Reads sampling parameters; a field that is not set becomes None.

    Raises:
        InvalidInputError: The constraint is of no kind.
    """
    return SamplingRequest(
        max_new_tokens=sampling.max_new_token_count if sampling.HasField("max_new_token_count") else None,
        min_new_tokens=sampling.min_new_token_count if sampling.HasField("min_new_token_count") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        presence_penalty=sampling.presence_penalty if sampling.HasField("presence_penalty") else None,
        frequency_penalty=sampling.frequency_penalty if sampling.HasField("frequency_penalty") else None,
        logit_biases=tuple((bias.token_id, bias.bias) for bias in sampling.logit_biases),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_strings=tuple(sampling.stop_strings),
        stop_ids=tuple(sampling.stop_token_ids),
        constraint=_parse_constraint(sampling.constraint) if sampling.HasField("constraint") else None,
    )


def _parse_constraint(constraint: pb.Constraint) -> ConstraintRequest:
    kind = constraint.WhichOneof("kind")
    if kind == "json_schema":
        return ConstraintRequest(json_schema=constraint.json_schema)
    if kind == "regex":
        return ConstraintRequest(regex=constraint.regex)
    if kind == "choices":
        return ConstraintRequest(choices=tuple(constraint.choices.texts))
    raise InvalidInputError("sampling.constraint", "is of no kind; set one of json_schema, regex and choices")


def parse_log_probabilities(
    request: pb.GenerateTextRequest | pb.StreamGenerateTextRequest,
) -> LogProbabilityRequest | None:
    """Reads which log-probabilities are wanted; None where the request does not ask for any."""
    if not request.HasField("log_probabilities"):
        return None
    options = request.log_probabilities
    return LogProbabilityRequest(num_top_tokens=options.top_token_count, include_prompt=options.include_prompt)
