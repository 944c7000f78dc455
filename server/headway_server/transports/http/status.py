"""HTTP statuses of errors, with the types and codes of OpenAI's clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.rpc import status_pb2

from headway_server.errors import DrainingError, InvalidInputError, OverloadedError
from headway_server.services.status import outcome_of

_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as reported to a caller."""

    http_status: int
    kind: str
    """Type in OpenAI's format."""
    code: str
    """Code in OpenAI's format."""
    field: str | None
    """Invalid field of the request, if any."""
    retry_after_s: float | None
    """Time to retry after, if a retry may succeed."""
    status: status_pb2.Status
    """gRPC status with its details."""

    @classmethod
    def of(cls, error: BaseException, status: status_pb2.Status) -> Failure:
        """Makes a failure from an error and its status of `to_status`."""
        outcome = outcome_of(type(error))
        retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else None
        return cls(
            http_status=outcome.http_status,
            kind=outcome.openai_type,
            code=outcome.openai_code,
            field=error.field if isinstance(error, InvalidInputError) else None,
            retry_after_s=_RETRY_S if isinstance(error, DrainingError) else retry_after_s,
            status=status,
        )
