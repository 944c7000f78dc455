"""Answers health checks: `grpc.health.v1.Health`.

The servicer of the library `grpc_health` holds a lock while it sends to a watcher, so that one who reads nothing keeps
every further state from being set. This one holds none, and its streams are sent as all others are.
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
    """The health of services by full name, and of the server as a whole by the empty one. Belongs to the event loop."""

    def __init__(self) -> None:
        """Knows the server alone, which is not serving yet."""
        self._states: dict[str, Any] = {"": _NOT_SERVING}
        self._changed = asyncio.Event()
        self._is_closing = False

    @property
    def procedures(self) -> dict[str, Procedure]:
        """Its methods by their full names."""
        methods = frozenset(method.name for method in SERVICE.methods)
        most = PARSED_ON_LOOP_BYTES
        return procedures_of(SERVICE, self, max_bytes=most, max_text_bytes=most, probes=methods)

    def set(self, service: str, *, is_serving: bool) -> None:
        """Sets the state of a service; of none after `close`."""
        if not self._is_closing:
            self._change({service: _SERVING if is_serving else _NOT_SERVING})

    def close(self) -> None:
        """Says from now on that nothing is serving."""
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
        """Says whether a service is serving.

        Raises:
            ServiceNotFoundError: There is none of that name.
        """
        state = self._states.get(request.service)
        if state is None:
            raise ServiceNotFoundError(f"there is no service {quoted(request.service)}")
        return health_pb2.HealthCheckResponse(status=state)

    async def List(
        self, _request: health_pb2.HealthListRequest, _deadline: float | None
    ) -> health_pb2.HealthListResponse:
        """Says of every service whether it is serving."""
        states = {service: health_pb2.HealthCheckResponse(status=state) for service, state in self._states.items()}
        return health_pb2.HealthListResponse(statuses=states)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, _deadline: float | None
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Says it now and whenever that changes; a state that was over before it could be sent is left out."""
        told = None
        while True:
            changed = self._changed  # before the state is read, so that no change is missed
            state = self._states.get(request.service, _UNKNOWN)
            if state != told:
                yield health_pb2.HealthCheckResponse(status=state)
                told = state
            else:
                await changed.wait()

    def __repr__(self) -> str:
        return f"Health({len(self._states) - 1} services{', closing' if self._is_closing else ''})"
