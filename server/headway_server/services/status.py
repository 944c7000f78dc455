"""From errors to what each protocol tells of them: one table, and details that programs can read.

Every status carries `google.rpc.ErrorInfo` with a reason that does not change between versions. A wrong field adds
`BadRequest`, an overload `RetryInfo`. What is not a `RequestError` is a bug: the caller gets INTERNAL and the number of
an incident, and the log the rest. An `ModelRunError` was logged where it was raised, once for all the calls it ended.
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
    BudgetError,
    BundleRejectedError,
    CancelledError,
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
    """What a kind of error is called in each protocol."""

    code: int
    """Of gRPC: `google.rpc.Code`."""
    reason: str
    """In `google.rpc.ErrorInfo`; it does not change between versions."""
    http_status: int
    openai_type: str
    openai_code: str

    @property
    def code_name(self) -> str:
        """Name of the code of gRPC."""
        return str(code_pb2.Code.Name(self.code))


_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_LIMIT: Final = "rate_limit_error"
INTERNAL: Final = Outcome(code_pb2.INTERNAL, INTERNAL_REASON, 500, _SERVER, "internal_error")
OUTCOMES: Final[dict[type[RequestError], Outcome]] = {  # each before its base
    RequestTooLargeError: Outcome(code_pb2.INVALID_ARGUMENT, "INVALID_INPUT", 413, _INVALID, "request_too_large"),
    MediaTypeError: Outcome(code_pb2.INVALID_ARGUMENT, "INVALID_INPUT", 415, _INVALID, "unsupported_media_type"),
    UnknownFieldError: Outcome(code_pb2.INVALID_ARGUMENT, "INVALID_INPUT", 400, _INVALID, "unknown_parameter"),
    InvalidInputError: Outcome(code_pb2.INVALID_ARGUMENT, "INVALID_INPUT", 400, _INVALID, "invalid_value"),
    ModelNotFoundError: Outcome(code_pb2.NOT_FOUND, "MODEL_NOT_FOUND", 404, _INVALID, "model_not_found"),
    ImageNotFoundError: Outcome(code_pb2.NOT_FOUND, "IMAGE_NOT_FOUND", 404, _INVALID, "image_not_found"),
    ServiceNotFoundError: Outcome(code_pb2.NOT_FOUND, "SERVICE_NOT_FOUND", 404, _INVALID, "service_not_found"),
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
"""Of each kind of error."""


def outcome_of(error: type[BaseException]) -> Outcome:
    """Returns what a kind of error is called. `asyncio.CancelledError` ends a call whose caller has gone."""
    if issubclass(error, asyncio.CancelledError):
        return OUTCOMES[CancelledError]
    return next((outcome for kind, outcome in OUTCOMES.items() if issubclass(error, kind)), INTERNAL)


# Status and details travel in trailers, of which clients take 8 KiB, and a message may quote what the caller sent. It
# travels twice: in the details, in base64, and by itself, where a byte that is not ASCII takes three.
_MAX_MESSAGE_BYTES = 1000

_log = structlog.get_logger(__name__)


def to_status(
    error: BaseException, method: str, call: Call | None = None, *, request_id: str = ""
) -> status_pb2.Status:
    """Describes an error to the caller of `method`; what is not the caller's business is logged and left out.

    Args:
        error: What ended the call.
        method: Full name of the RPC.
        call: The call, for the log; None where it was refused before it began.
        request_id: Its name in logs, where there is no `call`.
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
    """Returns the name of the code that a call ends with, and the reason, which is empty for OK.

    Args:
        error: Kind of the error that ended it; None if it was answered.
    """
    if error is None:
        return "OK", ""
    outcome = outcome_of(error)
    return outcome.code_name, outcome.reason


def _details(error: BaseException) -> list[Message]:
    """Returns the details that are particular to a kind of error."""
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
    """Shortens a text, and makes it one that a message can hold: what callers write may have lone surrogates."""
    data = text.encode(errors="replace")
    return data[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + ("" if len(data) <= _MAX_MESSAGE_BYTES else "…")
