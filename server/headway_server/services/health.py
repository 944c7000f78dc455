"""Health checks: `grpc.health.v1.Health`.

The servicer of the library `grpc_health` holds a lock while it sends to a watcher, so a watcher that does not read
blocks all further changes. This servicer has no lock, and its streams have the same timeouts as others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from grpc_health.v1 import health_pb2

from headway_server.errors import ServiceNotFoundError
from headway_server.services.procedure import PARSED_ON_LOOP_BYTES, Procedure, procedures_of
from headway_server.serving.finding import quoted

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """Health of services by full name, and of the server by the empty name. For the event loop alone."""

    def __init__(self) -> None:
        """Starts with the server alone, not serving."""
        self._states: dict[str, Any] = {"": _NOT_SERVING}
        self._changed = asyncio.Event()
        self._is_closing = False

    @property
    def procedures(self) -> dict[str, Procedure]:
        """Its methods by full name."""
        methods = frozenset(method.name for method in SERVICE.methods)
        most = PARSED_ON_LOOP_BYTES
        return procedures_of(SERVICE, self, max_bytes=most, max_text_bytes=most, probes=methods)

    def set(self, service: str, *, is_serving: bool) -> None:
        """Sets the state of a service; no effect after `close`."""
        if not self._is_closing:
            self._change({service: _SERVING if is_serving else _NOT_SERVING})

    def close(self) -> None:
        """Sets all services to not serving, for good."""
        self._is_closing = True
        self._change(dict.fromkeys(self._states, _NOT_SERVING))

    def _change(self, states: dict[str, Any]) -> None:
        if states.items() <= self._states.items():
            return
        self._states |= states
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, _deadline: float | None
    ) -> health_pb2.HealthCheckResponse:
        """Returns the state of a service.

        Raises:
            ServiceNotFoundError: There is no service of that name.
        """
        state = self._states.get(request.service)
        if state is None:
            raise ServiceNotFoundError(f"there is no service {quoted(request.service)}")
        return health_pb2.HealthCheckResponse(status=state)

    async def List(
        self, _request: health_pb2.HealthListRequest, _deadline: float | None
    ) -> health_pb2.HealthListResponse:
        """Returns the state of every service."""
        states = {service: health_pb2.HealthCheckResponse(status=state) for service, state in self._states.items()}
        return health_pb2.HealthListResponse(statuses=states)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, _deadline: float | None
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Sends the state now and at every change; a state that changes before it is sent is skipped."""
        sent = None
        while True:
            changed = self._changed  # read before the state, so no change is missed
            state = self._states.get(request.service, _UNKNOWN)
            if state != sent:
                yield health_pb2.HealthCheckResponse(status=state)
                sent = state
            else:
                await changed.wait()

    def __repr__(self) -> str:
        return f"Health({len(self._states) - 1} services{', closing' if self._is_closing else ''})"
