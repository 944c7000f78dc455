"""What a generation request asks for, as the protocol says it and as the server reads it."""

import dataclasses

import pytest

from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as pb
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.decoding.parameters import SamplingParameters
from headway_server.errors import InvalidInputError
from headway_server.services.generation_requests import parse_parameters, parse_request


def test_every_parameter_of_the_protocol_is_one_of_the_servers_by_name():
    known = {field.name for field in dataclasses.fields(SamplingParameters)}
    for message in (pb.GenerationParameters, common_pb2.SamplingParameters):
        names = set(message.DESCRIPTOR.fields_by_name) - {"sampling", "constraint"}
        assert names <= known


def test_what_is_set_is_read_and_nothing_else():
    assert parse_parameters(pb.GenerationParameters()) == {}
    parameters = pb.GenerationParameters(
        max_new_tokens=0,
        repetition_penalty=1.5,
        logit_biases=[pb.LogitBias(token_id=3, bias=-2.0)],
        stop_strings=["a", "b"],
        stop_token_ids=[7],
        constraint=pb.Constraint(choices=pb.Choices(texts=["x", "y"])),
        sampling=common_pb2.SamplingParameters(temperature=0.0, seed=5),
    )
    assert parse_parameters(parameters) == {
        "max_new_tokens": 0,
        "repetition_penalty": 1.5,
        "logit_biases": ((3, -2.0),),
        "stop_strings": ("a", "b"),
        "stop_token_ids": (7,),
        "constraint": ConstraintRequest(choices=("x", "y")),
        "temperature": 0.0,
        "seed": 5,
    }


def test_a_constraint_of_no_kind_is_refused():
    with pytest.raises(InvalidInputError, match="is of no kind"):
        parse_parameters(pb.GenerationParameters(constraint=pb.Constraint()))


def test_a_request_is_read_whole():
    request = pb.StreamGenerateTextRequest(
        truncate=True, echo=True, priority=-3, log_probabilities=pb.LogProbabilityOptions(top_token_count=2)
    )
    read = parse_request(request, deadline=9.0)
    assert (read.truncate, read.echo, read.priority, read.deadline, read.sample_count) == (True, True, -3, 9.0, 1)
    assert read.log_probabilities is not None
    assert (read.log_probabilities.num_top_tokens, read.log_probabilities.include_prompt) == (2, False)
