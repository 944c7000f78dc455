"""The protocol in Serve's gRPC proxy: `serve start --grpc-servicer-functions headway_ray:add_services`.

Serve's own handlers pass on neither a call's deadline nor, of a stream, the details of its error. So the handlers here
call the deployments themselves, by their handles: those choose a replica by its queue, and tell the autoscaler of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status
from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from headway_ray.placement import Choice, Placement, Placements
from headway_ray.replica import CallHead, Part
from headway_ray.requests import joined_messages
from headway_server.errors import DrainingError, InvalidInputError, OverloadedError, is_failure
from headway_server.services import service_descriptors, to_status
from headway_server.serving.calls import REQUEST_ID, request_id_of
from headway_server.tasks.table import RPCS

Context = Any
"""`grpc.aio.ServicerContext`."""

_APPLICATION: Final = "application"
"""The metadata by which Serve's callers name an application."""
_DEFAULT_APPLICATION: Final = "default"
_KNOWN_FOR_S: Final = 5.0
"""How long a table of the deployments is used."""
_RETRY_S: Final = 0.1
_HEALTH_INTERVAL_S: Final = 1.0


class Deployments:
    """The deployments of an application. Belongs to the event loop."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._placements: Placements | None = None
        self._known_until = 0.0
        self._handles: dict[tuple[str, str, bool], DeploymentHandle[Any]] = {}
        self._looking = asyncio.Lock()

    async def placements(self) -> Placements:
        """Returns which models they have."""
        if self._placements is None or time.monotonic() > self._known_until:
            async with self._looking:
                if self._placements is None or time.monotonic() > self._known_until:
                    ingress = await asyncio.to_thread(serve.get_app_handle, self._application)
                    self._placements = await ingress.placements.remote()
                    self._known_until = time.monotonic() + _KNOWN_FOR_S
        return self._placements

    async def handle(self, placement: Placement, *, streams: bool = False) -> DeploymentHandle[Any]:
        """Returns what calls a deployment: its method `stream`, or `call`."""
        key = placement.deployment, placement.model_id, streams
        if (found := self._handles.get(key)) is None:
            made = await asyncio.to_thread(serve.get_deployment_handle, placement.deployment, self._application)
            made = made.options(stream=streams, method_name="stream" if streams else "call")
            found = made.options(multiplexed_model_id=placement.model_id) if placement.model_id else made
            self._handles[key] = found
        return found


class _Method:
    """A method of the protocol, answered by deployments."""

    def __init__(self, descriptor: MethodDescriptor, applications: dict[str, Deployments]) -> None:
        self._full_name = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
        self._request: type[Message] = GetMessageClass(descriptor.input_type)
        self._response: type[Message] = GetMessageClass(descriptor.output_type)
        self._rpc = RPCS[descriptor.name]
        self._applications = applications
        make: Any = grpc.unary_stream_rpc_method_handler if descriptor.server_streaming else None
        behaviour: Any = self.stream if descriptor.server_streaming else self.call
        self.handler: Any = (make or grpc.unary_unary_rpc_method_handler)(behaviour)  # bytes in, bytes out

    async def call(self, data: bytes, context: Context) -> bytes:
        """Answers a call with one answer."""
        head = _head(self._full_name, context)
        try:
            deployments = self._deployments(head)
            choice = await self._choose(deployments, data)
            message, status = await self._call(deployments, choice, replace(head, refusal=choice.refusal), data)
        except BaseException as error:
            if not is_failure(error):
                raise
            status = _describe(error, head)
        if status:
            await _abort(context, head, status)
        return message

    async def stream(self, data: bytes, context: Context) -> AsyncGenerator[bytes, None]:
        """Answers a call part by part."""
        head = _head(self._full_name, context)
        status = b""
        try:
            deployments = self._deployments(head)
            choice = await self._choose(deployments, data)
            handle = await deployments.handle(choice.placements[0], streams=True)
            parts = handle.remote(replace(head, refusal=choice.refusal), data)
            try:
                async for message, status in parts:
                    if not status:
                        yield message
            finally:
                parts.cancel()
        except BaseException as error:
            if not is_failure(error):
                raise
            status = _describe(error, head)
        if status:
            await _abort(context, head, status)

    def _deployments(self, head: CallHead) -> Deployments:
        name = _application(head.metadata)
        return self._applications.setdefault(name, Deployments(name))

    async def _choose(self, deployments: Deployments, data: bytes) -> Choice:
        try:
            request = self._request.FromString(data)
        except DecodeError as error:
            raise InvalidInputError("request", f"is no {self._request.DESCRIPTOR.name}") from error
        placements = await deployments.placements()
        return placements.choose(self._rpc, lambda field: getattr(request, field, None))

    async def _call_one(self, deployments: Deployments, placement: Placement, head: CallHead, data: bytes) -> Part:
        handle = await deployments.handle(placement)
        response = handle.remote(head, data)
        try:
            part: Part = await response
        except asyncio.CancelledError:  # the caller has gone, or its time is over
            response.cancel()
            raise
        return part

    async def _call(self, deployments: Deployments, choice: Choice, head: CallHead, data: bytes) -> Part:
        calls = (self._call_one(deployments, each, head, data) for each in choice.placements)
        parts = await asyncio.gather(*calls)
        failed = next((part for part in parts if part[1]), None)
        if failed is not None or len(parts) == 1:
            return failed or parts[0]
        return joined_messages(self._response, [message for message, _ in parts]), b""


class _Health:
    """The standard health service, for the application as a whole: Serve sees to the health of its replicas."""

    def __init__(self, applications: dict[str, Deployments]) -> None:
        self._applications = applications
        self.handlers: dict[str, Any] = {
            "/grpc.health.v1.Health/Check": grpc.unary_unary_rpc_method_handler(self.check),
            "/grpc.health.v1.Health/Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }

    async def check(self, _: bytes, context: Context) -> bytes:
        """Says SERVING if there is such an application."""
        name = _application(context.invocation_metadata() or ())
        try:
            placements = await self._applications.setdefault(name, Deployments(name)).placements()
        except Exception as error:  # whatever keeps Serve from answering
            if not is_failure(error):
                raise
            placements = None
        kind = health_pb2.HealthCheckResponse
        found: bytes = kind(status=kind.SERVING if placements is not None else kind.NOT_SERVING).SerializeToString()
        return found

    async def watch(self, data: bytes, context: Context) -> AsyncGenerator[bytes, None]:
        """Says so whenever it changes."""
        told = b""
        while True:
            if (found := await self.check(data, context)) != told:
                told = found
                yield found
            await asyncio.sleep(_HEALTH_INTERVAL_S)


class _Services(grpc.GenericRpcHandler):
    """Finds the methods by their full names."""

    def __init__(self) -> None:
        applications: dict[str, Deployments] = {}
        self._methods = {
            f"/{service.full_name}/{method.name}": _Method(method, applications).handler
            for service in service_descriptors()
            for method in service.methods
            if not method.client_streaming
        } | _Health(applications).handlers
        self._method_handlers = dict(self._methods)
        """What Serve replaces by handlers of its own, and tells by reflection."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See `grpc.GenericRpcHandler`."""
        return self._methods.get(handler_call_details.method)


