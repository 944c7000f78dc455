"""The application: a deployment for each model of a store, and the ingress that knows them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliApp
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from headway_ray.placement import SHARED, Placement, choose, place
from headway_ray.replica import Replica, SharedReplica
from headway_server.bundles import read_manifest
from headway_server.errors import RequestError
from headway_server.serving.host import read_store
from headway_server.settings import ServerSettings

_MOST_REPLICAS: Final = 1000


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

    def __init__(
        self, placements: Sequence[Placement], handles: Mapping[str, DeploymentHandle[Any]], max_bytes: int
    ) -> None:
        self._placements = list(placements)
        self._handles = dict(handles)
        self._max_bytes = max_bytes

    async def placements(self) -> list[Placement]:
        """Returns which models the deployments have."""
        return self._placements

    async def __call__(self, request: Request) -> Response:
        """Answers a request over HTTP, by the deployment of the model that it names."""
        path, received, size = request.url.path, [], 0
        async for part in request.stream():
            received.append(part)
            size += len(part)
            if size > self._max_bytes:
                return PlainTextResponse(f"the request has more than {self._max_bytes} bytes\n", 413)
        body = b"".join(received)
        try:
            placement = choose(self._placements, path.rpartition("/")[2], _model_of(path, body))
        except RequestError:
            placement = self._placements[0]  # which refuses it as this path refuses
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        handle = self._handles[placement.deployment].options(stream=True, method_name="http")
        if placement.model_id:
            handle = handle.options(multiplexed_model_id=placement.model_id)
        messages = handle.remote(scope, body)
        start = await anext(messages)

        async def parts() -> AsyncGenerator[bytes, None]:
            try:
                async for message in messages:
                    yield message.get("body", b"")
            finally:
                messages.cancel()

        response = StreamingResponse(parts(), start["status"])
        response.raw_headers = start["headers"]
        return response


_SCOPE: Final = ("type", "http_version", "method", "path", "raw_path", "query_string", "headers", "client", "scheme")
"""What a replica is told of a request."""


def _model_of(path: str, body: bytes) -> str:
    """Returns the name of the model in the path of the Open Inference Protocol, or in a body of JSON."""
    before, _, after = path.partition("/v2/models/")
    if not before and after:
        return after.partition("/")[0]
    try:
        found = json.loads(body)
    except ValueError:
        return ""
    name = found.get("model", "") if isinstance(found, dict) else ""
    return name if isinstance(name, str) else ""


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
    placements = place(bundles, routes, is_shared=bool(scaling.models_per_replica))
    if scaling.models_per_replica:
        own = {each.model_id: each.paths for each in placements}
        shared = _deployment(SHARED, SharedReplica, settings, scaling)
        handles = {SHARED: shared.bind(settings, own, routes, scaling.models_per_replica)}
    else:
        handles = {
            each.deployment: _deployment(each.deployment, Replica, settings, scaling).bind(settings, each.paths, routes)
            for each in placements
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
