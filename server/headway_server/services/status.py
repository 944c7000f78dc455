"""Statuses of errors in each protocol: one table, with machine-readable details.

Every status has `google.rpc.ErrorInfo` with a stable reason. An invalid field adds `BadRequest`, an overload
`RetryInfo`. Any other error than `RequestError` is a bug: the caller gets INTERNAL and an incident number, and the log
the rest. A `ModelRunError` is logged where it is raised, once for all the calls it ends.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Final

import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from headway_server.errors import (
    AnswerNotFoundError,
    BudgetError,
    BundleRejectedError,
    CancelledError,
    ContextLengthError,
    DeadlineError,
    DrainingError,
    ForbiddenError,
    ImageNotFoundError,
    InvalidInputError,
    MediaTypeError,
    ModelNotFoundError,
    ModelRunError,
    NoAlignmentError,
    NoAttentionError,
    NoChatTemplateError,
    NotOfferedError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    ServiceNotFoundError,
    StoreUnavailableError,
    UnknownCallerError,
    UnknownFieldError,
    WrongTaskError,
)
from headway_server.observers import Call

DOMAIN: Final = "headway"
INTERNAL_REASON: Final = "INTERNAL"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Names of a kind of error in each protocol."""

    code: int
    """gRPC code, `google.rpc.Code`."""
    reason: str
    """Stable reason in `google.rpc.ErrorInfo`."""
    http_status: int
    openai_type: str
    openai_code: str

    @property
    def code_name(self) -> str:
        """Name of the gRPC code."""
        return str(code_pb2.Code.Name(self.code))


