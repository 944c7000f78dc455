"""A replica: the serving layer of headway's server, without its ports, in the event loop of a Serve actor."""

from __future__ import annotations

import asyncio
import tempfile
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ray import serve

from headway_ray.placement import Refusal
from headway_server.errors import ForbiddenError, is_failure
from headway_server.log import configure_logging
from headway_server.observers import Call
from headway_server.runtime import Runtime
from headway_server.services import to_status
from headway_server.services.application import Application
from headway_server.serving.families import ServedModel
from headway_server.serving.host import ModelHost
from headway_server.serving.routes import Routes
from headway_server.settings import ServerSettings
from headway_server.transports.http import HttpServer

Part: TypeAlias = tuple[bytes, bytes]
"""A message, and the `google.rpc.Status` that ended the call instead; one of them is empty, or both are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """What came with a request, as the proxy hands it on."""

    method: str
    """Full name, `/package.Service/Method`."""
    metadata: tuple[tuple[str, str], ...]
    timeout_s: float | None
    """Seconds until the deadline, when the proxy sent it on."""
    caller: str
    request_id: str
    refusal: Refusal | None = None
    """What the replica answers in place of a model."""


_refusal: ContextVar[Refusal | None] = ContextVar("refusal", default=None)
"""Of the present request over HTTP."""


class _FixedModels(ModelHost):
    """The models of a deployment, which no call changes: other replicas would not follow."""

    async def _refuse(self, *_: object, **__: object) -> Any:
        raise ForbiddenError("on Ray the models are those of the deployment; change the store and deploy it anew")

    load = unload = scan = set_route = set_alias = _refuse

    def _find(self, *args: Any, **options: Any) -> ServedModel:
        _check_refusal()
        return super()._find(*args, **options)

    def _named(self, *args: Any, **options: Any) -> ServedModel:
        _check_refusal()
        return super()._named(*args, **options)


def _check_refusal() -> None:
    if (refusal := _refusal.get()) is not None:
        raise refusal.error


class Replica:
    """Answers the calls of the models of one deployment."""

    async def __init__(  # type: ignore[misc]  # Serve waits for it
        self, settings: ServerSettings, paths: Sequence[str], routes: Routes
    ) -> None:
        """Loads the models.

        Args:
            settings: Of the server; its ports are not used.
            paths: Of the bundles below the store; what comes into the store later is for another deployment.
            routes: Of the store, as they were then.
        """
        configure_logging(level=settings.log_level, line_format=settings.log_format, texts=settings.log_texts)
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name)
        for path in paths:
            (store / path).parent.mkdir(exist_ok=True)
            (store / path).symlink_to((settings.store / path).resolve())
        routes_file = store / "routes.json"
        routes_file.write_text(routes.model_dump_json(), encoding="utf-8")
        versions = settings.versions.model_copy(update={"poll_interval": 0, "routes_file": routes_file})
        own = settings.model_copy(update={"store": store, "versions": versions})
        runtime = Runtime(device=own.device, num_threads=own.threads, num_lanes=own.lanes)
        self._host = await asyncio.to_thread(_FixedModels.open, runtime, own)
        application = Application(self._host, own)
        self._calls, self._procedures = application.calls, application.procedures
        self._http = HttpServer(application).app
        self._host.start()
        weakref.finalize(self, self._host.close).atexit = False  # once its last call has ended

    def check_health(self) -> None:
        """Fails where a model has ended or hangs, so that Serve replaces this replica."""
        if unhealthy := self._host.unhealthy(stall_timeout_s=self._settings.stall_timeout):
            raise RuntimeError("; ".join(f"{path}: {reason}" for path, reason in unhealthy.items()))

    async def call(self, head: CallHead, data: bytes) -> Part:
        """Answers a call with one answer."""
        *_, part = [part async for part in self.stream(head, data)]
        return part

    async def stream(self, head: CallHead, data: bytes) -> AsyncGenerator[Part, None]:
        """Answers a call part by part."""
        procedure = self._procedures[head.method]
        deadline = None if head.timeout_s is None else time.monotonic() + head.timeout_s
        answered: Call | None = None
        try:
            rights = self._calls.identify(
                head.method,
                metadata=head.metadata,
                is_admin=procedure.is_admin,
                is_local=procedure.is_admin,  # which the models refuse
                caller=head.caller,
                request_id=head.request_id,
            )
            async with self._calls.answer(
                head.method,
                metadata=head.metadata,
                num_bytes=len(data),
                timeout_s=head.timeout_s,
                caller=head.caller,
                rights=rights,
                request_id=head.request_id,
            ) as answered:
                request = await procedure.parse(data)
                if head.refusal is not None:
                    raise head.refusal.error
                if procedure.is_stream:
                    async with aclosing(procedure.answer(request, deadline)) as responses:
                        async for response in responses:
                            yield response.SerializeToString(), b""
                else:
                    response = await procedure.answer(request, deadline)
                    yield response.SerializeToString(), b""
        except BaseException as error:  # the one place where every error becomes a status
            if not is_failure(error):
                raise
            status = to_status(error, head.method, answered, request_id=head.request_id)
            yield b"", status.SerializeToString()

    async def http(
        self, scope: dict[str, Any], body: bytes, refusal: Refusal | None
    ) -> AsyncGenerator[MutableMapping[str, Any], None]:
        """Answers a request over HTTP; yields the messages of ASGI.

        Args:
            scope: Of ASGI.
            body: Of the request.
            refusal: What is answered in place of a model; None: the model is here.
        """
        messages: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue(maxsize=16)
        received = False

        async def receive() -> dict[str, Any]:
            nonlocal received
            if received:
                await asyncio.Event().wait()  # a caller who goes has this call cancelled
            received = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def answer() -> None:
            _refusal.set(refusal)  # of this task alone
            try:
                await self._http({**scope, "state": {}}, receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.create_task(answer())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            task.cancel()

    def __repr__(self) -> str:
        return f"Replica({self._host!r})"


class SharedReplica:
    """Answers the calls of many models, of which it has as many as fit: it loads one when it is called."""

    def __init__(self, settings: ServerSettings, paths: Mapping[str, Sequence[str]], routes: Routes, most: int) -> None:
        """Loads nothing yet.

        Args:
            settings: As of `Replica`.
            paths: Those of a `Replica`, by the id of its models.
            routes: As of `Replica`.
            most: Of models at a time; the longest unused goes first.
        """

        async def load(model_id: str) -> Replica:
            made = Replica.__new__(Replica)
            await Replica.__init__(made, settings, paths[model_id], routes)
            return made

        self._get = serve.multiplexed(load, max_num_models_per_replica=most)

    async def call(self, head: CallHead, data: bytes) -> Part:
        """See `Replica`."""
        replica = await self._get(serve.get_multiplexed_model_id())
        part: Part = await replica.call(head, data)
        return part

    async def stream(self, head: CallHead, data: bytes) -> AsyncGenerator[Part, None]:
        """See `Replica`."""
        replica = await self._get(serve.get_multiplexed_model_id())
        async with aclosing(replica.stream(head, data)) as parts:
            async for part in parts:
                yield part

    async def http(
        self, scope: dict[str, Any], body: bytes, refusal: Refusal | None
    ) -> AsyncGenerator[MutableMapping[str, Any], None]:
        """See `Replica`."""
        replica = await self._get(serve.get_multiplexed_model_id())
        async with aclosing(replica.http(scope, body, refusal)) as messages:
            async for message in messages:
                yield message
