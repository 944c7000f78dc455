"""What a failed call tells its caller."""

from collections.abc import Awaitable
from dataclasses import dataclass

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed call, with its details unpacked."""

    code: grpc.StatusCode
    message: str
    reason: str | None = None
    incident: str | None = None
    field: str | None = None
    retry_after_s: float | None = None


async def failure_of(call: Awaitable[object]) -> Failure:
    """Waits for a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    facts: dict[str, object] = {}
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        detail = getattr(error_details_pb2, packed.TypeName().removeprefix("google.rpc."))()
        packed.Unpack(detail)
        if isinstance(detail, error_details_pb2.ErrorInfo):
            assert detail.domain == "headway"
            facts |= {"reason": detail.reason, "incident": detail.metadata.get("incident")}
        elif isinstance(detail, error_details_pb2.BadRequest):
            facts["field"] = detail.field_violations[0].field
        elif isinstance(detail, error_details_pb2.RetryInfo):
            facts["retry_after_s"] = detail.retry_delay.ToNanoseconds() / 1e9
    return Failure(code=error.code(), message=error.details() or "", **facts)
