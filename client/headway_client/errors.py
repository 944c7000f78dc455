"""Errors of the client.

HeadwayError                      base of this package's errors
├── ClientClosedError             a closed client is used again
├── StreamNotFinishedError        the answer of a stream is asked for before its last message
├── ProtocolError                 the server's answer does not follow the API
└── CallError                     a call failed; has its code, reason, field violations and retry delay
    ├── InvalidArgumentError      INVALID_ARGUMENT, OUT_OF_RANGE: a field of the request is wrong
    ├── NotFoundError             NOT_FOUND: there is no such model or version
    ├── FailedPreconditionError   FAILED_PRECONDITION: the model cannot do this
    ├── ResourceExhaustedError    RESOURCE_EXHAUSTED: the server's queue is full, or a message is too large
    ├── UnavailableError          UNAVAILABLE: the server cannot be reached or is shutting down
    ├── DeadlineExceededError     DEADLINE_EXCEEDED: the call took longer than its `timeout_s`
    ├── CallCancelledError        CANCELLED: the call was cancelled
    ├── UnimplementedError        UNIMPLEMENTED: the server does not know this RPC
    ├── UnauthenticatedError      UNAUTHENTICATED: the API key or the client certificate is missing or wrong
    ├── PermissionDeniedError     PERMISSION_DENIED: the caller may not do this
    ├── InternalError             INTERNAL: a fault of the server
    └── UnexpectedStatusError     UNKNOWN, and every code that headway-server never answers: a proxy answered

An argument of a wrong type raises `TypeError`, a number out of its field's range `ValueError`, an unreadable file
`OSError`. The server checks everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class HeadwayError(Exception):
    """Base of this package's errors. The message is for the user."""


class ClientClosedError(HeadwayError):
    """A closed client is used again."""


class StreamNotFinishedError(HeadwayError):
    """The answer of a stream is asked for before its last message."""


class ProtocolError(HeadwayError):
    """The server's answer does not follow the API."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the request that the server refused."""

    field: str
    """Path of the field, such as `texts[3]`."""
    description: str
    """What is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    """The `google.rpc` details of a status."""

    reason: str = ""
    """Machine-readable reason from `ErrorInfo`, such as `OVERLOADED`."""
    domain: str = ""
    """Domain of the reason, from `ErrorInfo`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Further values from `ErrorInfo`."""
    field_violations: tuple[FieldViolation, ...] = ()
    """Fields from `BadRequest`."""
    retry_delay_s: float | None = None
    """Seconds to wait before a retry, from `RetryInfo`; None if the server named none."""


class CallError(HeadwayError):
    """A call failed."""

    def __init__(
        self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN, details: ErrorDetails | None = None
    ) -> None:
        """Takes the server's message, the canonical code and the details of the status."""
        super().__init__(message, code, details)
        self.message = message
        self.code = code
        self.details = details or ErrorDetails()

    @property
    def reason(self) -> str:
        """Machine-readable reason, such as `OVERLOADED`; empty if the server named none."""
        return self.details.reason

    @property
    def field_violations(self) -> tuple[FieldViolation, ...]:
        """Fields of the request that the server refused."""
        return self.details.field_violations

    @property
    def retry_delay_s(self) -> float | None:
        """Seconds to wait before a retry; None if the server named none."""
        return self.details.retry_delay_s

    def __str__(self) -> str:
        """The code, the message, and the field violations that the message does not contain."""
        violations = [
            f"{violation.field}: {violation.description}"
            for violation in self.field_violations
            if violation.description not in self.message
        ]
        return "; ".join([f"{self.code.name}: {self.message}", *violations])


class InvalidArgumentError(CallError):
    """A field of the request is wrong."""


class NotFoundError(CallError):
    """There is no such model or version."""


class FailedPreconditionError(CallError):
    """The model cannot do this."""


class ResourceExhaustedError(CallError):
    """The server's queue is full, or a message is too large."""


class UnavailableError(CallError):
    """The server cannot be reached or is shutting down."""


class DeadlineExceededError(CallError):
    """The call took longer than its `timeout_s`."""


class CallCancelledError(CallError):
    """The call was cancelled."""


class UnimplementedError(CallError):
    """The server does not know this RPC."""


class UnauthenticatedError(CallError):
    """The API key or the client certificate is missing or wrong."""


class PermissionDeniedError(CallError):
    """The caller may not do this."""


class InternalError(CallError):
    """A fault of the server."""


class UnexpectedStatusError(CallError):
    """A code that headway-server never answers, such as UNKNOWN: a proxy answered, or another server."""


_KINDS: Mapping[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.INTERNAL: InternalError,
}


def error_type(code: grpc.StatusCode) -> type[CallError]:
    """Returns the class of the errors with a code."""
    return _KINDS.get(code, UnexpectedStatusError)


def from_rpc_error(error: grpc.RpcError, name_of: Callable[[str], str] = str) -> CallError:
    """Translates an error of gRPC, with the details of its status.

    Args:
        error: The error.
        name_of: Maps the server's field path to the caller's.
    """
    code = error.code()
    message = error.details() or "the server gave no reason"
    details = _details(error)
    named = []
    for violation in details.field_violations:
        if message.startswith(f"{violation.field}: "):
            message = name_of(violation.field) + message[len(violation.field) :]
        named.append(replace(violation, field=name_of(violation.field)))
    return error_type(code)(message, code, replace(details, field_violations=tuple(named)))


def _details(error: grpc.RpcError) -> ErrorDetails:
    """Reads ErrorInfo, BadRequest and RetryInfo; without readable details the result is empty."""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # its code or message contradicts the trailer, or the trailer is none
        status = None
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    has_retry = False
    for detail in () if status is None else status.details:
        with suppress(DecodeError):
            if detail.Is(retry.DESCRIPTOR):
                has_retry = detail.Unpack(retry)
            elif detail.Is(info.DESCRIPTOR):
                detail.Unpack(info)
            elif detail.Is(bad_request.DESCRIPTOR):
                detail.Unpack(bad_request)
    delay = retry.retry_delay
    return ErrorDetails(
        reason=info.reason,
        domain=info.domain,
        metadata=dict(info.metadata),
        field_violations=tuple(
            FieldViolation(violation.field, violation.description) for violation in bad_request.field_violations
        ),
        retry_delay_s=max(0.0, delay.seconds + delay.nanos / 1e9) if has_retry else None,
    )
