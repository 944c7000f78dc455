"""The application: a deployment for each model of a store, and the ingress that knows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliApp
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from headway_ray.placement import SHARED, Choice, Placement, Placements, place
from headway_ray.replica import Replica, SharedReplica
from headway_ray.requests import HttpRequest, joined
from headway_server.bundles import read_manifest
from headway_server.serving.host import read_store
from headway_server.settings import ServerSettings

_MOST_REPLICAS: Final = 1000
_READ_ON_LOOP_BYTES: Final = 64 * 2**10
"""Of a request of so few bytes the model is read on the event loop."""


class Scaling(BaseModel):
    """How many replicas a model has: arguments of `serve run` beside the server's own settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    min_replicas: int = Field(default=1, ge=1, le=_MOST_REPLICAS)
    """Fewest of a model."""
    max_replicas: int = Field(default=1, ge=1, le=_MOST_REPLICAS)
    """Most of a model."""
    target_calls: float = Field(default=16.0, gt=0)
    """Calls that a replica should have at a time; with more there are more replicas, up to the most."""
    max_calls_per_replica: int = Field(default=256, ge=1)
    """Calls that a replica takes at a time; further ones wait in the proxy."""
    max_queued: int = Field(default=4096, ge=1)
    """Calls that wait in a proxy for a model; further ones are refused."""
    models_per_replica: int = Field(default=0, ge=0)
    """Most models that a replica holds, loaded when they are called: all models share one deployment then. 0: each has
    a deployment of its own."""
    upscale_delay_s: float = Field(default=10.0, ge=0)
    """How long there must be too many calls."""
    downscale_delay_s: float = Field(default=120.0, ge=0)
    """How long there must be too few."""


class Ingress:
    """Knows which deployment has which model, and hands requests over HTTP on to it."""

    def __init__(self, placements: Placements, handles: Mapping[str, DeploymentHandle[Any]], max_bytes: int) -> None:
        self._placements = placements
        self._handles = dict(handles)
        self._max_bytes = max_bytes

    async def placements(self) -> Placements:
        """Returns which models the deployments have."""
        return self._placements

    async def __call__(self, request: Request) -> Response:
        """Answers a request over HTTP, by the deployments that can."""
        received, size = [], 0
        async for part in request.stream():
            received.append(part)
            size += len(part)
            if size > self._max_bytes:
                return PlainTextResponse(f"the request has more than {self._max_bytes} bytes\n", 413)
        read = HttpRequest(
            path=request.url.path,
            content_type=request.headers.get("content-type", ""),
            body=b"".join(received),
        )
        if size <= _READ_ON_LOOP_BYTES:
            choice = self._choose(read)
        else:
            choice = await asyncio.to_thread(self._choose, read)
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        answers = await asyncio.gather(
            *(_Answer.begin(self._handle(each).remote(scope, read.body, choice.refusal)) for each in choice.placements)
        )
        failed = next((answer for answer in answers if answer.start["status"] != HTTPStatus.OK), None)
        if failed is not None or len(answers) == 1:
            told = failed or answers[0]
            for other in answers:
                if other is not told:
                    other.messages.cancel()
            return told.response()
        bodies = [await answer.body() for answer in answers]
        response = Response(joined(read.path, answers[0].content_type, bodies))
        own = [(name, value) for name, value in answers[0].start["headers"] if name != b"content-length"]
        response.raw_headers = [*own, (b"content-length", str(len(response.body)).encode())]
        return response

    def _choose(self, request: HttpRequest) -> Choice:
        return self._placements.choose(*request.asked())

    def _handle(self, placement: Placement) -> DeploymentHandle[Any]:
        handle = self._handles[placement.deployment].options(stream=True, method_name="http")
        return handle.options(multiplexed_model_id=placement.model_id) if placement.model_id else handle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a replica answers over HTTP."""

    start: Mapping[str, Any]
    """The first message of ASGI."""
    messages: Any
    """The others."""

    @classmethod
    async def begin(cls, messages: Any) -> Self:
        """Waits for the status."""
        return cls(start=await anext(messages), messages=messages)

    @property
    def content_type(self) -> str:
        """Of the body."""
        return next((value.decode() for name, value in self.start["headers"] if name == b"content-type"), "")

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yields the body as it comes."""
        try:
            async for message in self.messages:
                yield message.get("body", b"")
        finally:
            self.messages.cancel()

    async def body(self) -> bytes:
        """Returns the whole body."""
        return b"".join([part async for part in self.parts()])

    def response(self) -> Response:
        """Hands it on."""
        response = StreamingResponse(self.parts(), self.start["status"])
        response.raw_headers = self.start["headers"]
        return response


_SCOPE: Final = ("type", "http_version", "method", "path", "raw_path", "query_string", "headers", "client", "scheme")
"""What a replica is told of a request."""


def app(arguments: Mapping[str, str]) -> serve.Application:
    """Makes the application: `serve run headway_ray:app store=models threads=2 max-replicas=4`.

    Args:
        arguments: Settings of the server by the names of their flags, and fields of `Scaling`.

    Raises:
        StoreError: The store cannot be read.
        pydantic.ValidationError: A setting is wrong.
    """
    given = {name.replace("-", "_"): value for name, value in arguments.items()}
    scaling = Scaling.model_validate({name: given[name] for name in given.keys() & Scaling.model_fields.keys()})
    flags = [
        f"--{name}={value}" for name, value in arguments.items() if name.replace("-", "_") not in Scaling.model_fields
    ]
    settings = CliApp.run(ServerSettings, flags)
    settings = settings.model_copy(update={"threads": settings.threads or 1, "store": settings.store.resolve()})
    paths, routes = read_store(settings)
    bundles = ((path, read_manifest(settings.store / path)) for path in paths)
    placements = place(bundles, routes, settings, is_shared=bool(scaling.models_per_replica))
    if scaling.models_per_replica:
        own = {each.model_id: each.paths for each in placements.all}
        shared = _deployment(SHARED, SharedReplica, settings, scaling)
        handles = {SHARED: shared.bind(settings, own, routes, scaling.models_per_replica)}
    else:
        handles = {
            each.deployment: _deployment(each.deployment, Replica, settings, scaling).bind(settings, each.paths, routes)
            for each in placements.all
        }
    ingress = serve.deployment(name="ingress", ray_actor_options={"num_cpus": 0})(Ingress)
    return ingress.bind(placements, handles, settings.max_message_bytes)


def _deployment(name: str, kind: type, settings: ServerSettings, scaling: Scaling) -> Any:
    return serve.deployment(
        name=name,
        ray_actor_options={"num_cpus": settings.threads},
        max_ongoing_requests=scaling.max_calls_per_replica,
        max_queued_requests=scaling.max_queued,
        autoscaling_config={
            "min_replicas": scaling.min_replicas,
            "max_replicas": max(scaling.min_replicas, scaling.max_replicas),
            "target_ongoing_requests": scaling.target_calls,
            "upscale_delay_s": scaling.upscale_delay_s,
            "downscale_delay_s": scaling.downscale_delay_s,
        },
        graceful_shutdown_timeout_s=settings.drain_timeout,
    )(kind)
