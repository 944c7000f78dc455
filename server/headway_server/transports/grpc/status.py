"""From errors to gRPC statuses: one table, and details that programs can read.

Every status carries `google.rpc.ErrorInfo` with a reason that does not change between versions. A wrong field adds
`BadRequest`, an overload `RetryInfo`. What is not a `RequestError` is a bug: the caller gets INTERNAL and the number of
an incident, and the log the rest. An `ModelRunError` was logged where it was raised, once for all the calls it ended.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from headway_server.errors import (
    BudgetError,
    BundleRejectedError,
    CancelledError,
    DeadlineError,
    DrainingError,
    ForbiddenError,
    ImageNotFoundError,
    InvalidInputError,
    ModelNotFoundError,
    ModelRunError,
    NoAlignmentError,
    NoAttentionError,
    NoChatTemplateError,
    OverloadedError,
    RequestError,
    StoreUnavailableError,
    UnknownCallerError,
    WrongTaskError,
)
from headway_server.observers import Call

DOMAIN: Final = "headway"
INTERNAL_REASON: Final = "INTERNAL"
STATUS: Final[dict[type[RequestError], tuple[grpc.StatusCode, str]]] = {
    InvalidInputError: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT"),
    ModelNotFoundError: (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    ImageNotFoundError: (grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND"),
    BundleRejectedError: (grpc.StatusCode.FAILED_PRECONDITION, "BUNDLE_REJECTED"),
    StoreUnavailableError: (grpc.StatusCode.FAILED_PRECONDITION, "STORE_UNAVAILABLE"),
    WrongTaskError: (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_TASK"),
    NoChatTemplateError: (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE"),
    NoAlignmentError: (grpc.StatusCode.FAILED_PRECONDITION, "NO_ALIGNMENT"),
    NoAttentionError: (grpc.StatusCode.FAILED_PRECONDITION, "NO_ATTENTION"),
    UnknownCallerError: (grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_CALLER"),
    ForbiddenError: (grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN"),
    BudgetError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET_USED_UP"),  # before its base
    OverloadedError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    DrainingError: (grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    DeadlineError: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    CancelledError: (grpc.StatusCode.CANCELLED, "CANCELLED"),
}
"""Code and reason of each kind of error."""

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
    for kind, (code, reason) in STATUS.items():
        if isinstance(error, kind):
            return _status(code, _clip(str(error)), [_error_info(reason), *_details(error)])
    incident = secrets.token_hex(6)
    ids = {"request_id": request_id} if call is None else call.ids
    log = _log.bind(incident=incident, method=method, **ids)
    if isinstance(error, ModelRunError):
        log.error("internal error", reason=str(error))
    else:
        log.error("internal error", exc_info=error)
    message = f"internal error; the server's log has it as incident {incident}"
    return _status(grpc.StatusCode.INTERNAL, message, [_error_info(INTERNAL_REASON, incident=incident)])


def outcome_of(error: type[BaseException] | None) -> tuple[str, str]:
    """Returns the name of the code that a call ends with, and the reason, which is empty for OK.

    Args:
        error: Kind of the error that ended it; None if it was answered. `asyncio.CancelledError` ends a call whose
            caller has gone, and one whose deadline gRPC has ended.
    """
    if error is None:
        return grpc.StatusCode.OK.name, ""
    if issubclass(error, asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED.name, grpc.StatusCode.CANCELLED.name
    for kind, (code, reason) in STATUS.items():
        if issubclass(error, kind):
            return code.name, reason
    return grpc.StatusCode.INTERNAL.name, INTERNAL_REASON


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


def _status(code: grpc.StatusCode, message: str, details: list[Message]) -> status_pb2.Status:
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _clip(text: str) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= _MAX_MESSAGE_BYTES else data[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"
