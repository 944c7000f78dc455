"""From errors to HTTP, with the types and codes that OpenAI's clients know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.rpc import status_pb2

from headway_server.errors import DrainingError, InvalidInputError, OverloadedError
from headway_server.services.status import outcome_of

_RETRY_S: Final = 1.0


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
        """Looks an error up, which `to_status` has made a status of."""
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
