"""Methods of services, called by every transport: bytes are parsed to a request, which is answered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2

from headway_server.errors import InvalidInputError, RequestError, no_panics
from headway_server.observers import Call
from headway_server.preprocessing.pool import request_pool
from headway_server.services.status import to_status
from headway_server.services.wire import check_fields, no_message
from headway_server.serving.abilities import Effect
from headway_server.tasks.table import RPCS

Request = TypeVar("Request")

PARSED_ON_LOOP_BYTES: Final = 64 * 2**10
"""Maximum bytes of a request parsed on the event loop, at most 3 ms; 20 MiB of images take 10 ms."""

_LOOKING_PATHS: Final = re.compile(
    r"/metrics|/v1/models(/MODEL)?|/v2(/models/(stats|MODEL(/versions/VERSION)?(/config|/stats)?)|/repository/index)?"
)
"""HTTP routes by method name."""


@lru_cache(maxsize=256)
def is_look(method: str) -> bool:
    """Returns True for methods that only describe the server and its models, polled by pages and probes.

    They do not count as calls: on an idle server polling would dominate the metrics.

    Args:
        method: Full name of an RPC, `/package.Service/Method`, or path of a route.
    """
    rpc = RPCS.get(method.rpartition("/")[2])
    return (rpc is not None and rpc.effect is Effect.LOOKS) or _LOOKING_PATHS.fullmatch(method) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Procedure:
    """A method of a service."""

    name: str
    """Full name, `/package.Service/Method`."""
    request_type: type[Message]
    request: Descriptor
    """Describes it."""
    answer: Callable[..., Any]
    """Takes a request and its deadline in seconds of `time.monotonic` (None: no deadline). A coroutine, or with
    `is_stream` an asynchronous generator. With `takes_stream`, a coroutine that takes `StreamedCalls`."""
    is_stream: bool
    """True for a stream of responses."""
    takes_stream: bool
    """True for a stream of requests, each a call."""
    max_bytes: int
    """Largest request."""
    is_admin: bool
    """True if it changes the server."""
    is_probe: bool
    """True if it answers while the server drains, and does not count as a call."""

    async def parse(self, data: bytes) -> Any:
        """Parses a request, off the event loop if it is large.

        Raises:
            InvalidInputError: It is too large, has too many fields, or is not a message of this method.
        """
        if len(data) > self.max_bytes:
            raise InvalidInputError(
                "request",
                f"has {len(data)} bytes, the limit of this service is {self.max_bytes}; send it in several calls",
            )
        if len(data) <= PARSED_ON_LOOP_BYTES:
            return self._read(data)
        return await asyncio.get_running_loop().run_in_executor(request_pool(), self._read, data)

    def _read(self, data: bytes) -> Message:
        check_fields(data, self.request)
        try:
            return self.request_type.FromString(data)
        except DecodeError as error:
            raise no_message() from error


def procedures_of(
    service: ServiceDescriptor,
    servicer: object,
    *,
    max_bytes: int,
    max_text_bytes: int,
    probes: frozenset[str] = frozenset(),
) -> dict[str, Procedure]:
    """Returns the methods of a service by full name.

    Args:
        service: Descriptor of the service.
        servicer: Object with a method of each name.
        max_bytes: Maximum bytes of requests that have a field of bytes, such as images.
        max_text_bytes: Maximum bytes of other requests.
        probes: Names of the methods that answer while the server drains; their requests are small.
    """

    def procedure(method: MethodDescriptor) -> Procedure:
        limit = max_bytes if has_bytes_field(method.input_type) else max_text_bytes
        return Procedure(
            name=f"/{service.full_name}/{method.name}",
            request_type=GetMessageClass(method.input_type),
            request=method.input_type,
            answer=getattr(servicer, method.name),
            is_stream=method.server_streaming,
            takes_stream=method.client_streaming,
            max_bytes=min(limit, PARSED_ON_LOOP_BYTES) if method.name in probes else limit,
            is_admin=method.name in RPCS and RPCS[method.name].effect is Effect.CHANGES,
            is_probe=method.name in probes,
        )

    return {made.name: made for made in map(procedure, service.methods)}


def has_bytes_field(message: Descriptor) -> bool:
    """Returns True if a message, or a nested one, has a field of bytes."""
    seen: set[str] = set()

    def looks(at: Descriptor) -> bool:
        if at.full_name in seen:
            return False
        seen.add(at.full_name)
        return any(
            field.type == FieldDescriptor.TYPE_BYTES or (field.message_type is not None and looks(field.message_type))
            for field in at.fields
        )

    return looks(message)


class StreamedCall(Generic[Request]):
    """A request of a stream, a call by itself."""

    def __init__(
        self, data: bytes, begin: Callable[[bytes], AbstractAsyncContextManager[Call]], procedure: Procedure
    ) -> None:
        self._data = data
        self._begin = begin
        self._procedure = procedure
        self._call: Call | None = None

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[Request]:
        """Surrounds all work of the call, with its request. Errors are those of `Calls.answer`."""
        data, self._data = self._data, b""  # freed, as its bytes are not counted after the call
        async with self._begin(data) as self._call:
            with no_panics():
                request = await self._procedure.parse(data)
                del data
                yield request

    def status_of(self, error: Exception) -> status_pb2.Status:
        """Returns the status of the call's error; logs an internal one."""
        return to_status(error, self._procedure.name, self._call)


@dataclass(slots=True, kw_only=True)
class StreamedCalls(Generic[Request]):
    """Calls of a stream and their answers."""

    calls: AsyncIterator[StreamedCall[Request]]
    write: Callable[[object], Awaitable[None]]
    """Sends a message. CancelledError if the client disconnected."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Metadata of the stream; keys in lower case."""
    deadline: float | None = None
    """End of the caller's wait, in seconds of `time.monotonic`."""
    is_over: bool = False
    """True if the client disconnected, or did not read an answer in time."""
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # a transport takes one message at a time

    def __aiter__(self) -> AsyncIterator[StreamedCall[Request]]:
        return self.calls

    async def send(self, response: object) -> None:
        """Sends a message; safe for concurrent tasks.

        Raises:
            RequestError: The client disconnected, or see `PeerWaits.unread`.
        """
        async with self._writing:
            try:
                await self.write(response)
            except RequestError:
                self.is_over = True
                raise
