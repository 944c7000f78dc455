"""From errors to HTTP: one table of statuses, with the types and codes that OpenAI's clients know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from google.rpc import status_pb2

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
    NoAlignmentError,
    NoAttentionError,
    NoChatTemplateError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    StoreUnavailableError,
    UnknownCallerError,
    UnknownFieldError,
    WrongTaskError,
)

Describe: TypeAlias = Callable[..., status_pb2.Status]
"""Describes an error to the caller of a method, and logs what is not the caller's business: as the servicers' own
transport does it (`to_status`), so that a call has the same reasons and messages by every protocol."""

_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_INTERNAL: Final = (500, _SERVER, "internal_error")
_RETRY_S: Final = 1.0
STATUS: Final[dict[type[RequestError], tuple[int, str, str]]] = {
    RequestTooLargeError: (413, _INVALID, "request_too_large"),  # before their base
    MediaTypeError: (415, _INVALID, "unsupported_media_type"),
    UnknownFieldError: (400, _INVALID, "unknown_parameter"),
    InvalidInputError: (400, _INVALID, "invalid_value"),
    ModelNotFoundError: (404, _INVALID, "model_not_found"),
    ImageNotFoundError: (404, _INVALID, "image_not_found"),
    BundleRejectedError: (409, _INVALID, "bundle_rejected"),
    StoreUnavailableError: (409, _INVALID, "store_unavailable"),
    WrongTaskError: (400, _INVALID, "wrong_task"),
    NoChatTemplateError: (400, _INVALID, "no_chat_template"),
    NoAlignmentError: (400, _INVALID, "no_alignment"),
    NoAttentionError: (400, _INVALID, "no_attention"),
    UnknownCallerError: (401, "authentication_error", "invalid_api_key"),
    ForbiddenError: (403, "permission_error", "forbidden"),
    BudgetError: (429, "rate_limit_error", "rate_limit_exceeded"),  # before its base
    OverloadedError: (429, "rate_limit_error", "overloaded"),
    DrainingError: (503, _SERVER, "draining"),
    DeadlineError: (504, _SERVER, "deadline_exceeded"),
    CancelledError: (499, _INVALID, "cancelled"),
}
"""Status, and type and code in OpenAI's form, of each kind of error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a caller is told of an error."""

    http_status: int
    kind: str
    """Type in OpenAI's form."""
    code: str
    """Code in OpenAI's form."""
    field: str | None
    """Of the request, where one is wrong."""
    retry_after_s: float | None
    """How long the caller is asked to wait, where another try may succeed."""
    status: status_pb2.Status
    """As gRPC has it, with its details."""

    @classmethod
    def of(cls, error: BaseException, status: status_pb2.Status) -> Failure:
        """Looks an error up, which `Describe` has made a status of."""
        found = next((row for kind, row in STATUS.items() if isinstance(error, kind)), _INTERNAL)
        retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else None
        return cls(
            http_status=found[0],
            kind=found[1],
            code=found[2],
            field=error.field if isinstance(error, InvalidInputError) else None,
            retry_after_s=_RETRY_S if isinstance(error, DrainingError) else retry_after_s,
            status=status,
        )