def add_services(_: object, server: grpc.aio.Server) -> None:
    """Adds headway's protocol and the Open Inference Protocol to Serve's gRPC proxy."""
    server.add_generic_rpc_handlers((_Services(),))


def _application(metadata: Iterable[tuple[str, Any]]) -> str:
    return next((value for key, value in metadata if key == _APPLICATION), _DEFAULT_APPLICATION)


def _head(method: str, context: Context) -> CallHead:
    pairs = tuple((key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str))
    request_id = request_id_of(next((value for key, value in pairs if key == REQUEST_ID), ""))
    context.set_trailing_metadata(((REQUEST_ID, request_id),))
    return CallHead(
        method=method,
        metadata=pairs,
        timeout_s=context.time_remaining(),
        caller=context.peer(),
        request_id=request_id,
    )


def _describe(error: BaseException, head: CallHead) -> bytes:
    """Returns the status of an error of Serve's, or of this module's."""
    if isinstance(error, BackPressureError):
        error = OverloadedError("the queue of the model's deployment is full; call again", retry_after_s=_RETRY_S)
    elif isinstance(error, (RayActorError, RayServeException, TaskCancelledError)):
        error = DrainingError("the replica that answered has ended, or its application; call again")
    status: bytes = to_status(error, head.method, request_id=head.request_id).SerializeToString()
    return status


async def _abort(context: Context, head: CallHead, status: bytes) -> NoReturn:
    made = rpc_status.to_status(status_pb2.Status.FromString(status))
    await context.abort(made.code, made.details, (*made.trailing_metadata, (REQUEST_ID, head.request_id)))
    raise AssertionError("a call that was aborted goes on")
