"""What a request may hold on the wire, counted before it is parsed."""

import time

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as pb
from headway.v1 import translation_service_pb2 as translation_pb
from headway_server.errors import InvalidInputError
from headway_server.services.wire import FEW_BYTES, MAX_FIELDS, MAX_PACKED, check_fields

REQUEST = pb.GenerateTextRequest.DESCRIPTOR
PARAMETERS = pb.GenerateTextRequest.DESCRIPTOR.fields_by_name["parameters"].number
BIASES = pb.GenerationParameters.DESCRIPTOR.fields_by_name["logit_biases"].number
STOP_IDS = pb.GenerationParameters.DESCRIPTOR.fields_by_name["stop_token_ids"].number


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def part(field: int, body: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(body)) + body


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateTextRequest(prompts=["a" * 4000] * 256),
        pb.GenerateTextRequest(
            conversations=[pb.Conversation(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="hi")] * 1024)]
        ),
        pb.GenerateTextRequest(
            prompts=["a"],
            parameters=pb.GenerationParameters(
                logit_biases=[pb.LogitBias(token_id=2**31 - 1, bias=-1)] * 1024,
                stop_token_ids=range(MAX_PACKED),
                constraint=pb.Constraint(choices=pb.Choices(texts=["x" * 1024] * 256)),
            ),
        ),
        translation_pb.TranslateTextRequest(
            texts=["a" * 100] * 256,
            phrase_constraints=[common_pb2.PhraseConstraints(required=["b", "c"], forbidden=["d"])] * 256,
        ),
    ],
)
def test_the_largest_ordinary_requests_pass(request_):
    check_fields(request_.SerializeToString(), request_.DESCRIPTOR)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (part(PARAMETERS, part(BIASES, b"") * 4_000_000), "parameters.logit_biases"),
        (part(PARAMETERS, b"") * 4_000_000, "parameters"),
        (part(PARAMETERS, part(STOP_IDS, b"\1" * 8_000_000)), "parameters.stop_token_ids"),
        (part(PARAMETERS, part(STOP_IDS, b"\1") * 2_000_000), "parameters.stop_token_ids"),
        (part(PARAMETERS, (varint(STOP_IDS << 3) + b"\1") * 2_000_000), "parameters"),
        (part(3, b"") * 4_000_000, "request"),
        (varint(1000 << 3) + b"\1" + (varint(1000 << 3) + b"\1") * 2_000_000, "request"),
        ((varint(1000 << 3 | 3) + varint(1000 << 3 | 4)) * 1_000_000, "request"),
    ],
    ids=["biases", "messages", "packed", "short packs", "unpacked", "texts", "unknown", "groups"],
)
def test_millions_of_elements_are_refused_in_milliseconds(data, field):
    began = time.thread_time()
    with pytest.raises(InvalidInputError, match=r"of the request to more than \d+; send several calls") as refused:
        check_fields(data, REQUEST)
    assert refused.value.field == field
    assert time.thread_time() - began < 0.05, "3 ms, and some for a busy machine"


@pytest.mark.parametrize(
    "data",
    [
        part(3, b"a" * 1000)[:-1],
        b"\x1a" + b"\xff" * 1000,
        b"\x1f" * 1000,
        part(PARAMETERS, part(BIASES, b"a" * 1000)[:-1]),
        part(PARAMETERS, b"\x0d\0\0") + bytes(1000),
        b"\x80" * 1000,
    ],
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(InvalidInputError, match="is not a message of this method"):
        check_fields(data, REQUEST)
    with pytest.raises(DecodeError):
        pb.GenerateTextRequest.FromString(data)


def test_a_small_request_is_not_counted():
    check_fields(b"\xff" * FEW_BYTES, REQUEST)


def test_messages_within_messages_without_end_are_refused():
    data = b""
    for _ in range(200):
        data = part(3, data)  # nested_type, of DescriptorProto
    with pytest.raises(InvalidInputError, match="is not a message"):
        check_fields(part(4, data), descriptor_pb2.FileDescriptorProto.DESCRIPTOR)


@given(st.binary(min_size=FEW_BYTES + 1, max_size=FEW_BYTES + 200), st.integers(0, 400), st.binary(max_size=8))
def test_what_the_library_reads_of_few_fields_passes(noise, position, change):
    """No request that is a message is refused as none."""
    valid = pb.GenerateTextRequest(
        prompts=["a" * 300, "b" * 300], parameters=pb.GenerationParameters(stop_token_ids=[1, 2, 300])
    ).SerializeToString()
    for data in (noise, valid[:position] + change + valid[position + len(change) :]):
        try:
            pb.GenerateTextRequest.FromString(data)
        except DecodeError:
            continue
        check_fields(data, REQUEST)


def test_as_many_fields_as_the_limit_pass():
    check_fields(part(3, b"") * MAX_FIELDS, REQUEST)
