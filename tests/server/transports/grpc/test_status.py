"""Errors to statuses."""

import inspect
from base64 import b64encode
from urllib.parse import quote

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2

from headway_server import errors
from headway_server.batching.batcher import BatchError
from headway_server.decoding.core.step import StepError
from headway_server.services.status import OUTCOMES, to_status


def detail(status, kind):
    message = kind()
    assert any(packed.Unpack(message) for packed in status.details), f"{kind.__name__} is missing"
    return message


def test_every_kind_of_request_error_has_a_code_and_a_reason_of_its_own():
    kinds = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.RequestError) and kind is not errors.RequestError
    }
    assert set(OUTCOMES) == kinds
    own = [outcome for kind, outcome in OUTCOMES.items() if errors.InvalidInputError not in kind.__bases__]
    assert len({outcome.reason for outcome in own}) == len(own)
    assert len({outcome.openai_code for outcome in OUTCOMES.values()}) == len(OUTCOMES)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (errors.InvalidInputError("texts[3]", "is empty"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT"),
        (errors.ModelNotFoundError("no"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
        (errors.WrongTaskError("no"), grpc.StatusCode.FAILED_PRECONDITION, "WRONG_TASK"),
        (errors.NoChatTemplateError("no"), grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE"),
        (errors.OverloadedError("no", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
        (errors.DrainingError("no"), grpc.StatusCode.UNAVAILABLE, "DRAINING"),
        (errors.DeadlineError("no"), grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        (errors.CancelledError("no"), grpc.StatusCode.CANCELLED, "CANCELLED"),
    ],
)
def test_an_error_becomes_its_code_with_a_reason(error, code, reason):
    status = to_status(error, "/method")
    assert (status.code, status.message) == (code.value[0], str(error))
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("headway", reason)


def test_a_message_that_quotes_half_a_character_is_told_without_it():
    status = to_status(errors.InvalidInputError("texts", "is '\ud800'"), "/method")
    assert status.message == "texts: is '?'"
    [violation] = detail(status, error_details_pb2.BadRequest).field_violations
    assert violation.description == "is '?'"


def test_a_wrong_field_is_named():
    status = to_status(errors.InvalidInputError("texts[3]", "is empty"), "/method")
    [violation] = detail(status, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("texts[3]", "is empty")


def test_an_overload_says_when_to_come_back():
    status = to_status(errors.OverloadedError("full", 1.5), "/method")
    assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() == 1_500_000_000


def test_a_bug_is_logged_with_an_incident_and_hidden_from_the_caller():
    with structlog.testing.capture_logs() as lines:
        status = to_status(KeyError("/secret/path"), "/headway.v1.X/Y")
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in str(status)
    incident = detail(status, error_details_pb2.ErrorInfo).metadata["incident"]
    assert incident in status.message
    [line] = lines
    assert (line["incident"], line["method"], line["log_level"]) == (incident, "/headway.v1.X/Y", "error")
    assert isinstance(line["exc_info"], KeyError)


@pytest.mark.parametrize("kind", [errors.ModelRunError, BatchError, StepError])
def test_what_was_logged_where_it_was_raised_is_an_incident_without_a_traceback(kind):
    with structlog.testing.capture_logs() as lines:
        status = to_status(kind("the model could not be run"), "/headway.v1.X/Y")
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    [line] = lines
    assert line["incident"] in status.message
    assert line["reason"] == "the model could not be run"
    assert "exc_info" not in line


@pytest.mark.parametrize("character", ["d", "é", "中", "😀"])
def test_details_stay_below_what_clients_take_of_trailers(character):
    status = to_status(errors.InvalidInputError("f" * 100_000, character * 100_000), "/method")
    travels = len(quote(status.message)) + len(b64encode(status.SerializeToString()))
    assert travels < 8192 - 512, "and a few trailers of gRPC's own"
    assert status.message.startswith("ffff")
    assert status.message.endswith("…")