_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_LIMIT: Final = "rate_limit_error"
INTERNAL: Final = Outcome(code_pb2.INTERNAL, INTERNAL_REASON, 500, _SERVER, "internal_error")
OUTCOMES: Final[dict[type[RequestError], Outcome]] = {  # subclasses before their base
    RequestTooLargeError: Outcome(code_pb2.INVALID_ARGUMENT, "INVALID_INPUT", 413, _INVALID, "request_too_large"),
    MediaTypeError: Outcome(code_pb2.INVALID_ARGUMENT, "INVALID_INPUT", 415, _INVALID, "unsupported_media_type"),
    UnknownFieldError: Outcome(code_pb2.INVALID_ARGUMENT, "INVALID_INPUT", 400, _INVALID, "unknown_parameter"),
    ContextLengthError: Outcome(code_pb2.INVALID_ARGUMENT, "INVALID_INPUT", 400, _INVALID, "context_length_exceeded"),
    InvalidInputError: Outcome(code_pb2.INVALID_ARGUMENT, "INVALID_INPUT", 400, _INVALID, "invalid_value"),
    ModelNotFoundError: Outcome(code_pb2.NOT_FOUND, "MODEL_NOT_FOUND", 404, _INVALID, "model_not_found"),
    ImageNotFoundError: Outcome(code_pb2.NOT_FOUND, "IMAGE_NOT_FOUND", 404, _INVALID, "image_not_found"),
    AnswerNotFoundError: Outcome(code_pb2.NOT_FOUND, "ANSWER_NOT_FOUND", 404, _INVALID, "response_not_found"),
    ServiceNotFoundError: Outcome(code_pb2.NOT_FOUND, "SERVICE_NOT_FOUND", 404, _INVALID, "service_not_found"),
    NotOfferedError: Outcome(code_pb2.UNIMPLEMENTED, "NOT_OFFERED", 501, _INVALID, "not_offered"),
    BundleRejectedError: Outcome(code_pb2.FAILED_PRECONDITION, "BUNDLE_REJECTED", 409, _INVALID, "bundle_rejected"),
    StoreUnavailableError: Outcome(
        code_pb2.FAILED_PRECONDITION, "STORE_UNAVAILABLE", 409, _INVALID, "store_unavailable"
    ),
    WrongTaskError: Outcome(code_pb2.FAILED_PRECONDITION, "WRONG_TASK", 400, _INVALID, "wrong_task"),
    NoChatTemplateError: Outcome(code_pb2.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE", 400, _INVALID, "no_chat_template"),
    NoAlignmentError: Outcome(code_pb2.FAILED_PRECONDITION, "NO_ALIGNMENT", 400, _INVALID, "no_alignment"),
    NoAttentionError: Outcome(code_pb2.FAILED_PRECONDITION, "NO_ATTENTION", 400, _INVALID, "no_attention"),
    UnknownCallerError: Outcome(
        code_pb2.UNAUTHENTICATED, "UNKNOWN_CALLER", 401, "authentication_error", "invalid_api_key"
    ),
    ForbiddenError: Outcome(code_pb2.PERMISSION_DENIED, "FORBIDDEN", 403, "permission_error", "forbidden"),
    BudgetError: Outcome(code_pb2.RESOURCE_EXHAUSTED, "BUDGET_USED_UP", 429, _LIMIT, "rate_limit_exceeded"),
    OverloadedError: Outcome(code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED", 429, _LIMIT, "overloaded"),
    DrainingError: Outcome(code_pb2.UNAVAILABLE, "DRAINING", 503, _SERVER, "draining"),
    DeadlineError: Outcome(code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504, _SERVER, "deadline_exceeded"),
    CancelledError: Outcome(code_pb2.CANCELLED, "CANCELLED", 499, _INVALID, "cancelled"),
}
"""Outcome of each kind of error."""


def outcome_of(error: type[BaseException]) -> Outcome:
    """Returns the outcome of a kind of error. `asyncio.CancelledError`: the client disconnected."""
    if issubclass(error, asyncio.CancelledError):
        return OUTCOMES[CancelledError]
    return next((outcome for kind, outcome in OUTCOMES.items() if issubclass(error, kind)), INTERNAL)


# Clients limit trailers to 8 KiB, and a message may quote the request. It is sent twice: in the details as base64, and
# by itself, where a byte that is not ASCII takes three.
_MAX_MESSAGE_BYTES = 1000

_log = structlog.get_logger(__name__)


def to_status(
    error: BaseException, method: str, call: Call | None = None, *, request_id: str = ""
) -> status_pb2.Status:
    """Returns the status of an error; internal details are logged and left out.

    Args:
        error: Error that ended the call.
        method: Full name of the RPC.
        call: The call, for the log; None if it was refused before it began.
        request_id: Its name in logs, without `call`.
    """
    outcome = outcome_of(type(error))
    if outcome is not INTERNAL:
        return _status(outcome, _clip(str(error)), [_error_info(outcome.reason), *_details(error)])
    incident = secrets.token_hex(6)
    ids = {"request_id": request_id} if call is None else call.ids
    log = _log.bind(incident=incident, method=method, **ids)
    if isinstance(error, ModelRunError):
        log.error("internal error", reason=str(error))
    else:
        log.error("internal error", exc_info=error)
    message = f"internal error; the server's log has it as incident {incident}"
    return _status(INTERNAL, message, [_error_info(INTERNAL_REASON, incident=incident)])


def ending_of(error: type[BaseException] | None) -> tuple[str, str]:
    """Returns the code's name and the reason of a finished call; the reason is empty for OK.

    Args:
        error: Kind of the error; None if the call was answered.
    """
    if error is None:
        return "OK", ""
    outcome = outcome_of(error)
    return outcome.code_name, outcome.reason


def _details(error: BaseException) -> list[Message]:
    """Returns the details specific to a kind of error."""
    if isinstance(error, InvalidInputError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_clip(error.field), description=_clip(error.description)
        )
        return [error_details_pb2.BadRequest(field_violations=[violation])]
    if isinstance(error, OverloadedError):
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []


def _error_info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)


def _status(outcome: Outcome, message: str, details: list[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=outcome.code, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _clip(text: str) -> str:
    """Shortens a text, and replaces lone surrogates, which messages cannot encode."""
    data = text.encode(errors="replace")
    return data[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + ("" if len(data) <= _MAX_MESSAGE_BYTES else "…")
