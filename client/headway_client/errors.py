"""Errors of the client.

HeadwayError                      what this package raises
├── ClientClosedError             a client that was closed is used again
├── StreamNotFinishedError        the answer of a stream is asked for before its last message
├── ProtocolError                 the server answered, but not as the API says
└── CallError                     a call failed: carries code, reason, fields, the wait that is asked for
    ├── InvalidArgumentError      INVALID_ARGUMENT, OUT_OF_RANGE: a field of the request is wrong
    ├── NotFoundError             NOT_FOUND: no such model or version
    ├── FailedPreconditionError   FAILED_PRECONDITION: the model cannot do this task
    ├── ResourceExhaustedError    RESOURCE_EXHAUSTED: the server's queue is full, or a message is too large
    ├── UnavailableError          UNAVAILABLE: the server is draining or cannot be reached
    ├── DeadlineExceededError     DEADLINE_EXCEEDED: the call took longer than its `timeout_s`
    ├── CallCancelledError        CANCELLED: the call was cancelled
    ├── UnimplementedError        UNIMPLEMENTED: the server does not know this RPC
    ├── AccessDeniedError         UNAUTHENTICATED, PERMISSION_DENIED
    └── InternalError             every other code: a fault of the server

A wrong type of an argument is a `TypeError`, a number its field cannot hold a `ValueError`, an image file that
cannot be read an `OSError`. Everything else about a request is for the server to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


class HeadwayError(Exception):
    """Base of every error this package raises; its message is for the user."""


class ClientClosedError(HeadwayError):
    """A client that was closed is used again."""


class StreamNotFinishedError(HeadwayError):
    """The answer of a stream is asked for before its last message arrived."""


class ProtocolError(HeadwayError):
    """The server answered, but not as the API says."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the request that the server refused."""

    field: str
    """Path of the field, such as `texts[3]`."""
    description: str
    """What is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    """What a status carried besides its code and message (`google.rpc`)."""

    reason: str = ""
    """Machine-readable reason of `ErrorInfo`, such as `QUEUE_FULL`."""
    domain: str = ""
    """Domain of the reason, of `ErrorInfo`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Further values of `ErrorInfo`."""
    field_violations: tuple[FieldViolation, ...] = ()
    """Fields that `BadRequest` names."""
    retry_delay_s: float | None = None
    """Seconds to wait before the call is tried again, of `RetryInfo`; None where the server named none."""


class CallError(HeadwayError):
    """A call failed."""

    def __init__(
        self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN, details: ErrorDetails | None = None
    ) -> None:
        """Takes the server's `message`, the canonical `code` and the details of the status."""
        super().__init__(message, code, details)
        self.message = message
        self.code = code
        self.details = details or ErrorDetails()

    @property
    def reason(self) -> str:
        """Machine-readable reason, such as `QUEUE_FULL`; empty where the server named none."""
        return self.details.reason

    @property
    def field_violations(self) -> tuple[FieldViolation, ...]:
        """Fields of the request that the server refused."""
        return self.details.field_violations

    @property
    def retry_delay_s(self) -> float | None:
        """Seconds to wait before another try, where the server named them."""
        return self.details.retry_delay_s

    def __str__(self) -> str:
        """The code, the message, and the fields the message does not tell of."""
        untold = [
            f"{violation.field}: {violation.description}"
            for violation in self.field_violations
            if violation.description not in self.message
        ]
        return "; ".join([f"{self.code.name}: {self.message}", *untold])


class InvalidArgumentError(CallError):
    """A field of the request is wrong."""


class NotFoundError(CallError):
    """No such model or version."""


class FailedPreconditionError(CallError):
    """The model cannot do this task."""


class ResourceExhaustedError(CallError):
    """The server's queue is full, or a message is too large."""


class UnavailableError(CallError):
    """The server is draining or cannot be reached."""


class DeadlineExceededError(CallError):
    """The call took longer than its `timeout_s`."""


class CallCancelledError(CallError):
    """The call was cancelled."""


class UnimplementedError(CallError):
    """The server does not know this RPC."""


class AccessDeniedError(CallError):
    """The server refuses this caller."""


class InternalError(CallError):
    """A fault of the server."""


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
    grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
}


def from_rpc_error(error: grpc.RpcError) -> CallError:
    """Translates what gRPC raised, with the details of its rich status, into this package's error."""
    code = error.code()
    message = error.details() or "the server gave no reason"
    return _KINDS.get(code, InternalError)(message, code, _details(error))


def _details(error: grpc.RpcError) -> ErrorDetails:
    """Reads the `google.rpc` details of a status; a status without them, or with damaged ones, has none."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # its code or message contradicts the trailer
        return ErrorDetails()
    return ErrorDetails() if status is None else _parse_status(status)


def _parse_status(status: status_pb2.Status) -> ErrorDetails:
    """Gathers ErrorInfo, BadRequest and RetryInfo; details of other kinds are left out."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    has_retry = False
    for detail in status.details:
        if detail.Is(retry.DESCRIPTOR):
            has_retry = detail.Unpack(retry)
        elif detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
    return ErrorDetails(
        reason=info.reason,
        domain=info.domain,
        metadata=dict(info.metadata),
        field_violations=tuple(
            FieldViolation(violation.field, violation.description) for violation in bad_request.field_violations
        ),
        retry_delay_s=retry.retry_delay.ToTimedelta().total_seconds() if has_retry else None,
    )
